"""Numbers, sizes, rates and durations as text; a dash for what is unknown."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from kvbm.config.sizes import format_size

DURATIONS = (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48))  # (unit, seconds, first number that is not shown)
DAY_S = 86400
LAST_S = 253_402_300_799  # the end of the year 9999
RATES = (("GB/s", 1e9, 2), ("MB/s", 1e6, 0), ("kB/s", 1e3, 0))  # (unit, bytes per second, decimals)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown_size(byte_count: int | None) -> str:
    return "-" if byte_count is None else format_size(byte_count)


def time_since(moment: float | None) -> str:
    if moment is None:
        return "-"
    return duration(max(0.0, time.time() - moment))


def duration(seconds: float) -> str:
    for unit, length, limit in DURATIONS:
        if seconds < limit * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / DAY_S:,.0f} d"


def utc_time(unix_s: float) -> datetime:
    """Return the moment in UTC, or the nearest one that has a date: files may hold any number."""
    return datetime.fromtimestamp(min(max(unix_s, 0.0), LAST_S), UTC)


def shown_rate(bytes_per_s: float) -> str:
    """Format a rate in decimal units: `2.50 GB/s`."""
    for unit, size, decimals in RATES:
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.{decimals}f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def shown_ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"
