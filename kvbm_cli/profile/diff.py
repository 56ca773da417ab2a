"""`kvbm profile diff`: the keys in which two resolved profiles differ, with both values and their origins.

A key that exists in only one profile (another engine, an absent tier) is shown if that profile sets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbm.config.load import DEFAULT, ResolvedProfile
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.show import VALUE_WIDTH, short_origin, shown
from kvbm_cli.terminal.console import noted, print_data, print_json

DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class Side:
    """Value and origin of a key in one profile; `exists` is False if the profile has no such key."""

    value: object
    origin: str
    exists: bool


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
        a, b = _side(before, key), _side(after, key)
        if key != "description" and a.value != b.value and not _is_only_a_default(a, b):
            yield key, a, b


def _is_only_a_default(a: Side, b: Side) -> bool:
    return any(not one.exists and other.origin == DEFAULT for one, other in ((a, b), (b, a)))


def _side(resolved: ResolvedProfile, key: str) -> Side:
    if key not in resolved.values:
        return Side(None, "", exists=False)
    return Side(resolved.values[key], resolved.origins[key], exists=True)


def _line(sign: str, side: Side) -> str:
    if not side.exists:
        return f"  {sign} {shown(None)}"
    return noted(f"  {sign} {shown(side.value).ljust(VALUE_WIDTH)}", f"# {short_origin(side.origin)}")


def _as_data(side: Side) -> dict[str, object] | None:
    return {"value": side.value, "origin": side.origin} if side.exists else None
