"""What each chart of a cell shows: its data, and the same numbers as a table, whose caption is its title.

A function returns `None` if the run has no data for its chart. Times are in ms, rounded to 0.01.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_cli.bench.result.results import ALL, TIERS, CellResult, RequestRecord, Results, percentile
from kvbm_cli.bench.show.elements import ReportTable, count, decimal, distribution

SOURCES = {
    "g1": "G1, device memory",
    "g2": "G2, host memory",
    "g3": "G3, disk",
    "g4": "G4, shared",
    "cached": "cached, tier unknown",
    "computed": "computed",
}
QUARTILES = (25, 50, 75)
WHISKERS = (5, 25, 50, 75, 95)
ARM_STYLES = 6
UNUSABLE = ("invalid", "wrong")  # verdicts
Legend = list[tuple[str, str]]  # style and name


@dataclass(frozen=True, slots=True)
class Figure:
    """`data` goes to the script that draws `kind`. `table` replaces the chart for readers who do not see it."""

    kind: str
    note: str
    legend: Legend
    data: dict[str, Any]
    table: ReportTable


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page shows. `notes` name what is damaged or missing in the directory of the results."""

    summary: dict[str, Any]
    results: Results
    notes: Sequence[str] = ()

    def cells(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.summary["cells"]
        return found

    def arms(self) -> list[str]:
        """Every arm, in the order of the summary."""
        return list(dict.fromkeys([*self.summary["arms"], *(run.arm for run in self.results.runs)]))


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell of the summary with its answered requests, and the arms by which colours are chosen."""

    cell: dict[str, Any]
    result: CellResult
    arms: list[str]
    answered: list[RequestRecord]

    @classmethod
    def of(cls, report: Report, cell: dict[str, Any]) -> CellView:
        result = next(one for one in report.results.cells if one.name == cell["name"])
        own = [record for run in result.runs for record in run.records if record.is_ok and record.ttft_ms is not None]
        return cls(cell, result, report.arms(), own)

    @property
    def primary(self) -> list[RequestRecord]:
        """The requests that the verdict is about."""
        return [record for record in self.answered if self.result.is_primary(record)]

    @property
    def primary_name(self) -> str:
        """Which requests `primary` are, for notes."""
        phase = self.result.primary
        return "all answered requests" if phase == ALL else f"requests of the phase `{phase}`"

    def by_arm(self, records: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
        """Return the requests of every arm that has some, in the order of the arms."""
        found: dict[str, list[RequestRecord]] = {arm: [] for arm in self.arms}
        for record in records:
            found[record.arm].append(record)
        return {arm: own for arm, own in found.items() if own}

    def number_of(self, arm: str) -> int:
        return self.arms.index(arm)


def arm_legend(view: CellView, arms: Iterable[str], shape: str = "line") -> Legend:
    return [(f"{shape} arm-{view.number_of(arm) % ARM_STYLES}", arm) for arm in arms]


def times(records: Iterable[RequestRecord]) -> list[float]:
    return [record.ttft_ms for record in records if record.ttft_ms is not None]


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 2) for value in values]


def by_turn(view: CellView) -> Figure | None:
    """Median and quartiles of TTFT per turn and arm; every phase counts."""
    turns = sorted({record.turn for record in view.answered})
    if len(turns) < 2:
        return None
    found: dict[str, list[list[float]]] = {}
    rows = []
    for arm, own in view.by_arm(view.answered).items():
        found[arm] = []
        for turn in turns:
            values = times(record for record in own if record.turn == turn)
            if values:
                low, median, high = rounded(percentile(values, one) for one in QUARTILES)
                found[arm].append([turn, low, median, high])
                rows.append((arm, str(turn), *map(decimal, (low, median, high)), count(len(values))))
    return Figure(
        kind="turns",
        note=f"Median and quartiles of all {count(len(view.answered))} answered requests.",
        legend=arm_legend(view, found),
        data={"arms": [{"arm": view.number_of(arm), "points": lines} for arm, lines in found.items()]},
        table=ReportTable(
            "Time to first token by turn, in ms",
            ("Arm", "Turn", "Lower quartile", "Median", "Upper quartile", "Requests"),
            rows,
            names=2,
        ),
    )


def source_of(record: RequestRecord) -> str | None:
    """Return the source of most of the prompt's tokens. `None` if the server reports no source."""
    tokens = record.tokens
    if not tokens.keys() & {*TIERS} - {TIERS[-1]} and record.cached_tokens is not None:
        tokens["cached"] = record.cached_tokens
    return max(tokens, key=lambda tier: tokens[tier]) if len(tokens) > 1 else None


def by_source(view: CellView) -> Figure | None:
    """TTFT of requests whose prompts came mostly from one source."""
    groups: dict[str, dict[str, list[float]]] = {}
    for arm, own in view.by_arm(view.answered).items():
        for record in own:
            source = source_of(record)
            if source is not None and record.ttft_ms is not None:
                groups.setdefault(arm, {}).setdefault(source, []).append(record.ttft_ms)
    sources = [source for source in SOURCES if any(source in own for own in groups.values())]
    if not sources:
        return None
    boxes = {
        arm: {source: rounded(percentile(values, one) for one in WHISKERS) for source, values in own.items()}
        for arm, own in groups.items()
    }
    return Figure(
        kind="sources",
        note="A request counts for the source of most of its prompt tokens. "
        "Box: quartiles and median; whiskers: 5% to 95%.",
        legend=arm_legend(view, groups, "box"),
        data={
            "sources": [SOURCES[source].partition(",")[0] for source in sources],
            "arms": [
                {"arm": view.number_of(arm), "boxes": [own.get(source) for source in sources]}
                for arm, own in boxes.items()
            ],
        },
        table=ReportTable(
            "Time to first token by source of the prompt, in ms",
            ("Source", "Arm", "5%", "Lower quartile", "Median", "Upper quartile", "95%", "Requests"),
            [
                (SOURCES[source], arm, *map(decimal, own[source]), count(len(groups[arm][source])))
                for source in sources
                for arm, own in boxes.items()
                if source in own
            ],
            names=2,
        ),
    )


def ecdf(view: CellView) -> Figure | None:
    """Which share of the requests had their first token within which time."""
    values = {arm: times(own) for arm, own in view.by_arm(view.primary).items()}
    if not values:
        return None
    lines = {arm: distribution(own) for arm, own in values.items()}
    percents = (5, 10, 25, 50, 75, 90, 95)
    found = {arm: [percentile(own, one) for one in percents] for arm, own in values.items()}
    return Figure(
        kind="ecdf",
        note=f"Empirical distribution over {view.primary_name}. A line further left is faster.",
        legend=arm_legend(view, lines),
        data={
            "arms": [
                {"arm": view.number_of(arm), "points": [[round(x, 2), round(y, 4)] for x, y in points]}
                for arm, points in lines.items()
            ]
        },
        table=ReportTable(
            "Share of requests with their first token within a time, in ms",
            ("Arm", *(f"{one}%" for one in percents), "Requests"),
            [(arm, *map(decimal, times_ms), count(len(values[arm]))) for arm, times_ms in found.items()],
        ),
    )
