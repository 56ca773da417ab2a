"""Client health: whether the client was fast enough for its times to be those of the engine."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from kvbm_cli.bench.records.request_record import RequestRecord

HEARTBEAT_S = 0.005


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
    """Of a drive. `cpu_shares` has the share of one core per process; loop lag is that of the worst process.

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
    """Measures this process between `start` and the end of `running`."""

    def __init__(self) -> None:
        self._lags_ms = array("d")
        self._cpu_start_s = self._start_s = 0.0
        self._garbage_objects = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with self._garbage_collector_off():
            self._cpu_start_s, self._start_s = time.process_time(), time.perf_counter()
            heartbeat = asyncio.create_task(self._beat())
            try:
                yield
            finally:
                self._cpu_s, self._duration_s = (
                    time.process_time() - self._cpu_start_s,
                    time.perf_counter() - self._start_s,
                )
                heartbeat.cancel()
                with suppress(asyncio.CancelledError):
                    await heartbeat

    def result(self) -> ProcessHealth:
        lags = sorted(self._lags_ms) or [0.0]
        return ProcessHealth(
            cpu_share=self._cpu_s / self._duration_s,
            loop_lag_p50_ms=_percentile(lags, 0.5),
            loop_lag_p99_ms=_percentile(lags, 0.99),
            loop_lag_max_ms=round(lags[-1], 4),
            garbage_objects=self._garbage_objects,
        )

    async def _beat(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(HEARTBEAT_S)
            self._lags_ms.append((time.perf_counter() - before - HEARTBEAT_S) * 1e3)

    @contextmanager
    def _garbage_collector_off(self) -> Iterator[None]:
        """A collection would stop every stream for milliseconds. Requests leave few objects in reference cycles."""
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


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank, of a sorted sequence that is not empty."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
