"""`kvbm profile diff`: the keys in which two resolved profiles differ, each with both values and their origins.

Keys that one of them has not, because it has no such tier or another engine, are told where the other one sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.show import VALUE_WIDTH, short_origin, shown
from kvbm_cli.terminal.console import noted, print_data, print_json

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class Side:
    """What one profile has for a key; `is_there` is False where it has no such key."""

    value: object
    origin: str
    is_there: bool


def diff_profiles(reference: str, other: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """0 if they mean the same, whatever they are called and described as; else DIFFERENT. `overrides` are for both."""
    before, after = resolve(reference, overrides), resolve(other, overrides)
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
    from kvbm.config.load import DEFAULT

    return any(not one.is_there and other.origin == DEFAULT for one, other in ((a, b), (b, a)))


def _side(resolved: ResolvedProfile, key: str) -> Side:
    if key not in resolved.values:
        return Side(None, "", is_there=False)
    return Side(resolved.values[key], resolved.origins[key], is_there=True)


def _line(sign: str, side: Side) -> str:
    if not side.is_there:
        return f"  {sign} {shown(None)}"
    return noted(f"  {sign} {shown(side.value).ljust(VALUE_WIDTH)}", f"# {short_origin(side.origin)}")


def _as_data(side: Side) -> dict[str, object] | None:
    return {"value": side.value, "origin": side.origin} if side.is_there else None
