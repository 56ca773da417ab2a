"""`drive`: sends a plan to one or more engines and returns the records and the client's own health.

A plan that keeps one core too busy is sent by worker processes. Each worker sends a part of the plan to all targets, at
times of the same clock: `time.perf_counter_ns` is the monotonic clock of the machine. Workers end with this process.
If a worker ends early, the whole drive fails: a part of the load would be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvbm.child.channel import ChannelClosed
from kvbm.child.parent import has_ended
from kvbm.child.run import Output, last_line
from kvbm.child.stream import MessageStream, start_with_stream
from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.bench.load.launcher import WATCH_INTERVAL_S, OnRecord, Part
from kvbm_cli.bench.load.process import READY, ClientHealth, HealthMonitor, drive_part, together
from kvbm_cli.bench.load.request import Target
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.workload.plan import Plan, PlannedRequest, linked_groups

# Load of one core, measured by bench/client/overhead.py.
REQUEST_S = 0.00035
CHUNK_S = 0.00008
PROMPT_TOKEN_S = 1.5e-7
LARGEST_LOAD = 0.5
ASSUMED_TOKENS_PER_S = 50.0  # per session of a closed loop
ASSUMED_TOKENS = 128  # of an answer without a limit
WINDOW_S = 10.0
WorkerCount = int | Literal["auto"]

WORKER = "kvbm_cli.bench.load.worker"
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0


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
    processes send the requests.
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
        async with started_workers(parts, targets) as ready:
            start = _Start.after(parts)
            processes = await _drive_workers(ready, targets, start.ns, take)
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
    records: dict[str, list[RequestRecord]], processes: Sequence[ClientHealth], start: _Start, duration_s: float
) -> DriveResult:
    ordered = {run: tuple(sorted(of_run, key=lambda record: record.index)) for run, of_run in records.items()}
    health = ClientHealth.of(processes, (record for of_run in ordered.values() for record in of_run))
    return DriveResult(ordered, health, start.unix_s, start.ns, duration_s)


@contextlib.asynccontextmanager
async def started_workers(parts: Sequence[Part], targets: Sequence[Target]) -> AsyncIterator[list[_Worker]]:
    """One worker per part, ready to start. They are killed at the end, if they still run."""
    workers: list[_Worker] = []
    targets = [replace(target, has_ended=_never) for target in targets]
    try:
        for number in range(len(parts)):
            workers.append(await _Worker.start(f"load worker {number + 1} of {len(parts)}"))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await together(one.take(part, targets) for one, part in zip(workers, parts, strict=True))
        except TimeoutError:
            raise EnvironmentProblem(
                f"load workers were not ready within {START_TIMEOUT_S:.0f} s", hint="repeat on an idle machine"
            ) from None
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.close()


async def _drive_workers(
    workers: Sequence[_Worker], targets: Sequence[Target], start_ns: int, on_record: OnRecord
) -> list[ClientHealth]:
    """Hand over each record as it arrives. EnvironmentProblem if a worker ends early."""
    for worker in workers:
        worker.stream.send(start_ns)
    watcher = asyncio.create_task(_watch_engines(workers, targets))
    try:
        return await together(worker.drive(on_record) for worker in workers)
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def _watch_engines(workers: Sequence[_Worker], targets: Sequence[Target]) -> None:
    ended: set[int] = set()
    while True:
        for position, target in enumerate(targets):
            if position not in ended and target.has_ended():
                ended.add(position)
                for worker in workers:
                    worker.stream.send(position)
        await asyncio.sleep(WATCH_INTERVAL_S)


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A process that sends one part. `output` is what it says beside its messages."""

    name: str
    process: subprocess.Popen[bytes]
    stream: MessageStream
    output: Output

    @classmethod
    async def start(cls, name: str) -> _Worker:
        output = Output()
        try:
            return cls(name, *await start_with_stream(WORKER, "a load worker", stderr=output.fileno()), output)
        except BaseException:
            output.close()
            raise

    async def take(self, part: Part, targets: Sequence[Target]) -> None:
        """Return when it is ready to start."""
        self.stream.send((part, targets))
        await self.stream.drain()
        ready = await self._receive()
        assert ready == READY, ready

    async def drive(self, on_record: OnRecord) -> ClientHealth:
        while not isinstance(message := await self._receive(), ClientHealth):
            on_record(message)
        return message

    async def _receive(self) -> Any:
        try:
            return await self.stream.receive()
        except ChannelClosed:
            raise EnvironmentProblem(f"{self.name} {await asyncio.to_thread(self._how_it_ended)}") from None

    def _how_it_ended(self) -> str:
        """Wait for its end."""
        status = self.process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        reason = last_line(self.output.text())
        return f"(pid {self.process.pid}) {how} before its requests{reason and f': {reason}'}"

    def close(self) -> None:
        """Call after it was killed."""
        self.stream.close()
        has_ended(self.process, END_TIMEOUT_S)  # one that hangs in the kernel cannot end
        self.output.close()


