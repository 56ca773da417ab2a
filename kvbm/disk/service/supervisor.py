"""DiskSupervisor: a DiskClient that is restarted when its process exits.

A thread waits for the process, so that no zombie remains and the exit is noticed while the engine is idle. It then
pauses, longer after each short-lived process, and opens the next one, which recovers what the last one had committed.
The leader never waits for this:

    process exits          its tickets fail, `losses` increases, `is_on` is False
    next process is open   `poll` switches to it, and `recovered` returns its blocks

The next process opens the same instance, whose lock the exit has released, or creates a new one. It never takes over
another existing instance, which may hold blocks from before a `clear`. A clear that was not durable is repeated before
any block is served.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.disk.service.client import CLEAR_TIMEOUT_S, DiskClient
from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from kvbm.disk.health import DiskCounters
    from kvbm.disk.orders import DiskResult, FoundBlocks, Read, Write
    from kvbm.disk.settings import DiskSettings, Namespace
    from kvbm.disk.wear import Wear
    from kvbm.types import SegmentInfo

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0  # also the lifetime of a process that resets the pause
JOIN_S = 2.0

log = logging.getLogger(__name__)


class DiskSupervisor:
    """A disk process and its successors. Only the leader's thread uses it."""

    def __init__(self, process: DiskClient, open_next: Callable[[Path], DiskClient]) -> None:
        """*Consumes* the process. `open_next(path)` opens another, in the instance at `path` if that is available."""
        self.slot_count = process.slot_count
        self.home = process.home
        self.losses = 0
        self.restarts = 0
        self._open_next = open_next
        self._process = process
        self._is_lost = False
        self._earlier_counters: DiskCounters | None = None  # sum of the earlier processes
        self._is_closing = threading.Event()
        # Owned by the holder of the lock. The thread holds it while it opens a process.
        self._lock = threading.Lock()
        self._next: DiskClient | None = None
        self._has_pending_clear = False
        self._has_ended_persistence = False  # every further process forgets what it finds, and persists nothing
        # Owned by the thread.
        self._path = process.path
        self._last_error = ""
        self._thread = threading.Thread(target=self._supervise, args=(process,), name="kvbm-disk-keeper", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        settings: DiskSettings,
        namespace: Namespace,
        segments: Sequence[SegmentInfo],
        *,
        hash_bytes: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> DiskSupervisor:
        """Open the first process, as DiskClient.open; later ones use the same arguments. Raises EnvironmentProblem."""
        open_one = partial(DiskClient.open, settings, namespace, segments, hash_bytes=hash_bytes)
        first = open_one(progress=progress)
        device = _device_of(settings.directory)

        def open_next(path: Path) -> DiskClient:
            if _device_of(settings.directory) != device:
                raise EnvironmentProblem(f"{settings.directory} is on a different file system than at start-up")
            return open_one(instance=path if settings.persist else None)

        return cls(first, open_next)

    @property
    def is_on(self) -> bool:
        return self._process.is_on

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def io_name(self) -> str:
        return self._process.io_name

    @property
    def counters(self) -> DiskCounters:
        """The sum of all processes."""
        counters = self._process.counters
        return counters if self._earlier_counters is None else self._earlier_counters.plus(counters)

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """Return the next batch of blocks that the process found at opening; None while there is none."""
        return None if self._is_lost else self._process.recovered(waits=waits)

    def submit(self, order: Read | Write) -> None:
        self._process.submit(order)

    def forget(self, disk_slots: Sequence[int]) -> None:
        self._process.forget(disk_slots)

    def wear(self) -> Wear:
        return self._process.wear()

    def poll(self) -> list[DiskResult]:
        """Return the tickets that have ended. When `losses` increases, all tickets have."""
        if self._is_lost:
            self._take_next()
        results = self._process.poll()
        if not (self._process.is_alive or self._is_lost):
            self._is_lost = True
            self.losses += 1
        return results

    def clear(self, *, ends_persistence: bool = False) -> None:
        """Delete all blocks, durably on return. `ends_persistence`: no later block survives this engine either.

        Raises EnvironmentProblem if that fails: no process then serves a block until the clear has succeeded.
        """
        self._has_pending_clear = True
        self._has_ended_persistence |= ends_persistence
        if not self._lock.acquire(timeout=CLEAR_TIMEOUT_S):
            raise EnvironmentProblem(
                f"the disk cache was not cleared durably: no disk process opened it within {CLEAR_TIMEOUT_S:g} s"
            )
        try:
            (self._next or self._process).clear(ends_persistence=self._has_ended_persistence)
            self._has_pending_clear = False
        finally:
            self._lock.release()

    def close(self, timeout_s: float) -> None:
        self._is_closing.set()
        self._process.close(timeout_s)
        if self._lock.acquire(timeout=timeout_s):  # otherwise the thread closes what it is opening
            try:
                if self._next is not None:
                    self._next.close(timeout_s)
            finally:
                self._lock.release()
        self._thread.join(JOIN_S)

    def _take_next(self) -> None:
        if self._next is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._earlier_counters = self.counters
            self._process.discard()
            self._process, self._next = self._next, None
            self._is_lost = False
            self.restarts += 1
        finally:
            self._lock.release()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _supervise(self, process: DiskClient) -> None:
        pause_s = FIRST_PAUSE_S / 2
        while True:
            began_s = time.monotonic()
            how = _how_it_ended(process.wait_for_end())
            if self._is_closing.is_set():
                return
            has_lasted = time.monotonic() - began_s >= LONGEST_PAUSE_S
            pause_s = FIRST_PAUSE_S if has_lasted else _longer(pause_s)
            log.warning("disk process %d %s; restarting in %g s", process.pid, how, pause_s)
            while not self._is_closing.wait(pause_s):
                if (opened := self._open()) is not None:
                    process = opened
                    break
                pause_s = _longer(pause_s)
            else:
                return

    def _open(self) -> DiskClient | None:
        """Open the next process and hand it to the leader's thread."""
        with self._lock:
            try:
                opened = self._open_next(self._path)
                try:
                    self._require_fit(opened)
                except BaseException:
                    opened.close(0)
                    raise
            except (EnvironmentProblem, OSError) as error:
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    log.warning("the disk tier stays off: %s", error)
                return None
            if self._next is not None:  # it exited before `poll` took it
                self._next.discard()
            self._path, self._last_error, self._has_pending_clear = opened.path, "", False
            self._next = opened
            return opened

    def _require_fit(self, opened: DiskClient) -> None:
        if self._is_closing.is_set():
            raise EnvironmentProblem("closed")
        if opened.slot_count != self.slot_count:
            raise EnvironmentProblem(f"{opened.path} has {opened.slot_count} slots, not {self.slot_count}")
        if self._has_pending_clear or self._has_ended_persistence:
            opened.clear(ends_persistence=self._has_ended_persistence)


def _longer(pause_s: float) -> float:
    return min(2 * pause_s, LONGEST_PAUSE_S)


def _how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"exited with {code}"


def _device_of(directory: Path) -> int:
    """Return the device of the file system of `directory`, or of its nearest existing parent."""
    for path in (directory, *directory.parents):
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise EnvironmentProblem(f"cannot find the file system of {directory}")
