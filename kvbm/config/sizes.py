"""Parses and formats sizes with units: `100GB` is 100e9 bytes, `64GiB` is 64 * 2**30 bytes.

A number without a unit is refused, because it is ambiguous: the variables of NVIDIA's block manager count in GB, most
other settings in bytes.
"""

from __future__ import annotations

import re
from decimal import Decimal

from kvbm.text.outside import shortened

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
MAX_BYTES = 2**60

_BY_LOWER = {unit.lower(): factor for unit, factor in UNITS.items()}
_PATTERN = re.compile(r"(?P<number>(?:0|[1-9][0-9]*)(?:\.[0-9]+)?) ?(?P<unit>[A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes, rounded down. ValueError with the end of a message."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a size such as 100GB or 64GiB, not `{shortened(text)}`")
    number, unit = match["number"], match["unit"]
    if not unit:
        raise ValueError(f"requires a unit, such as `{number}GB` or `{number}GiB`")
    factor = _BY_LOWER.get(unit.lower())
    if factor is None:
        raise ValueError(f"has the unknown unit `{shortened(unit)}`; units are {', '.join(UNITS)}")
    byte_count = int(Decimal(number) * factor)
    if not 0 < byte_count <= MAX_BYTES:
        raise ValueError(f"must be more than 0 and at most 1024PiB, not `{shortened(text)}`")
    return byte_count


def exact_size(byte_count: int) -> str:
    """Format bytes for a profile without loss, in the largest unit that divides them: `2500MB`, `1GiB`."""
    unit = max((unit for unit, factor in UNITS.items() if byte_count % factor == 0), key=UNITS.__getitem__)
    return f"{byte_count // UNITS[unit]}{unit}"


def whole_size(byte_count: int, *, rounds_up: bool = False) -> str:
    """Format bytes for a profile in whole decimal units, rounded down or up: `25GB`."""
    unit = next((unit for unit in ("TB", "GB", "MB") if byte_count >= 10 * UNITS[unit]), "KB")
    return f"{(byte_count + (UNITS[unit] - 1) * rounds_up) // UNITS[unit]}{unit}"


def format_size(byte_count: int) -> str:
    """Format bytes for display, in binary units: `1.0 GiB`."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if byte_count >= UNITS[unit]:
            return f"{byte_count / UNITS[unit]:.1f} {unit}"
    return f"{byte_count} B"
