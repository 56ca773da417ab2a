"""Numbers, sizes and ages as text; a dash for what is unknown."""

from __future__ import annotations

import time

from kvbm.config.sizes import format_size

UNITS = (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48))  # (unit, seconds, largest number shown)
DAY_S = 86400


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown_size(byte_count: int | None) -> str:
    return "-" if byte_count is None else format_size(byte_count)


def time_since(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0, int(time.time() - moment))
    for unit, length, most in UNITS:
        if seconds < length * most:
            return f"{seconds // length} {unit}"
    return f"{seconds // DAY_S:,} d"
