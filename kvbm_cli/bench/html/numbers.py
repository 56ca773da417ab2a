"""Reads values from summaries whose fields may be missing, and formats numbers for people.

Every function takes `None` for an unknown value and returns `None` for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

THIN = "\u202f"  # narrow space that does not break


def at(data: Any, *path: str) -> Any:
    """Return the value below the keys, `None` where one of them is missing."""
    for key in path:
        if not isinstance(data, dict):
            return None
        data = data.get(key)
    return data


def number(value: Any) -> float | None:
    """Return the value if it is a finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def strings(value: Any) -> list[str]:
    return [item for item in listing(value) if isinstance(item, str)]


def string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def milliseconds(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else _digits(amount)


def _digits(amount: float) -> str:
    size = abs(amount)
    return grouped(f"{amount:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}")


def grouped(digits: str) -> str:
    return digits.replace(",", THIN)


def count(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else grouped(f"{amount:,.0f}")


def decimal(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else _digits(amount)


def ratio(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else f"{amount:.{2 if abs(amount) < 10 else 1}f}"


def percent(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else f"{amount * 100:.0f}%"


def size(value: Any) -> str | None:
    amount = number(value)
    if amount is None:
        return None
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def interval(value: Any, shown: Callable[[Any], str | None] = ratio) -> str | None:
    """`1.9 to 2.8` for a list of two numbers."""
    ends = listing(value)
    low, high = (shown(end) for end in ends) if len(ends) == 2 else (None, None)
    return None if low is None or high is None else f"{low} to {high}"


def with_interval(value: str | None, ends: str | None) -> str | None:
    return value if value is None or ends is None else f"{value} ({ends})"
