"""DiskProcess: a DiskTier in a process of its own, as the leader sees it.

The threads of a disk tier take the interpreter's lock several times per block. In the engine's process each of these
times costs either the engine, whose step pauses, or the disk, which waits for the step: so they have their own process
(docs/adr/0011). Calls send a message and do not wait, except for `open`, `clear` and `close`. The child ends with this
process. If it ends before, what is in flight has failed and this one is off from then on.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.disk.directory import INDEX, InstanceLock
from kvbm.disk.health import DiskCounters, HealthLimits
from kvbm.disk.index import BlockIndex
from kvbm.disk.orders import DiskResult, Forget, FoundBlocks, Read, Write
from kvbm.disk.service.messages import (
    ChannelClosed,
    Clear,
    Cleared,
    Close,
    DiskChannel,
    Found,
    Logged,
    Open,
    Opened,
    Problem,
    Recover,
    SpaceTaken,
    Status,
)
from kvbm.disk.settings import DiskSettings, Namespace
from kvbm.disk.wear import Wear, WearMeter
from kvbm.errors import EnvironmentProblem
from kvbm.host.cores import allowed_cores
from kvbm.types import SegmentInfo

HOME = str(Path(__file__).parents[3])  # where the child finds this package
CLEAR_TIMEOUT_S = HealthLimits().clear_timeout_s + 5.0
GRACE_S = 2.0
BLOCKS_AT_A_TIME = 1024

log = logging.getLogger(__name__)


class DiskClient:
    """See the module's text. `slot_count` and `io_name` are those of the tier."""

    def __init__(self, child: subprocess.Popen[bytes], channel: DiskChannel) -> None:
        self._child = child
        self._channel = channel
        self._results: list[DiskResult] = []
        self._in_flight: dict[int, Read | Write] = {}  # ticket -> order, until `poll` returns it
        self._cleared: Cleared | None = None
        self._unanswered_clears = 0
        self._off_because: str | None = None
        self._is_alive = True
        self._has_ended = False  # set by who waits for its end, before the channel tells
        self._found: deque[FoundBlocks] = deque()
        self._is_told = self._is_asked = False  # all of it; some of it
        self._is_kept = False
        self.home: Path | None = None  # of all caches of the namespace, if it is kept
        self.counters = DiskCounters()
        _OPEN.add(self)

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
    ) -> DiskClient:
        """`progress(done_bytes, total_bytes)` while space is taken; `instance`: this one, or a new one if it cannot be
        had. Raises EnvironmentProblem."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = _start(theirs.fileno())
        process = cls(child, DiskChannel(ours))
        try:
            cores = frozenset(allowed_cores())
            process._send(Open(settings, namespace, tuple(segments), hash_bytes, cores, instance))
            opened = process._wait_until_open(progress)
        except BaseException:
            process._end()
            raise
        process._take_over(opened)
        process._is_kept = settings.persist
        process.home = opened.path.parent if settings.persist else None
        return process

    @property
    def is_on(self) -> bool:
        """False after repeated errors or while I/O hangs; every ticket then ends as failed."""
        return self._off_because is None and not self._has_ended

    @property
    def off_because(self) -> str | None:
        return self._off_because

    @property
    def is_alive(self) -> bool:
        """Whether its end has not been noticed here."""
        return self._is_alive

    @property
    def path(self) -> Path:
        """Where its files lie; without `persist`, the directory."""
        return self._path

    def fileno(self) -> int:
        """Readable when `poll` has something, for who can wait."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        return self._child.pid

    def wear(self) -> Wear:
        """What this has done to the drive."""
        return self._wear.measure(self.counters.bytes_written)

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """The next of the blocks that were there at opening, each once, the one written longest ago first. They are few
        at a time, so that a step can take them and none has two places in this process. None if they have not come
        yet, or if the process has ended."""
        while not self._found and self._is_alive and not self._is_told:
            if not self._is_asked:
                self._is_asked = True
                self._send(Recover())
            elif waits:
                self._channel.wait(None)
            self._receive()
            if not waits:
                break
        if self._found:
            return self._found.popleft()
        return FoundBlocks(b"", b"", is_last=True) if self._is_told else None

    def submit(self, order: Read | Write) -> None:
        """Send it. `poll` returns its result, as failed if the process has ended or ends before that."""
        self._in_flight[order.ticket] = order
        self._send(order)

    def forget(self, disk_slots: Sequence[int]) -> None:
        """Durable soon, in the order of submission with writes."""
        if disk_slots:
            self._send(Forget(disk_slots))

    def clear(self, tenant: bytes | None = None) -> None:
        """Forget all blocks, or one tenant's, and every write that `poll` has not returned. Durable when it returns.

        Raises EnvironmentProblem if it is not: the tier is off then until it is, and tries again as long as it is open.
        """
        self._unanswered_clears += 1
        self._found.clear()
        self._is_told = True
        self._send(Clear(tenant))
        deadline_s = time.monotonic() + CLEAR_TIMEOUT_S
        while self._unanswered_clears and self._is_alive and time.monotonic() < deadline_s:
            self._channel.wait(max(0.0, deadline_s - time.monotonic()))
            self._receive()
        self._results = [self._without(result, tenant) for result in self._results]
        if self._unanswered_clears and not self._is_alive:
            self._clear_in_its_place(tenant)
            return
        answered = None if self._unanswered_clears else self._cleared
        problem = answered.problem if answered else (self._not_cleared(), None)
        if problem is not None:
            raise EnvironmentProblem(problem[0], hint=problem[1])

    def _clear_in_its_place(self, tenant: bytes | None) -> None:
        """The child has ended, and with it its hold on the cache. Raises EnvironmentProblem."""
        if not self._is_kept:
            return  # it went with the child
        lock = InstanceLock.take(self._path)
        if lock is None:
            raise EnvironmentProblem(self._not_cleared(), hint=f"remove {self._path} before the next start")
        try:
            index = BlockIndex.open(self._path / INDEX)
            try:
                index.clear(tenant)
            finally:
                index.close()
        except (OSError, sqlite3.Error) as error:
            raise EnvironmentProblem(f"{self._not_cleared()}: {error}") from error
        finally:
            lock.release()

    def poll(self) -> list[DiskResult]:
        """The tickets that have ended since the last call."""
        self._receive()
        for result in self._results:
            self._in_flight.pop(result.ticket, None)
        results, self._results = self._results, []
        return results

    def close(self, timeout_s: float) -> None:
        """Fail what has not begun, wait at most `timeout_s` for what runs, and end the process."""
        self._send(Close(timeout_s))
        deadline_s = time.monotonic() + timeout_s + GRACE_S
        while self._is_alive and time.monotonic() < deadline_s:
            self._channel.wait(max(0.0, deadline_s - time.monotonic()))
            self._receive(is_closing=True)
        self._end()

    def wait_for_end(self) -> int:
        """How the process has ended, as soon as it has; for a thread of its own."""
        code = self._child.wait()
        self._has_ended = True
        return code

    def discard(self) -> None:
        """Of a process that has ended."""
        self._channel.close()
        self._is_alive = False

    def _wait_until_open(self, progress: Callable[[int, int], None] | None) -> Opened:
        while self._is_alive:
            self._channel.wait(None)
            for message in self._messages():
                match message:
                    case SpaceTaken() if progress is not None:
                        progress(*message)
                    case Problem():
                        raise EnvironmentProblem(message.message, hint=message.hint)
                    case Opened():
                        return message
                    case Logged():
                        _log(message)
        raise EnvironmentProblem(f"the process for disk I/O ended with {self._child.wait(GRACE_S)}")

    def _take_over(self, opened: Opened) -> None:
        self.slot_count = opened.slot_count
        self.io_name = opened.io_name
        self._path = opened.path
        self._wear = WearMeter(opened.path)

    def _send(self, message: object) -> None:
        """Where the child has ended, `_lose` has said so, and a ticket fails at once."""
        if self._is_alive:
            try:
                self._channel.send(message)
                return
            except ChannelClosed:
                self._lose()
        self._fail_in_flight()

    def _receive(self, *, is_closing: bool = False) -> None:
        for message in self._messages(is_closing=is_closing):
            match message:
                case Status():
                    self._results += message.results
                    self._off_because = message.off_because
                    self.counters = message.counters
                case Cleared():
                    self._cleared = message
                    self._unanswered_clears -= 1
                case Found() if not self._is_told:
                    self._found.extend(message.blocks.parts(BLOCKS_AT_A_TIME))
                    self._is_asked, self._is_told = False, message.blocks.is_last
                case Logged():
                    _log(message)

    def _messages(self, *, is_closing: bool = False) -> list[object]:
        if not self._is_alive:
            return []
        try:
            self._channel.flush()
            return self._channel.receive()
        except ChannelClosed:
            self._lose(is_expected=is_closing)
            return []

    def _lose(self, *, is_expected: bool = False) -> None:
        """The child has ended; the kernel closes the channel when the last I/O of its threads is over."""
        self._is_alive = False
        if is_expected:
            return
        self._off_because = "the process for disk I/O has ended"
        self.counters = replace(self.counters, times_off=self.counters.times_off + 1)
        log.error("the disk tier is off: its process %d has ended", self._child.pid)
        self._fail_in_flight()

    def _fail_in_flight(self) -> None:
        ended = {result.ticket for result in self._results}
        for ticket, order in self._in_flight.items():
            if ticket not in ended:
                self._results.append(DiskResult.failed(order, f"off: {self._off_because}"))

    def _without(self, result: DiskResult, tenant: bytes | None) -> DiskResult:
        """A write that ended before it was cleared."""
        order = self._in_flight[result.ticket]
        if not isinstance(order, Write):
            return result
        is_kept = [tenant is not None and owner != tenant for owner in order.tenants]
        return replace(result, is_good=tuple(good and kept for good, kept in zip(result.is_good, is_kept, strict=True)))

    def _not_cleared(self) -> str:
        why = f"not within {CLEAR_TIMEOUT_S:g} s" if self._is_alive else f"{self._off_because}"
        return f"the disk cache is not cleared durably: {why}"

    def _end(self) -> None:
        """Closes the channel, which ends a child that can still end."""
        self._channel.close()
        self._is_alive = False
        try:
            self._child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            log.warning("the process %d still waits for its disk: the cache stays locked", self._child.pid)


def _start(fd: int) -> subprocess.Popen[bytes]:
    """In a session of its own: what a terminal sends to the engine's group is the engine's to act on."""
    paths = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH", "")]))
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "kvbm.disk.service.server", str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentProblem(f"no process for disk I/O can be started: {error.strerror}") from error


def _log(message: Logged) -> None:
    logging.getLogger(message.name).log(message.level, "%s", message.text)


_OPEN: weakref.WeakSet[DiskClient] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    """It would keep the channel open after the leader's end."""
    for process in _OPEN:
        process._channel.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
