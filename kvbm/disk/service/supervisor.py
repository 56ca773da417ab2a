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

The first process can start later than the engine: the name of the blocks may depend on the content of many files
(`open_later`), or the disk hangs. Until then `is_on` is False, and the thread takes the same path as after the end of a
process.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.disk.directory import INDEX, InstanceLock, device_of
from kvbm.disk.health import DiskCounters
from kvbm.disk.index import BlockIndex, require_private_index
from kvbm.disk.service.client import ANSWER_LIMIT_S, DiskClient
from kvbm.disk.service.messages import LOST_IO
from kvbm.disk.wear import Wear
from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.threads import start
from kvbm.process.first_opening import FirstOpening
from kvbm.process.parent import how_it_ended

if TYPE_CHECKING:
    from kvbm.disk.orders import DiskResult, FoundBlocks, Read, Write
    from kvbm.disk.settings import DiskSettings, Namespace
    from kvbm.types import SegmentInfo

    OpenNext = Callable[[Path | None, bool, Callable[[], bool]], DiskClient]
    Named = Future[tuple[DiskSettings, Namespace]]

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0  # also the lifetime of a process that resets the pause
JOIN_S = 2.0
CHECK_INTERVAL_S = 0.01
NAME_INTERVAL_S = 0.2  # between looks whether a tier that waits for its name is closed
WAITS = "the disk tier has not started yet"

log = logging.getLogger(__name__)


