"""What the exported files are made of: the requests of one arm in one cell, over all its runs.

Times of a record are milliseconds from the start of its run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm_cli.bench.analysis.goodput import Slo
from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.bench.records.results import CellResult, Results, RunResult

TIERS = ("g1", "g2", "g3", "g4", "computed")


@dataclass(frozen=True, slots=True)
class Measured:
    """`runs` is not empty and in order of time. `slo` is `None` if the workload sets no limits."""

    arm: str
    cell: CellResult
    runs: tuple[RunResult, ...]
    seed: int | None
    slo: Slo | None

    @property
    def requests(self) -> list[RequestRecord]:
        """All requests, run by run."""
        return [record for run in self.runs for record in run.records]

    @property
    def succeeded(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.is_ok]

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.requests if not record.is_ok]

    @property
    def duration_s(self) -> float:
        """The time under load: the sum over the runs."""
        return float(sum(run.facts["duration_s"] for run in self.runs))

    @property
    def started_unix_s(self) -> float:
        return started_unix_s(self.runs[0])

    @property
    def concurrency(self) -> int | None:
        """Sessions in flight in a closed loop; `None` in an open loop."""
        return self.cell.plan.launches.concurrency if self.cell.plan else None

    @property
    def model(self) -> str:
        """The name that the server uses; of a path its last part, because exports name no directory of this machine."""
        body = dict(self.cell.plan.requests[0].fields) if self.cell.plan else {}
        name = str(body.get("model", "unknown"))
        return Path(name).name if name.startswith(("/", "~", ".")) else name

    @property
    def offered_rate(self) -> float | None:
        """Intended launches per second in the first run; all runs of a cell have the same plan."""
        launches = [record.intended_ms for record in self.runs[0].records if record.intended_ms is not None]
        if len(launches) < 2 or max(launches) == min(launches):
            return None
        return (len(launches) - 1) / (max(launches) - min(launches)) * 1e3

    def unix_s(self, record: RequestRecord, stamp_ms: float) -> float:
        run = next(run for run in self.runs if run.run == record.run)
        return started_unix_s(run) + stamp_ms / 1e3

    def facts(self) -> dict[str, Any]:
        """Our own facts, under names that no other tool uses. Only what is known; values are not containers."""
        definition = self.cell.definition
        given = {
            "arm": self.arm,
            "cell": self.cell.name,
            "workload": definition["workload"]["name"],
            "pressure": definition["pressure"],
            "g1_capacity_tokens": definition["g1_tokens"],
            "runs": len(self.runs),
            **{f"prompt_tokens_{tier}": total_of(self.succeeded, f"{tier}_tokens") for tier in TIERS},
        }
        return {f"kvbm_{name}": value for name, value in given.items() if value is not None}


def measured_in(results: Results) -> list[Measured]:
    """One value per arm and cell that has a run."""
    return [_measured(arm, cell, results) for cell in results.cells for arm in cell.arms]


def _measured(arm: str, cell: CellResult, results: Results) -> Measured:
    slo = cell.definition["workload"].get("slo")
    runs = tuple(sorted(cell.of_arm(arm), key=started_unix_s))
    return Measured(arm, cell, runs, results.plan.get("seed"), None if slo is None else Slo.parse(slo))


def started_unix_s(run: RunResult) -> float:
    return float(run.facts["started_unix_s"])


def total_of(records: Sequence[RequestRecord], name: str) -> int | None:
    """Sum of a number of tokens; `None` if the server did not report it for one of the records."""
    values: list[int | None] = [getattr(record, name) for record in records]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def output_tokens(record: RequestRecord) -> int:
    """Tokens of the answer; counted by the chunks if the server sent no usage."""
    if record.output_tokens is not None:
        return record.output_tokens
    return record.first_chunk_tokens + len(record.token_gaps_ms)


def launch_ms(record: RequestRecord) -> float:
    """Return the launch; of a request that was never sent, the intended launch or the moment at which it failed."""
    stamps = (record.launched_ms, record.intended_ms, record.end_ms, 0.0)
    return next(stamp for stamp in stamps if stamp is not None)


def wait_ms(record: RequestRecord) -> float:
    """Launch minus intended launch; 0 for a request that never became due."""
    return 0.0 if record.intended_ms is None else launch_ms(record) - record.intended_ms
