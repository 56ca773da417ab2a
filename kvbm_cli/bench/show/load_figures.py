"""Charts of gains by pressure, of the parts of a request's time, and of a pair of runs over time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbm_cli.bench.result.results import RequestRecord, percentile
from kvbm_cli.bench.show.elements import ReportTable, at, decimal, interval, number, ratio, thinned, versus
from kvbm_cli.bench.show.figures import ARM_STYLES, UNUSABLE, CellView, Figure, Report, arm_legend, rounded

PARTS = ("client late", "queue", "first token", "generation")
TIMELINE_POINTS = 600


def ladder(report: Report) -> Figure | None:
    """Return the paired ratio of every comparison over the pressure; `None` with fewer than two pressures."""
    lines: dict[tuple[str, str], list[list[float]]] = {}
    rows, unusable = [], []
    for cell in report.cells():
        pressure = cell["pressure"]
        for found in cell["comparisons"]:
            paired = found["ttft_speedup_paired"]
            if pressure is None or paired is None or (mean := paired["geometric_mean"]) is None:
                continue
            name, ends = f"{versus(found)}, {cell['workload']['name']}", paired["interval_95"]
            low, high = (end or mean for end in ends or (None, None))
            if found["verdict"] in UNUSABLE:
                unusable.append(f"{decimal(pressure)} ({found['verdict']})")
            lines.setdefault((found["measured"], name), []).append([pressure, low, mean, high])
            rows.append((name, found["verdict"], decimal(pressure), ratio(mean), interval(ends)))
    if max((len(points) for points in lines.values()), default=0) < 2:
        return None
    styles = _styles(report.arms(), [measured for measured, _ in lines])
    return Figure(
        kind="ladder",
        note="Geometric mean over pairs of equal requests, with its 95% interval; above 1 is faster. "
        "Pressure: working set over the capacity of G1."
        + (f" Not usable: pressure {', '.join(dict.fromkeys(unusable))}." if unusable else ""),
        legend=[(f"line arm-{arm % ARM_STYLES}", name) for (_, name), arm in zip(lines, styles, strict=True)],
        data={"lines": [{"arm": a, "points": sorted(p)} for a, p in zip(styles, lines.values(), strict=True)]},
        table=ReportTable(
            "Speed-up of the time to first token by pressure",
            ("Comparison", "Verdict", "Pressure", "Speed-up", "95% interval"),
            rows,
            names=2,
        ),
    )


def pareto(report: Report) -> list[Figure]:
    """Return the time to first token, and the time between tokens, over the throughput of every arm: a point per load
    of a sweep. Empty without a sweep."""
    metrics = (("ttft_ms", "TTFT", "time to first token"), ("itl_ms", "ITL", "time between tokens"))
    return [one for key, short, name in metrics if (one := _pareto(report, key, short, name)) is not None]


def _pareto(report: Report, key: str, short: str, name: str) -> Figure | None:
    lines: dict[tuple[str, str], list[list[float]]] = {}
    rows = []
    for cell in report.cells():
        load = _load_of(cell)
        for arm, own in cell["arms"].items():
            tokens, time_ms = own["throughput"]["output_tokens_per_s"], own[key]["p50"]
            if load is None or tokens is None or time_ms is None:
                continue
            tokens /= _ranks(report, arm)
            lines.setdefault((arm, _without_load(cell)), []).append([tokens, time_ms])
            per_core = decimal(at(own, "cost", "output_tokens_per_core_s"))
            rows.append((arm, str(cell["name"]), load, decimal(tokens), per_core, decimal(time_ms)))
    swept = {line: sorted(points) for line, points in lines.items() if len(points) > 1}
    if not swept:
        return None
    styles = [report.arms().index(arm) for arm, _ in swept]
    is_per_rank = any(_ranks(report, arm) > 1 for arm, _ in swept)
    title = f"Throughput{' per GPU' if is_per_rank else ''} and {name} by load"
    unit = "output tokens per second" + (" and GPU" if is_per_rank else "")
    return Figure(
        kind="pareto",
        note=f"A point per load. To the right and down is better: more tokens per second, and a shorter median {name} "
        "of the phase that the result is about.",
        legend=[(f"line arm-{style % ARM_STYLES}", arm) for style, (arm, _) in zip(styles, swept, strict=True)],
        data={
            "x": unit,
            "y": f"{short} p50, ms",
            "lines": [{"arm": style, "points": points} for style, points in zip(styles, swept.values(), strict=True)],
        },
        table=ReportTable(
            title, ("Arm", "Run", "Load", unit.capitalize(), "Per core second", f"{short} p50, ms"), rows, names=3
        ),
    )


def _ranks(report: Report, arm: str) -> float:
    return number(at(report.summary["arms"], arm, "ranks")) or 1.0


def _load_of(cell: Mapping[str, Any]) -> str | None:
    interval_s, sessions = cell["plan"]["interval_s"], cell["plan"]["concurrency"]
    if interval_s:
        return f"{1 / interval_s:.3g} requests/s"
    return f"{sessions} sessions" if sessions else None


def _without_load(cell: Mapping[str, Any]) -> str:
    """Return what cells of one sweep have in common."""
    kept = {key: value for key, value in cell["workload"].items() if key not in ("name", "schedule")}
    return json.dumps([cell["pressure"], kept], sort_keys=True)


def _styles(arms: list[str], measured: list[str]) -> list[int]:
    """Return the style of every line: that of its arm, or its own number if an arm has several lines."""
    if len(set(measured)) < len(measured) or not set(measured) <= set(arms):
        return list(range(len(measured)))
    return [arms.index(arm) for arm in measured]


def parts_of_time(view: CellView) -> Figure | None:
    """Mean times of a request's parts, by arm."""
    found = {arm: _parts(view, arm, own) for arm, own in view.by_arm(view.answered).items()}
    known = {arm: parts for arm, parts in found.items() if parts is not None}
    if not known:
        return None
    has_queue = any(parts[1] is not None for parts in known.values())
    names = [name for name in PARTS if has_queue or name != "queue"]
    rows = {
        arm: [part for name, part in zip(PARTS, parts, strict=True) if name in names] for arm, parts in known.items()
    }
    queue = "" if has_queue else " The server reports no queue time, so the first token includes it."
    return Figure(
        kind="parts",
        note=f"Mean over all answered requests.{queue}",
        legend=[(f"part-{PARTS.index(name)}", name) for name in names],
        data={"arms": list(rows), "parts": [PARTS.index(name) for name in names], "rows": list(rows.values())},
        table=ReportTable(
            "Where the time of a request goes, mean in ms",
            ("Arm", *names, "total"),
            [(arm, *map(decimal, parts), decimal(sum(p or 0 for p in parts))) for arm, parts in rows.items()],
        ),
    )