class DiskSupervisor:
    """A disk process and its successors. Only the leader's thread uses it."""

    def __init__(self, open_next: OpenNext, named: Named, first: FirstOpening | None = None) -> None:
        """`open_next(path, uses_threads, is_cancelled)` opens a process, in the instance at `path` if that is
        available; with `uses_threads`, its I/O is done by threads whatever is configured. The first one is opened when
        `named` is done; `first` may wait for that."""
        self.losses = 0
        self.restarts = 0
        self._open_next = open_next
        self._process: DiskClient | _NoProcess = _NoProcess()
        self._is_lost = True
        self._results: list[DiskResult] = []  # not yet returned by `poll`
        self._uncleared: Path | None = None  # instance with a clear that is not durable yet
        self._is_clear_sent = self._is_clear_impossible = False
        self._has_ended_persistence = False  # every further process forgets what it finds, and persists nothing
        self._clears_first = False  # the first process forgets what it finds
        self._earlier_counters: DiskCounters | None = None  # sum of the earlier processes
        self._is_closing = threading.Event()
        # Owned by the holder of the lock. The thread holds it while it opens a process.
        self._lock = threading.Lock()
        self._next: DiskClient | None = None
        # Owned by the thread.
        self._path: Path | None = None
        self._last_error = ""
        self._uses_threads = False  # NIXL has lost I/O
        self._first = self._awaited = first
        self._thread = threading.Thread(target=self._supervise, args=(named,), name="kvbm-disk-keeper", daemon=True)
        start(self._thread)

    @classmethod
    def begin(
        cls,
        settings: DiskSettings,
        namespace: Namespace,
        segments: Sequence[SegmentInfo],
        *,
        hash_bytes: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> DiskSupervisor:
        """Start to open the first process, as DiskClient.open; later ones use the same arguments."""
        named: Named = Future()
        named.set_result((settings, namespace))
        return cls._begin(named, segments, hash_bytes, progress, FirstOpening("disk", settings.directory))

    @classmethod
    def open_later(cls, named: Named, segments: Sequence[SegmentInfo], *, hash_bytes: int) -> DiskSupervisor:
        """Open the first process when `named` is done, without waiting for it."""
        return cls._begin(named, segments, hash_bytes, None, None)

    @classmethod
    def _begin(
        cls,
        named: Named,
        segments: Sequence[SegmentInfo],
        hash_bytes: int,
        progress: Callable[[int, int], None] | None,
        first: FirstOpening | None,
    ) -> DiskSupervisor:
        device: list[int] = []  # of the first process that could be opened

        def open_next(path: Path | None, uses_threads: bool, is_cancelled: Callable[[], bool]) -> DiskClient:
            settings, namespace = named.result()
            _require_there(segments)
            if device and device_of(settings.directory) != device[0]:
                raise EnvironmentProblem(f"{settings.directory} is on a different file system than at start-up")
            opened = DiskClient.open(
                replace(settings, io="threads") if uses_threads else settings,
                namespace,
                segments,
                hash_bytes=hash_bytes,
                instance=path if settings.persist else None,
                progress=progress if not device else None,
                first=first,
                is_cancelled=is_cancelled,
            )
            device[:] = device or [opened.device]
            return opened

        return cls(open_next, named, first)

    def await_opening(self) -> None:
        """Wait for the first process of `begin`; do not wait for that of `open_later`. Raises EnvironmentProblem.

        A disk that hangs is left out, see FirstOpening, and used when it answers.
        """
        if self._awaited is not None and self._awaited.wait():
            self._advance()

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
        if isinstance(self._process, _NoProcess):
            self._clears_first = True
            raise EnvironmentProblem(f"the disk cache is not cleared yet: {WAITS}; it is cleared before it is used")
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
        if self._lock.acquire(timeout=JOIN_S):  # otherwise the thread closes what it is opening
            try:
                if self._next is not None:
                    self._next.close(timeout_s)
            finally:
                self._lock.release()
            self._thread.join(0.0 if self._process.is_blocked else JOIN_S)
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
            self.restarts += not isinstance(self._process, _NoProcess)
            self._process.discard()
            self._process, self._next = self._next, None
            self._is_lost = self._is_clear_sent = False
            if (self._has_ended_persistence or self._clears_first) and self._uncleared is None:
                self._uncleared = self._process.path
            self._clears_first = False
        finally:
            self._lock.release()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _supervise(self, named: Named) -> None:
        process = self._open_first(named)
        pause_s = FIRST_PAUSE_S / 2
        while process is not None:
            began_s = time.monotonic()
            code = process.wait_for_end()
            how = how_it_ended(code)
            self._uses_threads |= code == LOST_IO
            if self._is_closing.is_set():
                return
            has_lasted = time.monotonic() - began_s >= LONGEST_PAUSE_S
            pause_s = FIRST_PAUSE_S if has_lasted else _longer(pause_s)
            log.warning("disk process %d %s; restarting in %g s", process.pid, how, pause_s)
            process, pause_s = self._open_after(pause_s)

    def _open_first(self, named: Named) -> DiskClient | None:
        """Open the first process when its name is known; None if the tier is closed before."""
        while not named.done():
            wait_for([named], NAME_INTERVAL_S)
            if self._is_closing.is_set():
                return None
        opened, first = self._open(), self._first
        if opened is not None and first is not None:
            first.succeed()
        return opened or self._open_after(FIRST_PAUSE_S)[0]

    def _open_after(self, pause_s: float) -> tuple[DiskClient | None, float]:
        """Open a process after a pause, again and again; None if the tier is closed. Return the last pause too."""
        while not self._is_closing.wait(pause_s):
            if (opened := self._open()) is not None:
                return opened, pause_s
            pause_s = _longer(pause_s)
        return None, pause_s

    def _open(self) -> DiskClient | None:
        """Open the next process and hand it to the leader's thread."""
        with self._lock:
            try:
                opened = self._open_next(self._path, self._uses_threads, self._is_closing.is_set)
                try:
                    self._require_fit(opened)
                except BaseException:
                    opened.close(0)
                    raise
            except (EnvironmentProblem, OSError, RuntimeError, MemoryError) as error:
                first, self._first = self._first, None
                if first is not None and first.fail(error):
                    self._is_closing.set()
                elif str(error) != self._last_error and not self._is_closing.is_set():
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
        if opened.slot_count != (self.slot_count or opened.slot_count):
            raise EnvironmentProblem(f"{opened.path} has {opened.slot_count} slots, not {self.slot_count}")


class _NoProcess:
    """Stands for the DiskClient until the first process has started."""

    is_on = is_alive = is_silent = is_clearing = is_blocked = False
    slot_count = pid = 0
    io_name = ""
    off_because = WAITS
    home: Path | None = None
    path = Path()
    counters = DiskCounters()

    def poll(self) -> list[DiskResult]:
        return []

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        return None

    def submit(self, order: Read | Write) -> None:
        raise InvariantError(f"ticket {order.ticket} for a disk tier that is off")

    def forget(self, disk_slots: Sequence[int]) -> None:
        """Do nothing: it has no blocks."""

    def clear(self, *, ends_persistence: bool = False) -> None:
        """Do nothing: the supervisor clears the first process."""

    def wear(self) -> Wear:
        return Wear(None, None, None)

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""


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
                require_private_index(path / INDEX)
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
    try:
        start(thread)
    except RuntimeError as error:
        outcome[0] = str(error)
    else:
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
