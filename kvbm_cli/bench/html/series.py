"""Numbers for charts: quantiles, empirical distributions, rates of counters, and fewer points with the same outline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_cli.bench.html.numbers import at, number

Point = tuple[float, float]
ECDF_POINTS = 300
RATE_POINTS = 240


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the neighbours. `ordered` is sorted and not empty."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def quantiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [quantile(ordered, share) for share in shares]


def distribution(values: Sequence[float], limit: int = ECDF_POINTS) -> list[Point]:
    """(value, share of values up to it), ascending, with at most `limit` points, among them the smallest and largest."""
    ordered = sorted(values)
    last = len(ordered) - 1
    ranks = range(len(ordered)) if last < limit else (round(step * last / (limit - 1)) for step in range(limit))
    return [(ordered[rank], (rank + 1) / len(ordered)) for rank in dict.fromkeys(ranks)]


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points that keep the outline, by the largest triangle of three buckets (Steinarsson, 2013).

    `points` ascend in their first coordinate. The first and the last are kept. `limit` is at least 3.
    """
    if len(points) <= limit:
        return list(points)
    width = (len(points) - 2) / (limit - 2)
    kept = [points[0]]
    for bucket in range(limit - 2):
        start, end = 1 + int(bucket * width), 1 + int((bucket + 1) * width)
        following = points[end : min(len(points), 1 + int((bucket + 2) * width))] or points[-1:]
        middle = (sum(x for x, _ in following) / len(following), sum(y for _, y in following) / len(following))
        kept.append(max(points[start:end], key=lambda point: _triangle(kept[-1], point, middle)))
    return [*kept, points[-1]]


def _triangle(first: Point, second: Point, third: Point) -> float:
    """Twice its area."""
    return abs((first[0] - third[0]) * (second[1] - first[1]) - (first[0] - second[0]) * (third[1] - first[1]))


def rates(samples: Sequence[dict[str, Any]], *path: str, limit: int = RATE_POINTS) -> list[tuple[float, float]]:
    """(seconds since the start, increase per second until then) of a counter, over at most `limit` equal spans.

    A counter that falls was restarted: that span counts as 0. Samples without the counter are left out.
    """
    known = [
        (time / 1e3, value)
        for sample in samples
        if (time := number(sample.get("t_ms"))) is not None and (value := number(at(sample, *path))) is not None
    ]
    step = max(1, -(-(len(known) - 1) // limit))
    chosen = known[::step] + known[-1:] * bool((len(known) - 1) % step)
    return [
        (end, max(0.0, value - previous) / (end - start))
        for (start, previous), (end, value) in zip(chosen, chosen[1:], strict=False)
        if end > start
    ]


def increase(samples: Sequence[dict[str, Any]], *path: str) -> float | None:
    """The last known value of a counter minus the first. `None` if fewer than two samples have it."""
    known = [value for sample in samples if (value := number(at(sample, *path))) is not None]
    return known[-1] - known[0] if len(known) > 1 else None


def peak(samples: Sequence[dict[str, Any]], *path: str) -> float | None:
    return max((value for sample in samples if (value := number(at(sample, *path))) is not None), default=None)
