"""LastingDisk: a DiskProcess, and another one in its place when it has ended.

A thread waits for the process, so that no zombie stays and the end is told also while the engine rests. It pauses,
longer after each process that did not last, and opens the next one, which finds what the last one had committed. The
leader never waits for that:

    process ends        its tickets have failed, `losses` grows, nothing is on
    next one is open    `poll` puts it in its place, and `recovered` tells what it has found

The next one takes the same instance, whose lock went with the process, or makes a new one: never another that is there,
which may hold blocks from before a `clear`. A clear that was not durable is made up for before anything is served.
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
LONGEST_PAUSE_S = 60.0  # also how long a process must last for the next pause to be the first one again
JOIN_S = 2.0

log = logging.getLogger(__name__)


class DiskSupervisor:
    """See the module's text. One thread uses it, the leader's."""

    def __init__(self, process: DiskClient, open_next: Callable[[Path], DiskClient]) -> None:
        """*Consumes* the process. `open_next(path)` opens another, in the instance at `path` if that can be had."""
        self.slot_count = process.slot_count
        self.home = process.home
        self.losses = 0
        self.restarts = 0
        self._open_next = open_next
        self._process = process
        self._is_lost = False
        self._before: DiskCounters | None = None  # of the processes before this one
        self._is_closing = threading.Event()
        # Owned by whoever holds the lock; the thread does while it opens.
        self._lock = threading.Lock()
        self._next: DiskClient | None = None
        self._owes_clear = False
        # Owned by the thread.
        self._path = process.path
        self._told = ""
        self._thread = threading.Thread(target=self._keep, args=(process,), name="kvbm-disk-keeper", daemon=True)
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
        """As DiskProcess.open, of which later ones are opened too. Raises EnvironmentProblem."""
        open_one = partial(DiskClient.open, settings, namespace, segments, hash_bytes=hash_bytes)
        first = open_one(progress=progress)
        device = _device_of(settings.directory)

        def open_next(path: Path) -> DiskClient:
            if _device_of(settings.directory) != device:
                raise EnvironmentProblem(f"{settings.directory} is on another file system than it was")
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
        """Of all processes together."""
        counters = self._process.counters
        return counters if self._before is None else self._before.plus(counters)

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """The next of what the process found when it was opened, each once; None while there is none."""
        return None if self._is_lost else self._process.recovered(waits=waits)

    def submit(self, order: Read | Write) -> None:
        self._process.submit(order)

    def forget(self, disk_slots: Sequence[int]) -> None:
        self._process.forget(disk_slots)

    def wear(self) -> Wear:
        return self._process.wear()

    def poll(self) -> list[DiskResult]:
        """The tickets that have ended: all of them when `losses` has grown."""
        if self._is_lost:
            self._take_next()
        results = self._process.poll()
        if not (self._process.is_alive or self._is_lost):
            self._is_lost = True
            self.losses += 1
        return results

    def clear(self) -> None:
        """Forget all blocks, durably when it returns. Raises EnvironmentProblem if that cannot be: then no block is
        served until it is, by no process."""
        self._owes_clear = True
        if not self._lock.acquire(timeout=CLEAR_TIMEOUT_S):
            raise EnvironmentProblem(
                f"the disk cache is not cleared durably: its next process did not open within {CLEAR_TIMEOUT_S:g} s"
            )
        try:
            (self._next or self._process).clear()
            self._owes_clear = False
        finally:
            self._lock.release()

    def close(self, timeout_s: float) -> None:
        self._is_closing.set()
        self._process.close(timeout_s)
        if self._lock.acquire(timeout=timeout_s):  # else the thread closes what it is opening
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
            self._before = self.counters
            self._process.discard()
            self._process, self._next = self._next, None
            self._is_lost = False
            self.restarts += 1
        finally:
            self._lock.release()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _keep(self, process: DiskClient) -> None:
        pause_s = FIRST_PAUSE_S / 2
        while True:
            began_s = time.monotonic()
            how = _how_it_ended(process.wait_for_end())
            if self._is_closing.is_set():
                return
            has_lasted = time.monotonic() - began_s >= LONGEST_PAUSE_S
            pause_s = FIRST_PAUSE_S if has_lasted else _longer(pause_s)
            log.warning("the disk tier's process %d %s; the next one in %g s", process.pid, how, pause_s)
            while not self._is_closing.wait(pause_s):
                if (opened := self._open()) is not None:
                    process = opened
                    break
                pause_s = _longer(pause_s)
            else:
                return

    def _open(self) -> DiskClient | None:
        """The next process, which is handed to the leader's thread."""
        with self._lock:
            try:
                opened = self._open_next(self._path)
                try:
                    self._require_fit(opened)
                except BaseException:
                    opened.close(0)
                    raise
            except (EnvironmentProblem, OSError) as error:
                if str(error) != self._told:
                    self._told = str(error)
                    log.warning("the disk tier stays off: %s", error)
                return None
            if self._next is not None:  # nobody has seen it
                self._next.discard()
            self._path, self._told, self._owes_clear = opened.path, "", False
            self._next = opened
            return opened

    def _require_fit(self, opened: DiskClient) -> None:
        if self._is_closing.is_set():
            raise EnvironmentProblem("it is closed")
        if opened.slot_count != self.slot_count:
            raise EnvironmentProblem(f"{opened.path} has {opened.slot_count} slots, and not {self.slot_count}")
        if self._owes_clear:
            opened.clear()


def _longer(pause_s: float) -> float:
    return min(2 * pause_s, LONGEST_PAUSE_S)


def _how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"has ended with {code}"


def _device_of(directory: Path) -> int:
    """Of the file system that holds it, or would, if it was made again."""
    for path in (directory, *directory.parents):
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise EnvironmentProblem(f"{directory} has no file system")
