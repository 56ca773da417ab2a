"""One process of the load client: sends its part of a plan to all targets and watches its own health.

`drive` sends a small plan in its own process. For others it starts worker processes (worker.py).
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kvbm_cli.bench.load.launcher import Launcher, OnRecord, Part
from kvbm_cli.bench.load.request import Target, open_session
from kvbm_cli.bench.result.results import RequestRecord, percentile

READY = "ready"  # of a worker
HEARTBEAT_S = 0.01
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Of one process or of a drive. `cpu_shares` has the share of one core per process. Loop lag is how late the event
    loop ran a heartbeat, the highest of all processes.

    Lateness is the time from the intended launch to the launch, `None` if nothing was launched, and of one process.
    `garbage_objects` are in reference cycles that the switched-off garbage collector left.
    """

    cpu_shares: tuple[float, ...]
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None
    garbage_objects: int

    @classmethod
    def of(cls, processes: Sequence[ClientHealth], records: Iterable[RequestRecord]) -> ClientHealth:
        lateness = [late for record in records if (late := record.lateness_ms) is not None]
        return cls(
            cpu_shares=tuple(share for one in processes for share in one.cpu_shares),
            loop_lag_p50_ms=max(one.loop_lag_p50_ms for one in processes),
            loop_lag_p99_ms=max(one.loop_lag_p99_ms for one in processes),
            loop_lag_max_ms=max(one.loop_lag_max_ms for one in processes),
            lateness_p50_ms=round(percentile(lateness, 50), 4) if lateness else None,
            lateness_p99_ms=round(percentile(lateness, 99), 4) if lateness else None,
            garbage_objects=sum(one.garbage_objects for one in processes),
        )

    @property
    def workers(self) -> int:
        return len(self.cpu_shares)

    @property
    def cpu_share(self) -> float:
        """Of the busiest process."""
        return max(self.cpu_shares)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "workers": self.workers, "cpu_share": self.cpu_share}


class HealthMonitor:
    """Measures this process inside `garbage_collector_off` and `running`; the result is known after both."""

    def __init__(self) -> None:
        self._lags_ms = array("d")
        self._due_s = self._cpu_s = self._duration_s = 0.0
        self._garbage_objects = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure inside a running event loop."""
        cpu_start_s, start_s = time.process_time(), time.perf_counter()
        self._beat(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._heartbeat.cancel()
            self._cpu_s = time.process_time() - cpu_start_s
            self._duration_s = time.perf_counter() - start_s

    @contextmanager
    def garbage_collector_off(self) -> Iterator[None]:
        """Turn the garbage collector off. A collection would stop every stream for milliseconds. Requests leave few
        objects in reference cycles.

        Entering it takes time, so it comes before the start of the schedule.
        """
        was_on = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            self._garbage_objects = gc.collect()
            gc.unfreeze()
            if was_on:
                gc.enable()

    def result(self) -> ClientHealth:
        lags = self._lags_ms or [0.0]
        return ClientHealth(
            cpu_shares=(self._cpu_s / self._duration_s,),
            loop_lag_p50_ms=round(percentile(lags, 50), 4),
            loop_lag_p99_ms=round(percentile(lags, 99), 4),
            loop_lag_max_ms=round(max(lags), 4),
            lateness_p50_ms=None,
            lateness_p99_ms=None,
            garbage_objects=self._garbage_objects,
        )

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure with a timer, which costs less than a task."""
        now_s = loop.time()
        if self._due_s:
            self._lags_ms.append((now_s - self._due_s) * 1e3)
        self._due_s = now_s + HEARTBEAT_S
        self._heartbeat = loop.call_at(self._due_s, self._beat, loop)


async def drive_part(
    part: Part, targets: Sequence[Target], start_ns: int, on_record: OnRecord, monitor: HealthMonitor
) -> None:
    """Send the requests of one part. The first target's schedule starts at `start_ns`."""
    async with open_session() as session:
        with monitor.running():
            await together(Launcher(part, target, session, start_ns, on_record).run() for target in targets)


async def together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of all calls. If one fails, end the others before its exception is raised."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
