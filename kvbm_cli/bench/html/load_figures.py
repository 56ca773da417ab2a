"""The charts of gains by pressure and of where the time of a request goes, and the costs of every arm."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvbm_cli.bench.html.figures import CellView, Figure, legend_of
from kvbm_cli.bench.html.markup import Markup, table
from kvbm_cli.bench.html.numbers import at, decimal, interval, listing, mapping, milliseconds, number, ratio, size
from kvbm_cli.bench.html.run_data import RequestPoint, RunData
from kvbm_cli.bench.html.series import increase, peak

PARTS = ("client late", "queue", "first token", "generation")


def ladder(run_data: RunData) -> Figure | None:
    """The paired ratio of every comparison over the pressure; `None` with fewer than two pressures."""
    lines: dict[str, list[list[float]]] = {}
    rows = []
    for cell in run_data.cells():
        pressure = number(cell.get("pressure"))
        for found in listing(cell.get("comparisons")):
            paired = at(found, "ttft_speedup_paired")
            mean, ends = number(at(paired, "geometric_mean")), listing(at(paired, "interval_95"))
            if pressure is None or mean is None:
                continue
            name = f"{found.get('measured')} against {found.get('reference')}, {workload_name(cell)}"
            low, high = (number(end) or mean for end in ends) if len(ends) == 2 else (mean, mean)
            lines.setdefault(name, []).append([pressure, low, mean, high])
            rows.append((name, decimal(pressure), ratio(mean), interval(ends), str(found.get("verdict"))))
    if max((len(points) for points in lines.values()), default=0) < 2:
        return None
    title = "Speed-up of the time to first token by pressure"
    return Figure(
        kind="ladder",
        title=title,
        note="Geometric mean over pairs of equal requests, with its 95% interval; above 1 is faster. "
        "Pressure: working set over the capacity of G1.",
        description="Line chart. "
        + "; ".join(
            f"{name}: " + ", ".join(f"{ratio(mean)} at pressure {decimal(p)}" for p, _, mean, _ in points)
            for name, points in lines.items()
        )
        + ".",
        legend=legend_of((f"arm-{index % 6}", name) for index, name in enumerate(lines)),
        data={"lines": [{"arm": index, "points": sorted(points)} for index, points in enumerate(lines.values())]},
        table=table(title, ("Comparison", "Pressure", "Speed-up", "95% interval", "Verdict"), rows),
    )


def workload_name(cell: dict[str, Any]) -> str:
    name = at(cell, "workload", "name")
    return name if isinstance(name, str) else str(cell["name"])


def parts_of_time(view: CellView) -> Figure | None:
    """Mean times of a request's parts, by arm."""
    found = {arm: _parts(view, arm, own) for arm, own in view.by_arm(view.answered).items()}
    known = {arm: parts for arm, parts in found.items() if parts is not None}
    if not known:
        return None
    has_queue = any(parts[1] is not None for parts in known.values())
    names = [name for name in PARTS if has_queue or name != "queue"]
    rows = {arm: [part for name, part in zip(PARTS, parts, strict=True) if name in names] for arm, parts in known.items()}
    title = "Where the time of a request goes, mean in ms"
    queue = "" if has_queue else " The server reports no queue time, so the first token includes it."
    return Figure(
        kind="parts",
        title=title,
        note=f"Mean over all answered requests.{queue}",
        description="Stacked bar chart. "
        + "; ".join(
            f"{arm}: " + ", ".join(f"{name} {milliseconds(part) or 'unknown'} ms" for name, part in zip(names, parts, strict=True))
            for arm, parts in rows.items()
        )
        + ".",
        legend=legend_of((f"part-{PARTS.index(name)}", name) for name in names),
        data={"arms": list(rows), "parts": [PARTS.index(name) for name in names], "rows": list(rows.values())},
        table=table(
            title,
            ("Arm", *names, "total"),
            [(arm, *map(milliseconds, parts), milliseconds(sum(p or 0 for p in parts))) for arm, parts in rows.items()],
        ),
    )


def _parts(view: CellView, arm: str, points: Sequence[RequestPoint]) -> list[float | None] | None:
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


def costs(view: CellView) -> Markup | None:
    """What every arm used, from the samples of its servers; `None` if there are none."""
    rows = []
    for arm in view.arms:
        runs = [r["run"] for r in view.run_data.runs if r["arm"] == arm and r["cell"] == view.cell["name"]]
        samples = [view.run_data.samples[run] for run in runs if run in view.run_data.samples]
        if samples:
            answered = sum(point.run in runs for point in view.answered)
            rows.append((arm, *_cost(samples, answered)))
    title = "Cost of the engine's process, by arm"
    header = ("Arm", "Host memory, peak", "SSD written per 1,000 requests", "CPU seconds per 1,000 requests")
    return table(title, (*header, "GPU energy, J per 1,000 requests"), rows) if rows else None


def _cost(samples: Sequence[Sequence[dict[str, Any]]], answered: int) -> tuple[str | None, ...]:
    peaks = [found for one in samples if (found := peak(one, "rss_bytes")) is not None]

    def per_thousand(*path: str) -> float | None:
        known = [increase(one, *path) for one in samples]
        amounts = [amount for amount in known if amount is not None]
        return sum(amounts) * 1e3 / answered if answered and len(amounts) == len(known) else None

    energy = [_energy(one) for one in samples]
    known_energy = [joules for joules in energy if joules is not None]
    has_energy = answered and len(known_energy) == len(energy)
    return (
        size(max(peaks, default=None)),
        size(per_thousand("disk", "written_bytes")),
        decimal(per_thousand("cpu_s")),
        decimal(sum(known_energy) * 1e3 / answered) if has_energy else None,
    )


def _energy(samples: Sequence[dict[str, Any]]) -> float | None:
    """Joules of all GPUs from the first to the last sample."""
    ends = [
        sum(joules) if joules and None not in joules else None
        for sample in (samples[0], samples[-1])
        for joules in [[number(mapping(gpu).get("energy_j")) for gpu in listing(sample.get("gpu"))]]
    ]
    first, last = ends
    return None if first is None or last is None else last - first
