"""`drive`: sends a plan to one or more engines and returns the records and the client's own health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_cli.bench.client.health import ClientHealth, HealthMonitor, ProcessHealth
from kvbm_cli.bench.client.launcher import Launcher, Part
from kvbm_cli.bench.client.request import Target, open_session
from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.bench.workload.plan import Plan

OnRecord = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class DriveResult:
    """Records by run, in the order of the plan. `started_unix_s` and `start_ns` (of `time.perf_counter_ns`) are the
    same moment: the start of the first target's schedule, from which `duration_s` counts."""

    records: dict[str, tuple[RequestRecord, ...]]
    health: ClientHealth
    started_unix_s: float
    start_ns: int
    duration_s: float


async def drive(plan: Plan, targets: Sequence[Target], *, on_record: OnRecord) -> DriveResult:
    """Send the whole plan to every target. When an engine ends, its open requests fail at once.

    `on_record` gets each record when its request has ended, in this event loop.
    """
    import aiohttp  # noqa: F401  it takes 0.3 s, which must not pass after the start

    records: dict[str, list[RequestRecord]] = {target.run: [] for target in targets}

    def take(record: RequestRecord) -> None:
        records[record.run].append(record)
        on_record(record)

    part = Part(plan.requests, plan.launches, plan.request_timeout_s, plan.launches.concurrency)
    start_ns = time.perf_counter_ns() + round(part.lead_s() * 1e9)
    started_unix_s = time.time() + (start_ns - time.perf_counter_ns()) / 1e9
    processes = [await drive_part(part, targets, start_ns, take)]
    duration_s = (time.perf_counter_ns() - start_ns) / 1e9
    ordered = {run: tuple(sorted(of_run, key=lambda record: record.index)) for run, of_run in records.items()}
    health = ClientHealth.of(processes, (record for of_run in ordered.values() for record in of_run))
    return DriveResult(ordered, health, started_unix_s, start_ns, duration_s)


async def drive_part(part: Part, targets: Sequence[Target], start_ns: int, on_record: OnRecord) -> ProcessHealth:
    """Send a part of a plan from this process. The first target's schedule starts at `start_ns`."""
    monitor = HealthMonitor()
    async with open_session() as session, monitor.running():
        await _all([Launcher(part, target, session, start_ns, on_record).run() for target in targets])
    return monitor.result()


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all calls. If one fails, end the others before its exception is raised."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
