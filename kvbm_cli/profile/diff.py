"""`kvbm profile diff`: the keys in which two resolved profiles differ, with both values and their origins.

A key that exists in only one profile (another engine, an absent tier) is shown if that profile sets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbm.config.load import DEFAULT, ResolvedProfile
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.show import VALUE_WIDTH, short_origin, shown
from kvbm_cli.terminal.console import noted, print_data, print_json

DIFFERENT = 1


Side = tuple[object, str] | None  # value and origin of a key in one profile, None if the profile has no such key


def diff_profiles(reference: str, other: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """Return 0 if the profiles are equal except for name and description, else DIFFERENT. Overrides apply to both."""
    before, after = resolve(reference, overrides=overrides), resolve(other, overrides=overrides)
    found = {key: sides for key, *sides in differences(before, after)}
    if as_json:
        print_json({key: {"a": _as_data(a), "b": _as_data(b)} for key, (a, b) in found.items()})
    else:
        for key, (a, b) in found.items():
            print_data("\n".join([key, _line("-", a), _line("+", b)]))
    return DIFFERENT if found else 0


def differences(before: ResolvedProfile, after: ResolvedProfile) -> Iterator[tuple[str, Side, Side]]:
    later = [key for key in after.values if key not in before.values]
    for key in [*before.values, *later]:
        sides = [(one.values[key], one.origins[key]) if key in one.values else None for one in (before, after)]
        is_only_a_default = None in sides and any(side is not None and side[1] == DEFAULT for side in sides)
        if key != "description" and value_of(sides[0]) != value_of(sides[1]) and not is_only_a_default:
            yield key, sides[0], sides[1]


def value_of(side: Side) -> object:
    return None if side is None else side[0]


def _line(sign: str, side: Side) -> str:
    if side is None:
        return f"  {sign} {shown(None)}"
    return noted(f"  {sign} {shown(side[0]).ljust(VALUE_WIDTH)}", f"# {short_origin(side[1])}")


def _as_data(side: Side) -> dict[str, object] | None:
    return None if side is None else {"value": side[0], "origin": side[1]}
