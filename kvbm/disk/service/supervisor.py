"""DiskSupervisor: a DiskClient that is restarted when its process exits.

A thread waits for the process, so that no zombie remains and the exit is noticed while the engine is idle. It then
pauses, longer after each short-lived process, and opens the next one, which recovers what the last one had committed.
The leader never waits for this:

    process exits          its tickets fail, `losses` increases, `is_on` is False
    next process is open   `poll` switches to it, and `recovered` returns its blocks

The next process opens the same instance, whose lock the exit has released, or creates a new one. It never takes over
another existing instance, which may hold blocks from before a `clear`. A clear that was not durable is repeated before
any block is served.

While the process does not answer (`DiskClient.is_silent`), `is_on` is False and nothing is sent to it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.disk.directory import INDEX, InstanceLock
from kvbm.disk.index import BlockIndex
from kvbm.disk.service.client import ANSWER_LIMIT_S, DiskClient
from kvbm.disk.service.messages import LOST_IO
from kvbm.errors import EnvironmentProblem
from kvbm.process.parent import how_it_ended

if TYPE_CHECKING:
    from kvbm.disk.health import DiskCounters
    from kvbm.disk.orders import DiskResult, FoundBlocks, Read, Write
    from kvbm.disk.settings import DiskSettings, Namespace
    from kvbm.disk.wear import Wear
    from kvbm.types import SegmentInfo

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0  # also the lifetime of a process that resets the pause
JOIN_S = 2.0
CHECK_INTERVAL_S = 0.01

log = logging.getLogger(__name__)


class DiskSupervisor:
    """A disk process and its successors. Only the leader's thread uses it."""

    def __init__(self, process: DiskClient, open_next: Callable[[Path, bool], DiskClient]) -> None:
        """*Consumes* the process. `open_next(path, uses_threads)` opens another, in the instance at `path` if that is
        available; with `uses_threads`, its I/O is done by threads whatever is configured."""
        self.slot_count = process.slot_count
        self.home = process.home
        self.losses = 0
        self.restarts = 0
        self._open_next = open_next
        self._process = process
        self._is_lost = False
        self._results: list[DiskResult] = []  # not yet returned by `poll`
        self._uncleared: Path | None = None  # instance with a clear that is not durable yet
        self._is_clear_sent = self._is_clear_impossible = False
        self._has_ended_persistence = False  # every further process forgets what it finds, and persists nothing
        self._earlier_counters: DiskCounters | None = None  # sum of the earlier processes
        self._is_closing = threading.Event()
        # Owned by the holder of the lock. The thread holds it while it opens a process.
        self._lock = threading.Lock()
        self._next: DiskClient | None = None
        # Owned by the thread.
        self._path = process.path
        self._last_error = ""
        self._uses_threads = False  # NIXL has lost I/O
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
        first = DiskClient.open(settings, namespace, segments, hash_bytes=hash_bytes, progress=progress)
        device = _device_of(settings.directory)

        def open_next(path: Path, uses_threads: bool) -> DiskClient:
            _require_there(segments)
            if _device_of(settings.directory) != device:
                raise EnvironmentProblem(f"{settings.directory} is on a different file system than at start-up")
            chosen = replace(settings, io="threads") if uses_threads else settings
            instance = path if settings.persist else None
            return DiskClient.open(chosen, namespace, segments, hash_bytes=hash_bytes, instance=instance)

        return cls(first, open_next)

    @property
    def is_on(self) -> bool:
        return self._process.is_on and self._uncleared is None

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
        self._advance()
        results, self._results = self._results, []
        return results

    def clear(self, timeout_s: float = ANSWER_LIMIT_S, *, ends_persistence: bool = False) -> None:
        """Delete all blocks, durably on return. Waits at most `timeout_s`, and not for a process that does not answer.

        `ends_persistence`: no block that is written later survives this engine either.

        Raises EnvironmentProblem if it is not durable by then: no process serves a block until it is, which `poll`
        follows.
        """
        self._has_ended_persistence |= ends_persistence
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
        self._is_closing.set()
        self._advance()
        self._process.close(timeout_s)
        if self._lock.acquire(timeout=timeout_s):  # otherwise the thread closes what it is opening
            try:
                if self._next is not None:
                    self._next.close(timeout_s)
            finally:
                self._lock.release()
        self._thread.join(JOIN_S)
        if self._uncleared is not None and self.home is not None:
            _clear_closed(self._uncleared)

    def _advance(self) -> None:
        """Follow the process, its end, the next one, and a clear."""
        if self._is_lost:
            self._take_next()
        self._results += self._process.poll()
        if not (self._process.is_alive or self._is_lost):
            self._is_lost = True
            self.losses += 1
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

    def _take_next(self) -> None:
        if self._next is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._earlier_counters = self.counters
            self._process.discard()
            self._process, self._next = self._next, None
            self._is_lost = self._is_clear_sent = False
            if self._has_ended_persistence and self._uncleared is None:
                self._uncleared = self._process.path
            self.restarts += 1
        finally:
            self._lock.release()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _supervise(self, process: DiskClient) -> None:
        pause_s = FIRST_PAUSE_S / 2
        while True:
            began_s = time.monotonic()
            code = process.wait_for_end()
            how = how_it_ended(code)
            self._uses_threads |= code == LOST_IO
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
                opened = self._open_next(self._path, self._uses_threads)
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
            self._path, self._last_error = opened.path, ""
            self._next = opened
            return opened

    def _require_fit(self, opened: DiskClient) -> None:
        if self._is_closing.is_set():
            raise EnvironmentProblem("closed")
        if opened.slot_count != self.slot_count:
            raise EnvironmentProblem(f"{opened.path} has {opened.slot_count} slots, not {self.slot_count}")


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
                index = BlockIndex.open(path / INDEX)
                try:
                    index.clear(None)
                finally:
                    index.close()
                outcome.clear()
            finally:
                lock.release()
        except (OSError, sqlite3.Error, EnvironmentProblem) as error:
            outcome[0] = str(error)

    thread = threading.Thread(target=clear, name="kvbm-disk-clear", daemon=True)
    thread.start()
    thread.join(JOIN_S)
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


def _longer(pause_s: float) -> float:
    return min(2 * pause_s, LONGEST_PAUSE_S)


def _device_of(directory: Path) -> int:
    """Return the device of the file system of `directory`, or of its nearest existing parent."""
    for path in (directory, *directory.parents):
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise EnvironmentProblem(f"cannot find the file system of {directory}")
