"""Rounds the numbers of a result to what they carry."""

from __future__ import annotations

import math
from typing import Any, TypeVar

DIGITS = 4
Value = TypeVar("Value", bound=Any)


def rounded(value: Value) -> Value:
    """The same data with four significant digits below 1, four decimals above, and `None` for infinity."""
    result: Any = value
    if isinstance(value, float):
        if not math.isfinite(value):
            result = None
        else:
            result = round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")
    elif isinstance(value, dict):
        result = {key: rounded(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        result = [rounded(item) for item in value]
    return result
