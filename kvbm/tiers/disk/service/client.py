"""DiskClient: the leader's end of a disk process, which runs a DiskStorage. DiskSupervisor: a DiskClient that is
restarted when its process exits, a ChildService.

The threads of a DiskStorage take the GIL several times per block. In the engine's process this would pause either the
engine's step or the disk, so they have a process of their own (docs/adr/0011). Its Status says until when its reads
made progress, so a process that is stopped or hangs and a disk that hangs or is much too slow are silent alike.

The next process recovers what the last one had committed. It opens the same instance, whose lock the exit has
released, or creates a new one. It never takes over another existing instance, which may hold blocks from before a
`clear`. A clear that was not durable is repeated before any block is served.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from kvbm.child import deadlines
from kvbm.child.service import ChildService, ServiceProcess
from kvbm.errors import EnvironmentProblem
from kvbm.host.threads import allowed_cores, start
from kvbm.tiers.disk.directory import INDEX, LEVELS, SUPERBLOCK, InstanceLock
from kvbm.tiers.disk.files import open_private_directory, sync_directory
from kvbm.tiers.disk.health import DiskStorageCounters
from kvbm.tiers.disk.index import BlockIndex
from kvbm.tiers.disk.orders import (
    LOST_IO,
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
from kvbm.tiers.disk.settings import DiskSettings, Namespace
from kvbm.tiers.disk.wear import WearMeter
from kvbm.tiers.rates import KnownRates
from kvbm.types import SegmentInfo

CHECK_INTERVAL_S = 0.01

log = logging.getLogger(__name__)

Named = Future[tuple[DiskSettings, Namespace]]


class DiskClient(ServiceProcess[Read | Write, DiskResult, DiskStorageCounters]):
    """One disk process. `slot_count` and `io_name` come from its storage."""

    tier, module = "disk", "kvbm.tiers.disk.service.server"

    def __init__(self, progress: Callable[[int, int], None] | None = None) -> None:
        """`progress(done_bytes, total_bytes)` is called while space is allocated."""
        super().__init__(DiskStorageCounters(), DiskResult.failed)
        self.slot_count = self.device = 0  # `device`: number of the file system
        self.io_name = ""
        self.path = Path()
        self.earlier_rates: KnownRates | None = None  # of an engine of this namespace, as of the opening
        self._progress = progress
        self._wear: WearMeter | None = None
        self._unanswered_clears = 0
        self._found: deque[FoundBlocks] = deque()
        self._has_all_found = self._is_recover_pending = False

    @property
    def is_on(self) -> bool:
        """As of each process. Also False while a clear is not durable. Submit nothing then."""
        return super().is_on and not self._unanswered_clears

    def wear(self) -> dict[str, float]:
        return {} if self._wear is None else self._wear.measure(self.counters.bytes_written)

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """Return the next batch of blocks found at opening, oldest first, each block once.

        None if the next batch has not arrived, for ANSWER_LIMIT_S if the call `waits`, or if the process has ended.
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
        return FoundBlocks([], [], is_last=True) if self._has_all_found else None

    def forget(self, disk_slots: Sequence[int]) -> None:
        """Delete blocks, durably soon, in order of submission with writes."""
        if disk_slots:
            self._send(Forget(disk_slots))

    def keep_rates(self, known: KnownRates) -> None:
        """Write the rates for the next engine, if the cache is persistent."""
        self._send(known)

    def clear(self, tenant: bytes | None = None, *, ends_persistence: bool = False) -> None:
        """Start to delete all blocks, or those of one tenant, also those of writes in flight, which may still end as
        good.

        The disk is off until that is durable. `ends_persistence`: nothing that is written later survives this engine.
        """
        self._expect_answer()
        self._unanswered_clears += 1
        self._found.clear()
        self._has_all_found = True
        self._send(Clear(tenant, ends_persistence))

    @property
    def is_clearing(self) -> bool:
        """Whether a clear is not durable yet."""
        return self._unanswered_clears > 0

    def _handle(self, message: object) -> None:
        match message:
            case SpaceTaken():
                if self._progress is not None:
                    self._progress(*message)
            case Opened():
                self.path, self.slot_count, self.io_name, self.counters, self.device, self.earlier_rates = message
                self._wear, self._is_open = WearMeter(self.path), True
            case Cleared():
                self._unanswered_clears -= message.clears
            case FoundBlocks():
                self._is_recover_pending = False
                if not self._has_all_found:
                    self._found.append(message)
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


