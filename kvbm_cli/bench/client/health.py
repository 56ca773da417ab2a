"""Client health: whether the client was fast enough for its times to be those of the engine."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvbm_cli.bench.records.request_record import RequestRecord

HEARTBEAT_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """Of one process: its share of one core, how late its event loop ran a heartbeat, and objects in reference cycles
    that the switched-off garbage collector left."""

    cpu_share: float
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    garbage_objects: int


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Of a drive. `cpu_shares` has the share of one core per process. Loop lag is the highest of all processes.

    Lateness is the time from the intended launch to the launch, `None` if nothing was launched.
    """

    cpu_shares: tuple[float, ...]
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None
    garbage_objects: int

    @classmethod
    def of(cls, processes: Sequence[ProcessHealth], records: Iterable[RequestRecord]) -> ClientHealth:
        lateness = sorted(late for record in records if (late := record.lateness_ms) is not None)
        return cls(
            cpu_shares=tuple(one.cpu_share for one in processes),
            loop_lag_p50_ms=max(one.loop_lag_p50_ms for one in processes),
            loop_lag_p99_ms=max(one.loop_lag_p99_ms for one in processes),
            loop_lag_max_ms=max(one.loop_lag_max_ms for one in processes),
            lateness_p50_ms=_percentile(lateness, 0.5) if lateness else None,
            lateness_p99_ms=_percentile(lateness, 0.99) if lateness else None,
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

    def result(self) -> ProcessHealth:
        lags = sorted(self._lags_ms) or [0.0]
        return ProcessHealth(
            cpu_share=self._cpu_s / self._duration_s,
            loop_lag_p50_ms=_percentile(lags, 0.5),
            loop_lag_p99_ms=_percentile(lags, 0.99),
            loop_lag_max_ms=round(lags[-1], 4),
            garbage_objects=self._garbage_objects,
        )

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure with a timer, which costs less than a task."""
        now_s = loop.time()
        if self._due_s:
            self._lags_ms.append((now_s - self._due_s) * 1e3)
        self._due_s = now_s + HEARTBEAT_S
        self._heartbeat = loop.call_at(self._due_s, self._beat, loop)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank, of a sorted sequence that is not empty."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
