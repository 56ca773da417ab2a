"""Percentiles, Student's t, Wilson's interval, and the share of busy time. Pure, standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

# A percentile is reported from this many values.
LEAST_COUNTS = {50: 5, 90: 20, 95: 72, 99: 368}
# Its 95% interval is reported from this many: the smallest n with max(p, 1 - p) ** n <= 0.025. All n values are on one
# side of the true percentile with at most that probability. With less, no two order statistics enclose it with 95%.
LEAST_COUNTS_FOR_INTERVAL = {50: 6, 90: 36, 95: 72, 99: 368}

# Student's t at 97.5 % by 1 / degrees of freedom.
_T_975 = (
    *((0.0, 1.960), (1 / 120, 1.980), (1 / 60, 2.000), (1 / 40, 2.021), (1 / 30, 2.042), (1 / 25, 2.060)),
    *((1 / 20, 2.086), (1 / 15, 2.131), (1 / 12, 2.179), (1 / 10, 2.228), (1 / 9, 2.262), (1 / 8, 2.306)),
    *((1 / 7, 2.365), (1 / 6, 2.447), (1 / 5, 2.571), (1 / 4, 2.776), (1 / 3, 3.182), (1 / 2, 4.303), (1.0, 12.71)),
)
_Z_975 = 1.959964


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile by linear interpolation between the nearest ranks, numpy's default; `None` without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p95, p99, mean and count. A percentile is `None` if there are too few values for it."""
    ordered = sorted(values)
    percentiles = {
        f"p{percent}": percentile(ordered, percent) if len(ordered) >= least else None
        for percent, least in LEAST_COUNTS.items()
    }
    return {**percentiles, "mean": math.fsum(ordered) / len(ordered) if ordered else None, "count": len(ordered)}


def student_t(degrees_of_freedom: float) -> float:
    """Student's t at 97.5 %: infinite below one degree of freedom, else interpolated in 1 / degrees of freedom.

    t is convex in that variable, so an interpolated value is slightly too large, never too small.
    """
    if degrees_of_freedom < 1:
        return math.inf
    inverse = 1 / degrees_of_freedom
    (left, low), (right, high) = next((below, above) for below, above in pairwise(_T_975) if inverse <= above[0])
    return low + (high - low) * (inverse - left) / (right - left)


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share. Unlike the normal interval, it holds for shares close to 0 and 1."""
    assert 0 <= successes <= count, (successes, count)
    if count == 0:
        return 0.0, 1.0
    share, z2 = successes / count, _Z_975**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z_975 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, 1.0 if successes == count else min(1.0, centre + half)


def busy_share(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Share of [start, end] that the union of the intervals covers; 0 for an empty window."""
    if end <= start:
        return 0.0
    covered, reached = 0.0, start
    for begin, finish in sorted(intervals):
        begin, finish = max(begin, reached), min(finish, end)
        if finish > begin:
            covered += finish - begin
            reached = finish
    return covered / (end - start)
