"""Rounds the numbers of a result to what they carry."""

from __future__ import annotations

import math
from typing import Any

DIGITS = 4


def rounded(value: Any) -> Any:
    """Return the same data with four significant digits below 1, four decimals above, and `None` for infinity."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
