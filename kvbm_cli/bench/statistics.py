"""Percentiles and the paired comparison of two arms. Pure, deterministic, standard library only.

Both arms run the same requests, so the comparison is paired: per request the log of baseline time over kvbm time, which
removes what differs between requests (length, turn) from the noise. Requests of one user are correlated, because they
share a history; the bootstrap therefore draws whole users, never single requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 10_000


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks, as numpy's default; `None` without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 and the mean, each `None` without values."""
    mean = sum(values) / len(values) if values else None
    return {
        "p50": percentile(values, 50),
        "p90": percentile(values, 90),
        "p99": percentile(values, 99),
        "mean": mean,
    }


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times faster the second arm is: geometric mean over pairs, with its 95 % interval."""

    ratio: float
    low: float
    high: float
    pair_count: int
    user_count: int


def paired_ratio(
    pairs_by_user: Mapping[int, Sequence[tuple[float, float]]], *, seed: int = 0, resamples: int = RESAMPLES
) -> PairedRatio | None:
    """Geometric mean of first / second over all pairs; the interval is a bootstrap that draws users with replacement.

    `None` without a pair. With a single user the interval has no width, since nothing is known about other users.
    """
    sums = [
        (sum(math.log(first / second) for first, second in pairs), len(pairs))
        for _, pairs in sorted(pairs_by_user.items())
        if pairs
    ]
    if not sums:
        return None
    generator = random.Random(seed)
    means = []
    for _ in range(resamples):
        drawn = generator.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    low, high = percentile(means, 2.5), percentile(means, 97.5)
    assert low is not None
    assert high is not None
    pair_count = sum(count for _, count in sums)
    return PairedRatio(
        ratio=math.exp(sum(total for total, _ in sums) / pair_count),
        low=math.exp(low),
        high=math.exp(high),
        pair_count=pair_count,
        user_count=len(sums),
    )


def busy_share(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Share of [start, end] that at least one of the intervals covers; 0 for an empty window."""
    if end <= start:
        return 0.0
    covered, reached = 0.0, start
    for begin, finish in sorted(intervals):
        begin, finish = max(begin, reached), min(finish, end)
        if finish > begin:
            covered += finish - begin
            reached = finish
    return covered / (end - start)