def _never() -> bool:
    return False


def worker_count(plan: Plan, target_count: int, wanted: WorkerCount) -> int:
    """How many processes send the plan; 1 is this process. There is at most one per group of sessions."""
    if wanted != "auto" and wanted < 1:
        raise UsageError(f"{wanted} worker processes: at least 1 is required")
    useful = math.ceil(estimated_load(plan, target_count) / LARGEST_LOAD)
    # one core is left for the engine, which usually runs on the same machine
    count = wanted if wanted != "auto" else min(useful, _cores() - 1)
    concurrency = plan.launches.concurrency or count
    return max(1, min(count, concurrency, len(linked_groups(plan.requests)) if count > 1 else 1))


def estimated_load(plan: Plan, target_count: int) -> float:
    """Return the share of one core that the plan takes in its busiest 10 s, if the engines keep up."""
    costs_s = [
        REQUEST_S + CHUNK_S * (request.answer_tokens or ASSUMED_TOKENS) + PROMPT_TOKEN_S * (request.prompt_tokens or 0)
        for request in plan.requests
    ]
    timed = sorted((request.intended_s, costs_s[i]) for i, request in enumerate(plan.requests) if request.intended_s)
    return target_count * max(_busiest(timed), _closed_loop_load(plan, costs_s))


def _busiest(timed: Sequence[tuple[float, float]]) -> float:
    """Return the largest load of any window of the timed requests."""
    largest = inside = 0.0
    first = 0
    for at_s, cost_s in timed:
        inside += cost_s
        while timed[first][0] <= at_s - WINDOW_S:
            inside -= timed[first][1]
            first += 1
        largest = max(largest, inside)
    return largest / min(WINDOW_S, max(1.0, timed[-1][0])) if timed else 0.0


def _closed_loop_load(plan: Plan, costs_s: Sequence[float]) -> float:
    """Sessions in flight, each with the assumed speed of answers."""
    closed = [i for i, request in enumerate(plan.requests) if request.intended_s is None]
    if not closed:
        return 0.0
    tokens = sum(plan.requests[i].answer_tokens or ASSUMED_TOKENS for i in closed)
    sessions = len({plan.requests[i].session for i in closed})
    in_flight = min(sessions, plan.launches.concurrency or sessions)
    return in_flight * ASSUMED_TOKENS_PER_S / tokens * sum(costs_s[i] for i in closed)


def parts_of(plan: Plan, count: int) -> list[Part]:
    """Divides the plan into parts of about equal work."""
    sent: list[list[PlannedRequest]] = [[] for _ in range(count)]
    work = [0] * count
    for group in linked_groups(plan.requests):
        lightest = work.index(min(work))
        sent[lightest] += group
        work[lightest] += sum(8 + (request.answer_tokens or ASSUMED_TOKENS) for request in group)
    parts = []
    for number, requests in enumerate(sent):
        whole = plan.launches.concurrency
        concurrency = None if whole is None else whole // count + (number < whole % count)
        requests.sort(key=lambda request: request.index)
        parts.append(Part(tuple(requests), plan.launches, plan.request_timeout_s, concurrency))
    return parts


def _cores() -> int:
    return len(os.sched_getaffinity(0))
