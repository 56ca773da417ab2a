"""DiskSupervisor: a DiskClient that is restarted when its process exits, a ChildService.

The next process recovers what the last one had committed. It opens the same instance, whose lock the exit has
released, or creates a new one. It never takes over another existing instance, which may hold blocks from before a
`clear`. A clear that was not durable is repeated before any block is served.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.disk.directory import INDEX, InstanceLock
from kvbm.disk.health import DiskCounters
from kvbm.disk.index import BlockIndex
from kvbm.disk.orders import LOST_IO, DiskResult, FoundBlocks, Read, Write
from kvbm.disk.service.client import DiskClient
from kvbm.disk.wear import Wear
from kvbm.errors import EnvironmentProblem
from kvbm.host.threads import start
from kvbm.process import deadlines
from kvbm.process.service import ChildService

if TYPE_CHECKING:
    from kvbm.disk.known_rates import KnownRates
    from kvbm.disk.settings import DiskSettings, Namespace
    from kvbm.types import SegmentInfo

    Named = Future[tuple[DiskSettings, Namespace]]

CHECK_INTERVAL_S = 0.01

log = logging.getLogger(__name__)


class DiskSupervisor(ChildService[Read | Write, DiskResult, DiskCounters]):
    """A disk process and its successors. Only the leader's thread uses it."""

    _process: DiskClient

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
        return self._process.is_on and self._uncleared is None

    @property
    def slot_count(self) -> int:
        """The number of blocks that fit, 0 until the first process has started."""
        return self._process.slot_count

    @property
    def home(self) -> Path | None:
        """The directory of the namespace, if the cache is persistent."""
        return self._process.home

    @property
    def earlier_rates(self) -> KnownRates | None:
        """Of an engine of this namespace, as of the opening."""
        return self._process.earlier_rates

    @property
    def io_name(self) -> str:
        return self._process.io_name

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """Return the next batch of blocks that the process found at opening; None while there is none."""
        return None if self._is_lost else self._process.recovered(waits=waits)

    def forget(self, disk_slots: Sequence[int]) -> None:
        self._process.forget(disk_slots)

    def keep_rates(self, known: KnownRates) -> None:
        self._process.keep_rates(known)

    def wear(self) -> Wear:
        return self._process.wear()

    def clear(self, timeout_s: float = deadlines.ANSWER_LIMIT_S, *, ends_persistence: bool = False) -> None:
        """Delete all blocks, durably on return. Waits at most `timeout_s`, and not for a process that does not answer.

        `ends_persistence`: no block that is written later survives this engine either.

        Raises EnvironmentProblem if it is not durable by then: no process serves a block until it is, which `poll`
        follows.
        """
        self._has_ended_persistence |= ends_persistence
        if not self._process.pid:
            self._clears_first = True
            raise EnvironmentProblem(
                f"the disk cache is not cleared yet: {self._process.off_because}; it is cleared before it is used"
            )
        path = self._uncleared = self._process.path
        self._is_clear_sent = self._is_clear_impossible = False
        self._advance()
        deadline_s = time.monotonic() + timeout_s
        while self._uncleared is not None and not self._process.is_silent and time.monotonic() < deadline_s:
            self._process.wait(CHECK_INTERVAL_S)
            self._advance()
        if self._is_clear_impossible:
            raise EnvironmentProblem(
                f"the disk cache {path} is not cleared durably: another process uses it", hint=f"remove {path}"
            )
        if self._uncleared is not None:
            why = self._process.off_because or f"no answer in {timeout_s:g} s"
            raise EnvironmentProblem(f"the disk cache {path} is not cleared durably yet: {why}")

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        if self._uncleared is not None and self.home is not None:
            _clear_closed(self._uncleared)

    def _advance(self) -> None:
        """Follow a clear too."""
        super()._advance()
        if self._uncleared is not None and not self._is_lost and not self._process.is_silent:
            self._follow_clear(self._uncleared)

    def _follow_clear(self, path: Path) -> None:
        """Send a clear to the process, or note that it is durable."""
        if not self._is_clear_sent:
            self._is_clear_sent = True
            self._process.clear(ends_persistence=self._has_ended_persistence)
        elif not self._process.is_clearing:
            self._uncleared = None
            if self._process.path != path and path.exists():
                self._is_clear_impossible = True
                log.error("the disk cache %s was not cleared, another process uses it: remove it", path)

    def _note_next(self) -> None:
        self._is_clear_sent = False
        if (self._has_ended_persistence or self._clears_first) and self._uncleared is None:
            self._uncleared = self._process.path
        self._clears_first = False

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _note_end(self, code: int) -> None:
        self._uses_threads |= code == LOST_IO

    def _open_next(self) -> DiskClient:
        settings, namespace = self._named.result()
        _require_there(self._segments)
        opened = DiskClient.open(
            replace(settings, io="threads") if self._uses_threads else settings,
            namespace,
            self._segments,
            hash_bytes=self._hash_bytes,
            instance=self._path if settings.persist else None,
            device=self._device,
            progress=None if self._device else self._progress,
            first=self._first,
            is_cancelled=self._is_closing.is_set,
        )
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


def _require_there(segments: Sequence[SegmentInfo]) -> None:
    """Raise EnvironmentProblem if a rank has ended: no process could map its host memory."""
    for segment in segments:
        try:
            length = os.stat(f"/proc/{segment.pid}/fd/{segment.fd}").st_size
        except OSError:
            length = 0
        if length != segment.length:
            raise EnvironmentProblem(f"the host memory of rank {segment.rank} is gone")
