"""Numbers for charts: quantiles, empirical distributions, rates of counters, and fewer points with the same outline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
    """(value, share of values up to it), ascending, at most `limit` points, with the smallest and the largest."""
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

    A counter that falls was restarted: that span counts as 0. Series appear on a page with their first event, so a
    counter is 0 in the samples before, unless they have an `error`. Other samples without the counter are left out.
    """
    known = _known(samples, path)
    step = max(1, -(-(len(known) - 1) // limit))
    chosen = known[::step] + known[-1:] * bool((len(known) - 1) % step)
    return [
        (end, max(0.0, value - previous) / (end - start))
        for (start, previous), (end, value) in pairwise(chosen)
        if end > start
    ]


def _known(samples: Sequence[dict[str, Any]], path: Sequence[str]) -> list[Point]:
    """(seconds, value) of a counter."""
    times = [number(sample.get("t_ms")) for sample in samples]
    values = [number(at(sample, *path)) for sample in samples]
    first = next((index for index, value in enumerate(values) if value is not None), len(values))
    filled = [
        0.0 if index < first < len(values) and not samples[index].get("error") else value
        for index, value in enumerate(values)
    ]
    pairs = zip(times, filled, strict=True)
    return [(time / 1e3, value) for time, value in pairs if time is not None and value is not None]
