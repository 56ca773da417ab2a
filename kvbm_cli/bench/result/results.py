"""Results: the runs of an experiment, read from the files of its directory; all that is printed follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.result.directory import FORMAT, PLAN, BenchDirectory, cell_plan
from kvbm_cli.bench.result.requests import RequestRecord
from kvbm_cli.bench.workload.plan import Plan
from kvbm_cli.bench.workload.script import Phase

ALL = "all"  # the primary phase of a cell in which no request can reuse anything
DIGITS = 4


@dataclass(frozen=True, slots=True)
class RunResult:
    """One arm, once. `facts` is the line of runs.jsonl."""

    run: str
    arm: str
    pair: int
    facts: Mapping[str, Any]
    records: tuple[RequestRecord, ...]

    @property
    def client(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.facts["client"]
        return found

    @property
    def server(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.facts["server"]
        return found


@dataclass(frozen=True, slots=True)
class CellResult:
    """All runs of one cell, and its plan; `plan` is `None` for a faithful run of LMBenchmark, which has none.

    `are_pairs_equal` is false if servers that cannot be emptied got other prompts in every pair. `primary` is the phase
    that the result is about; `all` if no request can reuse anything.
    """

    definition: Mapping[str, Any]
    plan: Plan | None
    digest: str | None
    runs: tuple[RunResult, ...]
    are_pairs_equal: bool = True
    primary: str = field(init=False)

    def __post_init__(self) -> None:
        phases = {record.phase for run in self.runs for record in run.records}
        primary = next((phase.value for phase in (Phase.STEADY, Phase.FILL) if phase.value in phases), ALL)
        object.__setattr__(self, "primary", primary)

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    def of_arm(self, arm: str) -> tuple[RunResult, ...]:
        return tuple(run for run in self.runs if run.arm == arm)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def is_primary(self, record: RequestRecord) -> bool:
        return self.primary in (ALL, record.phase)

    def primary_records(self, run: RunResult) -> list[RequestRecord]:
        """Those that were answered."""
        return [record for record in run.records if record.is_ok and self.is_primary(record)]

    @property
    def pairs_done(self) -> int:
        return max((run.pair for run in self.runs), default=0)


@dataclass(frozen=True, slots=True)
class Results:
    """`plan` is the content of plan.json."""

    plan: Mapping[str, Any]
    cells: tuple[CellResult, ...]

    @property
    def arms(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.plan["arms"]
        return found

    @property
    def runs(self) -> list[RunResult]:
        """Those that have ended, in the order of the cells."""
        return [run for cell in self.cells for run in cell.runs]

    @classmethod
    def read(cls, directory: BenchDirectory) -> Results:
        """UsageError for a file that is missing, damaged, or of another format."""
        plan = directory.read_json(PLAN)
        if plan.get("format") != FORMAT:
            raise UsageError(
                f"{directory.path / PLAN}: `format` is {plan.get('format', 'missing')}, this version reads {FORMAT}",
                hint="repeat the measurement with this version of kvbm",
            )
        runs, records = directory.runs(), directory.records()
        try:
            cells = tuple(_cell(directory, one, runs, records) for one in plan["cells"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{directory.path} is damaged: {type(error).__name__}: {error}") from None
        return cls(plan, cells)


def _cell(
    directory: BenchDirectory,
    definition: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    records: Mapping[str, Sequence[RequestRecord]],
) -> CellResult:
    name = definition["name"]
    path = cell_plan(name)
    data = directory.read_json(path) if directory.has(path) else None
    return CellResult(
        definition,
        None if data is None else Plan.from_json(data),
        None if data is None else data["digest"],
        tuple(
            RunResult(run["run"], run["arm"], run["pair"], run, tuple(records[run["run"]]))
            for run in runs
            if run["cell"] == name
        ),
        are_pairs_equal=not directory.has(cell_plan(name, 2)),
    )


def rounded(value: Any) -> Any:
    """Return the same data with four significant digits below 1, four decimals above, and `None` for infinity."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