def _parts(view: CellView, arm: str, points: Sequence[RequestRecord]) -> list[float | None] | None:
    whole = [
        (point.lateness_ms or 0.0, point.ttft_from_launch_ms, point.end_to_end_ms - point.ttft_ms)
        for point in points
        if point.ttft_from_launch_ms is not None and point.end_to_end_ms is not None and point.ttft_ms is not None
    ]
    if not whole:
        return None
    late, first, generation = (fmean(column) for column in zip(*whole, strict=True))
    queue = number(at(view.cell, "arms", arm, "queue_wait_ms"))
    queue = None if queue is None else min(queue, first)
    known = (late, queue, first - (queue or 0.0), generation)
    return [None if part is None else round(part, 2) for part in known]


def timeline(view: CellView) -> Figure | None:
    """TTFT over the time of one pair."""
    pair = min(point.pair for point in view.answered)
    own = view.by_arm(point for point in view.answered if point.pair == pair)
    points = {arm: _launches(found) for arm, found in own.items()}
    if not any(points.values()):
        return None
    return Figure(
        kind="timeline",
        note=f"Pair {pair}; one mark per request. The table has medians.",
        legend=arm_legend(view, points, "mark"),
        data={
            "arms": [
                {"arm": view.number_of(name), "points": [rounded(point) for point in thinned(found, TIMELINE_POINTS)]}
                for name, found in points.items()
            ]
        },
        table=ReportTable("Time to first token over the run, in ms", ("Time", *points), _medians(points)),
    )


def _launches(points: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    known = [(p.launched_ms / 1e3, p.ttft_ms) for p in points if p.launched_ms is not None and p.ttft_ms is not None]
    return sorted(known)


def _medians(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[tuple[str | None, ...]]:
    """Return a row for each of ten equal parts of the time."""
    width = max(x for found in points.values() for x, _ in found) / 10 or 1.0
    rows: list[tuple[str | None, ...]] = []
    for part in range(10):
        own = [[y for x, y in found if part == min(9, int(x / width))] for found in points.values()]
        medians = (decimal(percentile(values, 50)) if values else None for values in own)
        rows.append((f"{part * width:.0f} to {(part + 1) * width:.0f} s", *medians))
    return rows
