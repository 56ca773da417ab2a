"""Percentiles and the paired comparison of two arms. Pure, deterministic, standard library only.

Both arms run the same requests, so the comparison is paired: the log of reference time over measured time, per request.
Differences between requests (length, turn) therefore add no noise. Requests of one user are correlated, because they
share a history. The interval is therefore Student's t over the means of the users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t at 97.5 %, by degrees of freedom; infinite for 0, because one user says nothing about others.
_T_975 = (math.inf, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145)


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
    """p50, p90, p99 and the mean, each `None` without values."""
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {**percentiles, "mean": sum(values) / len(values) if values else None}


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times faster the second arm is: the geometric mean over pairs, with its 95% interval."""

    ratio: float
    low: float
    high: float
    pair_count: int
    user_count: int


def paired_ratio(pairs_by_user: Mapping[int, Sequence[tuple[float, float]]]) -> PairedRatio | None:
    """Geometric mean of first / second with equal weight per user; the interval is Student's t over the users' means.

    `None` without a pair. With one user the interval is 0 to infinity.
    """
    sums = [
        (sum(math.log(first / second) for first, second in pairs), len(pairs))
        for _, pairs in sorted(pairs_by_user.items())
        if pairs
    ]
    if not sums:
        return None
    means = [total / count for total, count in sums]
    half = _T_975[min(len(means) - 1, len(_T_975) - 1)] * (
        stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 1
    )
    centre = fmean(means)
    pair_count = sum(count for _, count in sums)
    return PairedRatio(
        math.exp(centre), math.exp(centre - half), math.exp(centre + half), pair_count, user_count=len(sums)
    )


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
