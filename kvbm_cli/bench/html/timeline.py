"""The chart of one pair of runs over time: TTFT, and below it the sources of prompt tokens and the evictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_cli.bench.html.figures import SOURCES, CellView, Figure, arm_legend, legend_of, rounded, source_legend
from kvbm_cli.bench.html.markup import Markup, table
from kvbm_cli.bench.html.numbers import count, milliseconds
from kvbm_cli.bench.html.run_data import TIERS, RequestPoint
from kvbm_cli.bench.html.series import quantiles, rates, thinned

TIMELINE_POINTS = 600


def timeline(view: CellView) -> Figure | None:
    """TTFT over the time of one pair, with the sources of prompt tokens and the evictions of one arm below."""
    if not view.answered:
        return None
    pair = min(point.pair for point in view.answered)
    own = view.by_arm(point for point in view.answered if point.pair == pair)
    points = {arm: _launches(found) for arm, found in own.items()}
    if not any(points.values()):
        return None
    arm = _arm_with_samples(view, pair, list(own))
    server = None if arm is None else _server(view.run_data.samples[_run_of(view, pair, arm)])
    sources = [tier for tier in TIERS if server and _has_events(server["tokens"][tier])]
    title = "Time to first token over the run, in ms"
    note = f"Pair {pair}; one mark per request."
    if server is not None:
        shown = ["prompt tokens by source"] * bool(sources) + ["evictions"] * _has_events(server["evictions"])
        title += f", with the server's {' and '.join(shown)} per second" if shown else ""
        note += f" Counters of arm {arm}."
        note += " There were no evictions." if server["evictions"] and "evictions" not in shown else ""
    return Figure(
        kind="timeline",
        title=title,
        note=note,
        description=_timeline_in_words(points, arm, server),
        legend=Markup(
            arm_legend(view, points, "mark") + (source_legend([*sources]) if sources else "") + _evictions_key(server)
        ),
        data={
            "arms": [
                {"arm": view.number_of(name), "points": [rounded(point) for point in thinned(found, TIMELINE_POINTS)]}
                for name, found in points.items()
            ],
            "sources": sources,
            "server": server,
            "has_evictions": server is not None and _has_events(server["evictions"]),
        },
        table=_timeline_table(title, points, arm, server),
    )


def _evictions_key(server: dict[str, Any] | None) -> Markup:
    return legend_of([("line evictions", "evictions")]) if server and _has_events(server["evictions"]) else Markup("")


def _launches(points: Sequence[RequestPoint]) -> list[tuple[float, float]]:
    known = [(p.launched_ms / 1e3, p.ttft_ms) for p in points if p.launched_ms is not None and p.ttft_ms is not None]
    return sorted(known)


def _run_of(view: CellView, pair: int, arm: str) -> str:
    return next(p.run for p in view.answered if p.pair == pair and p.arm == arm)


def _arm_with_samples(view: CellView, pair: int, arms: list[str]) -> str | None:
    """Return the arm under test, or the first that has samples of its server."""
    with_samples = [arm for arm in arms if _run_of(view, pair, arm) in view.run_data.samples]
    kinds = {arm: view.run_data.summary["arms"].get(arm) for arm in with_samples}
    tested = [arm for arm, is_ in kinds.items() if isinstance(is_, dict) and is_.get("kind") in ("kvbm", "profile")]
    return next(iter([*tested, *with_samples]), None)


def _server(samples: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    tokens = {tier: [rounded(point) for point in rates(samples, "prompt_tokens", tier)] for tier in TIERS}
    evictions = [rounded(point) for point in rates(samples, "evictions")]
    if not evictions and not any(tokens.values()):
        return None
    return {"tokens": tokens, "evictions": evictions}


def _has_events(line: Sequence[Sequence[float]]) -> bool:
    return any(rate for _, rate in line)


def _timeline_in_words(
    points: dict[str, list[tuple[float, float]]], arm: str | None, server: dict[str, Any] | None
) -> str:
    spans = [f"{name}: {count(len(found))} requests" for name, found in points.items()]
    text = f"Scatter chart of time to first token by launch time. {'; '.join(spans)}."
    return text if server is None else f"{text} Below: counters of the server, per second, of arm {arm}."


def _timeline_table(
    title: str, points: dict[str, list[tuple[float, float]]], arm: str | None, server: dict[str, Any] | None
) -> Markup:
    """Medians in ten equal parts of the time."""
    end = max(x for found in points.values() for x, _ in found)
    width = end / 10 or 1.0
    tokens = server["tokens"] if server else {}
    tiers = [tier for tier in TIERS if tokens.get(tier)]
    rows = []
    for part in range(10):
        own = {a: [y for x, y in found if part == min(9, int(x / width))] for a, found in points.items()}
        medians = [milliseconds(quantiles(values, (0.5,))[0]) if values else None for values in own.values()]
        means = [_mean_between(tokens[tier], part * width, (part + 1) * width) for tier in tiers]
        rows.append((f"{part * width:.0f} to {(part + 1) * width:.0f} s", *medians, *map(count, means)))
    heads = [f"{name}, median ms" for name in points]
    return table(title, ("Time", *heads, *(f"{arm}, {SOURCES[t].partition(',')[0]} tokens/s" for t in tiers)), rows)


def _mean_between(line: Sequence[Sequence[float]], start: float, end: float) -> float | None:
    own = [rate for time, rate in line if start < time <= end]
    return sum(own) / len(own) if own else None
