"""DiskClient: the leader's end of a disk process, which runs a DiskStorage.

The threads of a DiskStorage take the GIL several times per block. In the engine's process this would pause either the
engine's step or the disk, so they have a process of their own (docs/adr/0011). Its Status says until when its reads
made progress, so a process that is stopped or hangs and a disk that hangs or is much too slow are silent alike.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.disk.health import DiskCounters
from kvbm.disk.known_rates import KnownRates
from kvbm.disk.orders import (
    Clear,
    Cleared,
    DiskResult,
    Forget,
    FoundBlocks,
    Open,
    Opened,
    Read,
    Recover,
    SpaceTaken,
    Write,
)
from kvbm.disk.settings import DiskSettings, Namespace
from kvbm.disk.wear import Wear, WearMeter
from kvbm.host.threads import allowed_cores
from kvbm.process import deadlines
from kvbm.process.first_opening import FirstOpening
from kvbm.process.service_process import ServiceProcess
from kvbm.types import SegmentInfo

FOUND_BATCH_BLOCKS = 1024

log = logging.getLogger(__name__)


class DiskClient(ServiceProcess[Read | Write, DiskResult, DiskCounters]):
    """One disk process. `slot_count` and `io_name` come from its storage."""

    tier, module = "disk", "kvbm.disk.service.server"

    def __init__(self, progress: Callable[[int, int], None] | None = None) -> None:
        """`progress(done_bytes, total_bytes)` is called while space is allocated."""
        super().__init__(DiskCounters())
        self.slot_count = self.device = 0  # `device`: number of the file system
        self.io_name = ""
        self.path = Path()
        self.home: Path | None = None  # directory of the namespace, if the cache is persistent
        self.earlier_rates: KnownRates | None = None  # of an engine of this namespace, as of the opening
        self._progress = progress
        self._wear: WearMeter | None = None
        self._cleared: dict[int, set[int]] = {}  # ticket of a write in flight -> positions cleared since
        self._unanswered_clears = 0
        self._found: deque[FoundBlocks] = deque()
        self._has_all_found = self._is_recover_pending = False

    @classmethod
    def open(
        cls,
        settings: DiskSettings,
        namespace: Namespace,
        segments: Sequence[SegmentInfo],
        *,
        hash_bytes: int,
        progress: Callable[[int, int], None] | None = None,
        instance: Path | None = None,
        device: int = 0,
        first: FirstOpening | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> DiskClient:
        """Start a process and open its storage, see `start`. `instance`: this one, or a new one if that is not free.
        `device`: number of the file system, if it must be this one."""
        client = cls(progress)
        cores = frozenset(allowed_cores())
        order = Open(settings, namespace, tuple(segments), hash_bytes, cores, instance, device)
        client.start(order, settings.directory, first, is_cancelled)
        client.home = client.path.parent if settings.persist else None
        return client

    @property
    def is_on(self) -> bool:
        """As of each process. Also False while a clear is not durable. Submit nothing then."""
        return super().is_on and not self._unanswered_clears

    def wear(self) -> Wear:
        return Wear(None, None) if self._wear is None else self._wear.measure(self.counters.bytes_written)

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """Return the next batch of blocks found at opening, oldest first, each block once.

        Batches are small, so that an engine's step can process one. None if the next batch has not arrived, for
        ANSWER_LIMIT_S if the call `waits`, or if the process has ended.
        """
        deadline_s = time.monotonic() + deadlines.ANSWER_LIMIT_S
        while not self._found and self.is_alive and not self._has_all_found:
            if not self._is_recover_pending:
                self._expect_answer()
                self._is_recover_pending = True
                self._send(Recover())
            left_s = deadline_s - time.monotonic()
            if waits:
                self._channel.wait(max(0.0, left_s))
            self._receive()
            if not waits or left_s <= 0:
                break
        if self._found:
            return self._found.popleft()
        return FoundBlocks(b"", b"", is_last=True) if self._has_all_found else None

    def forget(self, disk_slots: Sequence[int]) -> None:
        """Delete blocks, durably soon, in order of submission with writes."""
        if disk_slots:
            self._send(Forget(disk_slots))

    def keep_rates(self, known: KnownRates) -> None:
        """Write the rates for the next engine, if the cache is persistent."""
        self._send(known)

    def clear(self, tenant: bytes | None = None, *, ends_persistence: bool = False) -> None:
        """Start to delete all blocks, or those of one tenant, and every write not yet returned by `poll`.

        The disk is off until that is durable. `ends_persistence`: nothing that is written later survives this engine.
        """
        self._expect_answer()
        self._unanswered_clears += 1
        self._found.clear()
        self._has_all_found = True
        for ticket, order in self._in_flight.items():
            if isinstance(order, Write):
                cleared = {position for position, owner in enumerate(order.tenants) if tenant in (None, owner)}
                self._cleared.setdefault(ticket, set()).update(cleared)
        self._send(Clear(tenant, ends_persistence))

    @property
    def is_clearing(self) -> bool:
        """Whether a clear is not durable yet."""
        return self._unanswered_clears > 0

    def poll(self) -> list[DiskResult]:
        results = super().poll()
        return [self._without_cleared(result) for result in results] if self._cleared else results

    def _failed(self, order: Read | Write, why: str) -> DiskResult:
        return DiskResult.failed(order, why)

    def _handle(self, message: object) -> None:
        match message:
            case SpaceTaken():
                if self._progress is not None:
                    self._progress(*message)
            case Opened():
                self.path, self.slot_count, self.io_name, self.counters, self.device, self.earlier_rates = message
                self._wear, self._is_open = WearMeter(self.path), True
            case Cleared():
                self._unanswered_clears = 0
            case FoundBlocks():
                self._is_recover_pending = False
                if not self._has_all_found:
                    self._found.extend(message.parts(FOUND_BATCH_BLOCKS))
                    self._has_all_found = message.is_last
            case _:
                super()._handle(message)

    def _is_awaited(self) -> bool:
        return bool(self._in_flight or self._unanswered_clears or self._is_recover_pending)

    def _answered_s(self) -> float:
        return self._moved_s

    def _handle_loss(self) -> None:
        self.counters.times_off += 1
        log.error("kvbm: the disk tier is off: its process %d has exited", self.pid)
        super()._handle_loss()

    def _without_cleared(self, result: DiskResult) -> DiskResult:
        """Mark the blocks of a write that were cleared before its result was returned."""
        cleared = self._cleared.pop(result.ticket, set())
        is_good = tuple(good and position not in cleared for position, good in enumerate(result.is_good))
        return replace(result, is_good=is_good)