class DiskSupervisor(ChildService[Read | Write, DiskResult, DiskStorageCounters]):
    """A disk process and its successors. Only the leader's thread uses it."""

    process: DiskClient

    def __init__(
        self,
        named: Named,
        segments: Sequence[SegmentInfo],
        *,
        hash_bytes: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress` is for the first process, see DiskClient."""
        self._uncleared: Path | None = None  # instance with a clear that is not durable yet
        self._is_clear_sent = self._is_clear_impossible = False
        self._clear_tenant: bytes | None = None  # whose blocks that clear deletes; None for all
        self._has_ended_persistence = False  # every further process forgets what it finds, and persists nothing
        self._clears_first = False  # the first process forgets what it finds
        # Owned by the thread.
        self._segments, self._hash_bytes, self._progress = segments, hash_bytes, progress
        self._path: Path | None = None
        self._device = 0  # of the first process that could be opened
        self._uses_threads = False  # NIXL has lost I/O
        super().__init__(DiskClient(), named, named.result()[0].directory if named.done() else "the disk")

    @property
    def is_on(self) -> bool:
        return self.process.is_on and self._uncleared is None

    @property
    def slot_count(self) -> int:
        """The number of blocks that fit, 0 until the first process has started."""
        return self.process.slot_count

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """Return the next batch of blocks that the process found at opening; None while there is none."""
        return None if self._is_lost else self.process.recovered(waits=waits)

    def begin_clear(self, tenant: bytes | None = None) -> None:
        """Start to delete all blocks, or those of one tenant. The disk is off until that is durable, which `poll`
        follows. If it cannot be known to be, as when the process ends meanwhile, all are deleted."""
        if not self.process.pid:
            self._clears_first = True
            return
        self._clear_tenant = tenant if self._uncleared is None else None
        self._uncleared = self.process.path
        self._is_clear_sent = self._is_clear_impossible = False
        self._advance()

    @property
    def is_clearing(self) -> bool:
        """Whether a clear is not durable yet."""
        return self._uncleared is not None or self._clears_first

    def clear(self, timeout_s: float = deadlines.ANSWER_LIMIT_S, *, ends_persistence: bool = False) -> None:
        """Delete all blocks, durably on return. Waits at most `timeout_s`, and not for a process that does not answer.

        `ends_persistence`: no block that is written later survives this engine either.

        Raises EnvironmentProblem if it is not durable by then: no process serves a block until it is, which `poll`
        follows.
        """
        self._has_ended_persistence |= ends_persistence
        self.begin_clear()
        if self._clears_first:
            raise EnvironmentProblem(
                f"the disk cache is not cleared yet: {self.process.off_because}; it is cleared before it is used"
            )
        path = self.process.path
        deadline_s = time.monotonic() + timeout_s
        while self._uncleared is not None and not self.process.is_silent and time.monotonic() < deadline_s:
            self.process.wait(CHECK_INTERVAL_S)
            self._advance()
        if self._is_clear_impossible:
            raise EnvironmentProblem(
                f"the disk cache {path} is not cleared durably: another process uses it", hint=f"remove {path}"
            )
        if self._uncleared is not None:
            if ends_persistence and self._named.result()[0].persist:
                _invalidate(path)
            why = self.process.off_because or f"no answer in {timeout_s:g} s"
            raise EnvironmentProblem(f"the disk cache {path} is not cleared durably yet: {why}")

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        if self._uncleared is not None and self._named.result()[0].persist:
            _clear_closed(self._uncleared)

    def _advance(self) -> None:
        """Follow a clear too."""
        super()._advance()
        if self._uncleared is not None and not self._is_lost and not self.process.is_silent:
            self._follow_clear(self._uncleared)

    def _follow_clear(self, path: Path) -> None:
        """Send a clear to the process, or note that it is durable."""
        if not self._is_clear_sent:
            self._is_clear_sent = True
            self.process.clear(self._clear_tenant, ends_persistence=self._has_ended_persistence)
        elif not self.process.is_clearing:
            self._uncleared = None
            if self.process.path != path and path.exists():
                self._is_clear_impossible = True
                log.error("the disk cache %s was not cleared, another process uses it: remove it", path)

    def _note_next(self) -> None:
        self._is_clear_sent = False
        self._clear_tenant = None
        if (self._has_ended_persistence or self._clears_first) and self._uncleared is None:
            self._uncleared = self.process.path
        self._clears_first = False

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _note_end(self, code: int) -> None:
        self._uses_threads |= code == LOST_IO

    def _open_next(self) -> DiskClient:
        settings, namespace = self._named.result()
        settings = replace(settings, io="threads") if self._uses_threads else settings
        instance, cores = self._path if settings.persist else None, frozenset(allowed_cores())
        order = Open(settings, namespace, tuple(self._segments), self._hash_bytes, cores, instance, self._device)
        opened = DiskClient(None if self._device else self._progress)
        opened.start(order, settings.directory, self._first, self._is_closing.is_set)
        if opened.slot_count != (self.slot_count or opened.slot_count):
            opened.close(0)
            raise EnvironmentProblem(f"{opened.path} has {opened.slot_count} slots, not {self.slot_count}")
        self._path, self._device = opened.path, opened.device
        return opened


def _clear_closed(path: Path) -> None:
    """Clear the index of an instance whose process has ended. Waits at most JOIN_S, also if the disk hangs."""
    outcome = ["the disk does not answer"]

    def clear() -> None:
        try:
            lock = InstanceLock.take(path)
            if lock is None:
                outcome[0] = "another process uses it"
                return
            try:
                with closing(BlockIndex.open(path / INDEX)) as index:
                    index.clear(None)
                outcome.clear()
            finally:
                lock.release()
        except (OSError, sqlite3.Error, EnvironmentProblem) as error:
            outcome[0] = str(error)

    thread = threading.Thread(target=clear, name="kvbm-disk-clear", daemon=True)
    try:
        start(thread)
    except RuntimeError as error:
        outcome[0] = str(error)
    else:
        thread.join(deadlines.JOIN_S)
    if outcome:
        log.error("the disk cache %s was not cleared: %s; remove it before the next start", path, outcome[0])


def _invalidate(path: Path) -> None:
    """Begin to remove the superblock of an instance, so that a next engine starts empty even if this one is killed
    before its clear is durable. The disk may hang."""

    def invalidate() -> None:
        with suppress(OSError, EnvironmentProblem), open_private_directory(path, levels=LEVELS) as directory:
            directory.unlink_file(SUPERBLOCK)
            sync_directory(path)

    with suppress(RuntimeError):
        start(threading.Thread(target=invalidate, name="kvbm-disk-invalidate", daemon=True))
