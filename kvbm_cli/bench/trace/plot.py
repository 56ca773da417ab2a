"""Plot of a hit-rate curve in a terminal: columns of block characters over a logarithmic axis, at most 80 wide."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvbm.config.sizes import UNITS
from kvbm_cli.bench.trace.hit_curve import HitCurve

EIGHTHS = " ▁▂▃▄▅▆▇█"
COLUMNS, ROWS, LABEL_CELLS = 68, 10, 8
FIRST_SHARE = 0.01  # the axis begins where the cache finds this share of the ideal, if that is within these decades
LEAST_DECADES, MOST_DECADES = 1, 3


def plot_lines(curve: HitCurve, *, bytes_per_token: int | None) -> list[str]:
    """Return the lines of the plot, none if nothing repeats. With `bytes_per_token`, the axis is in bytes, else in
    tokens."""
    first, last = curve.capacity_for(FIRST_SHARE), curve.capacity_for(1)
    if first is None or last is None:
        return []
    high = math.log10(last)
    low = min(max(math.log10(first), high - MOST_DECADES), high - LEAST_DECADES)
    capacities = [10 ** (low + (high - low) * column / (COLUMNS - 1)) for column in range(COLUMNS)]
    capacities[-1] = last
    heights = [curve.hit_rate(capacity) / curve.ideal * ROWS * 8 for capacity in capacities]
    lines = [_label(curve, row) + "│" + "".join(_cell(height, row) for height in heights) for row in _rows()]
    return [*(line.rstrip() for line in lines), *_axis(low, high, bytes_per_token)]


def _rows() -> range:
    return range(ROWS - 1, -1, -1)


def _cell(height: float, row: int) -> str:
    return EIGHTHS[min(8, max(0, round(height) - 8 * row))]


def _label(curve: HitCurve, row: int) -> str:
    """Return the hit rate at the top of a row, for the highest, the middle and the lowest one."""
    is_shown = row in (ROWS - 1, ROWS // 2 - 1)
    return f"{curve.ideal * (row + 1) / ROWS:.1%} ".rjust(LABEL_CELLS) if is_shown else " " * LABEL_CELLS


def _axis(low: float, high: float, bytes_per_token: int | None) -> list[str]:
    marks, labels = ["─"] * COLUMNS, ""
    unit = 1 if bytes_per_token is None else bytes_per_token
    for value, text in _ticks(10**low * unit, 10**high * unit, in_bytes=bytes_per_token is not None):
        column = round((math.log10(value / unit) - low) / (high - low) * (COLUMNS - 1))
        start = max(0, min(column - len(text) // 2, COLUMNS - len(text)))
        if start < len(labels) + (2 if labels else 0):
            continue
        marks[column] = "┴"
        labels = labels.ljust(start) + text
    name = "tokens of capacity" if bytes_per_token is None else "capacity"
    margin = " " * LABEL_CELLS
    return [f"{margin}└{''.join(marks)}", f"{margin} {labels}", f"{margin} {name.center(COLUMNS)}".rstrip()]


def _ticks(low: float, high: float, *, in_bytes: bool) -> Sequence[tuple[float, str]]:
    """Round values within the range, with their texts."""
    if in_bytes:
        values = [(4**power, _size(4**power)) for power in range(5, 60)]  # from 1 KiB
    else:
        values = [(digit * 10**power, _count(digit * 10**power)) for power in range(20) for digit in (1, 2, 5)]
    return [(value, text) for value, text in values if low <= value <= high]


def _size(byte_count: int) -> str:
    unit = max((name for name in UNITS if name.endswith("iB") and UNITS[name] <= byte_count), key=UNITS.__getitem__)
    return f"{byte_count // UNITS[unit]} {unit}"


def _count(count: int) -> str:
    for factor, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count // factor}{letter}"
    return str(count)
