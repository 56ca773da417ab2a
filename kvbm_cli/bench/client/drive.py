"""`drive`: sends a plan to one or more engines and returns the records and the client's own health."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_cli.bench.client.drive_part import drive_part
from kvbm_cli.bench.client.health import ClientHealth, HealthMonitor, ProcessHealth
from kvbm_cli.bench.client.launcher import OnRecord, Part
from kvbm_cli.bench.client.request import Target
from kvbm_cli.bench.client.workers import WorkerCount, parts_of, started_workers, worker_count
from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.bench.workload.plan import Plan


@dataclass(frozen=True, slots=True)
class DriveResult:
    """Records by run, in the order of the plan. `started_unix_s` and `start_ns` (of `time.perf_counter_ns`) are the
    same moment: the start of the first target's schedule, from which `duration_s` counts."""

    records: dict[str, tuple[RequestRecord, ...]]
    health: ClientHealth
    started_unix_s: float
    start_ns: int
    duration_s: float


async def drive(
    plan: Plan, targets: Sequence[Target], *, on_record: OnRecord, workers: WorkerCount = "auto"
) -> DriveResult:
    """Send the whole plan to every target. When an engine ends, its open requests fail at once.

    `on_record` gets each record when its request has ended, in this event loop. With more than one worker, other
    processes send the requests, and records arrive up to 0.1 s later.
    """
    import aiohttp  # noqa: F401  it takes 0.3 s, which must not pass after the start

    records: dict[str, list[RequestRecord]] = {target.run: [] for target in targets}

    def take(record: RequestRecord) -> None:
        records[record.run].append(record)
        on_record(record)

    parts = parts_of(plan, worker_count(plan, len(targets), workers))
    if len(parts) == 1:
        monitor = HealthMonitor()
        with monitor.garbage_collector_off():
            start = _Start.after(parts)
            await drive_part(parts[0], targets, start.ns, take, monitor)
            duration_s = start.elapsed_s()
        processes = [monitor.result()]
    else:
        async with started_workers(parts, targets) as workers_ready:
            start = _Start.after(parts)
            processes = await workers_ready.drive(start.ns, take)
            duration_s = start.elapsed_s()
    return _result(records, processes, start, duration_s)


@dataclass(frozen=True, slots=True)
class _Start:
    ns: int
    unix_s: float

    @classmethod
    def after(cls, parts: Sequence[Part]) -> _Start:
        """Return a start that leaves each part the time that it needs before its first request."""
        ns = time.perf_counter_ns() + round(max(part.lead_s() for part in parts) * 1e9)
        return cls(ns, time.time() + (ns - time.perf_counter_ns()) / 1e9)

    def elapsed_s(self) -> float:
        return (time.perf_counter_ns() - self.ns) / 1e9


def _result(
    records: dict[str, list[RequestRecord]], processes: Sequence[ProcessHealth], start: _Start, duration_s: float
) -> DriveResult:
    ordered = {run: tuple(sorted(of_run, key=lambda record: record.index)) for run, of_run in records.items()}
    health = ClientHealth.of(processes, (record for of_run in ordered.values() for record in of_run))
    return DriveResult(ordered, health, start.unix_s, start.ns, duration_s)
