"""The requests of one arm in one cell, over all its runs: what the exported files and the goodput are made of.

Times of a record are milliseconds from the start of its run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm_cli.bench.result.results import CellResult, Measurement, RequestRecord, Results, tokens_by_source

_Z_975 = 1.959964


@dataclass(frozen=True, slots=True)
class ArmResult:
    """`runs` is not empty and in order of time."""

    arm: str
    cell: CellResult
    runs: tuple[Measurement, ...]

    @property
    def requests(self) -> list[RequestRecord]:
        """All requests, run by run."""
        return [record for run in self.runs for record in run.records]

    @property
    def succeeded(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.is_ok]

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
        return self.cell.plan.launches.concurrency

    @property
    def burstiness(self) -> float | None:
        """Of random launches; `None` for fixed times."""
        return self.cell.plan.launches.burstiness

    @property
    def model(self) -> str:
        """The name that the server uses; of a path its last part, because exports name no directory of this machine."""
        body = dict(self.cell.plan.requests[0].fields)
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
            **{f"prompt_tokens_{tier}": count for tier, count in tokens_by_source(self.succeeded).items()},
        }
        return {f"kvbm_{name}": value for name, value in given.items() if value is not None}


def arm_results(results: Results) -> list[ArmResult]:
    """One value per arm and cell that has a run."""
    return [
        ArmResult(arm, cell, tuple(sorted(cell.of_arm(arm), key=started_unix_s)))
        for cell in results.cells
        for arm in cell.arms
    ]


def started_unix_s(run: Measurement) -> float:
    return float(run.facts["started_unix_s"])


def launch_ms(record: RequestRecord) -> float:
    """Return the launch; of a request that was never sent, the intended launch or the moment at which it failed."""
    stamps = (record.launched_ms, record.intended_ms, record.end_ms, 0.0)
    return next(stamp for stamp in stamps if stamp is not None)


def wait_ms(record: RequestRecord) -> float:
    """Launch minus intended launch; 0 for a request that never became due."""
    return 0.0 if record.intended_ms is None else launch_ms(record) - record.intended_ms


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share. Unlike the normal interval, it holds for shares close to 0 and 1."""
    assert 0 <= successes <= count, (successes, count)
    if count == 0:
        return 0.0, 1.0
    share, z2 = successes / count, _Z_975**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z_975 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, 1.0 if successes == count else min(1.0, centre + half)
