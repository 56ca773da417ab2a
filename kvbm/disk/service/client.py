"""DiskClient: the leader's end of a disk process, which runs a DiskStorage.

The threads of a DiskStorage take the GIL several times per block. In the engine's process this would pause either the
engine's step or the disk, so they have a process of their own (docs/adr/0011). Calls send a message and do not block,
except `open` and `close`. The child exits with this process. If it exits earlier, all orders in flight fail and the
client stays off. If it does not answer for ANSWER_LIMIT_S, the client is off until it does; its orders stay open.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.disk.health import DiskCounters
from kvbm.disk.orders import DiskResult, Forget, FoundBlocks, Read, Write
from kvbm.disk.service import messages
from kvbm.disk.settings import DiskSettings, Namespace
from kvbm.disk.wear import Wear, WearMeter
from kvbm.errors import EnvironmentProblem
from kvbm.host.cores import allowed_cores
from kvbm.process.channel import Channel, ChannelClosed
from kvbm.process.child import Logged, Opening
from kvbm.process.first_opening import FirstOpening
from kvbm.process.parent import has_ended, is_gone, log_for, start_child
from kvbm.types import SegmentInfo

ANSWER_LIMIT_S = 2.0  # without progress; 4 beats
REPLACE_AFTER_S = 60.0
BEAT_LIMIT_S = 20.0  # without any message while the storage is opened; a busy machine starts a process in seconds
OPEN_LIMIT_S = 300.0  # without any message but heartbeats
OPENING_CHECK_S = 0.2
GRACE_S = 1.0
EXIT_S = 1.0
FOUND_BATCH_BLOCKS = 1024

log = logging.getLogger(__name__)


class UnresponsiveDisk(EnvironmentProblem):
    """The disk process, or the disk, does not answer while the storage is opened."""


class DiskClient:
    """One disk process. `slot_count` and `io_name` come from its storage."""

    def __init__(self, child: subprocess.Popen[bytes], channel: Channel) -> None:
        self._child = child
        self._channel = channel
        self._results: list[DiskResult] = []
        self._in_flight: dict[int, Read | Write] = {}  # ticket -> order, until `poll` returns it
        self._cleared: dict[int, set[int]] = {}  # ticket of a write in flight -> positions cleared since
        self._unanswered_clears = 0
        self._heard_s = self._moved_s = 0.0  # the last message, and the last progress, since an answer is expected
        self._silences = 0
        self.is_silent = False  # expected to answer, and has made no progress for ANSWER_LIMIT_S
        self.off_because: str | None = None
        self.is_blocked = False  # it was killed, and its I/O has not ended
        self.pid = child.pid
        self.is_alive = True  # until the end of the process is noticed
        self._has_exited = False  # set by `wait_for_end`, before the channel reports it
        self._found: deque[FoundBlocks] = deque()
        self._has_all_found = self._is_recover_pending = False
        self.home: Path | None = None  # directory of the namespace, if the cache is persistent
        self.counters = DiskCounters()

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
        first: FirstOpening | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> DiskClient:
        """Start a process and open its storage. Raises EnvironmentProblem, UnresponsiveDisk if it does not answer or is
        cancelled.

        `progress(done_bytes, total_bytes)` is called while space is allocated. `instance`: this one, or a new one if it
        is not available. `first` hears the messages of the process.
        """
        client = cls(*start_child("kvbm.disk.service.server", "a disk process"))
        try:
            cores = frozenset(allowed_cores())
            client._send(messages.Open(settings, namespace, tuple(segments), hash_bytes, cores, instance))
            opened = client._wait_until_open(progress, first, is_cancelled)
        except BaseException as error:
            client.is_silent = isinstance(error, UnresponsiveDisk)
            client._end()
            raise
        client._take_over(opened)
        client.home = opened.path.parent if settings.persist else None
        return client

    @property
    def is_on(self) -> bool:
        """False after repeated errors, while I/O hangs, while the process does not answer or a clear is not durable, or
        after the end of the process. Submit nothing then."""
        is_working = self.off_because is None and not self._has_exited
        return is_working and not (self.is_silent or self._unanswered_clears)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has a result."""
        return self._channel.fileno()

    def wear(self) -> Wear:
        """Measure the wear of the drive."""
        return self._wear.measure(self.counters.bytes_written)

    def recovered(self, *, waits: bool = True) -> FoundBlocks | None:
        """Return the next batch of blocks found at opening, oldest first, each block once.

        Batches are small, so that an engine's step can process one. None if the next batch has not arrived, for
        ANSWER_LIMIT_S if the call `waits`, or if the process has ended.
        """
        deadline_s = time.monotonic() + ANSWER_LIMIT_S
        while not self._found and self.is_alive and not self._has_all_found:
            if not self._is_recover_pending:
                self._expect_answer()
                self._is_recover_pending = True
                self._send(messages.Recover())
            left_s = deadline_s - time.monotonic()
            if waits:
                self._channel.wait(max(0.0, left_s))
            self._receive()
            if not waits or left_s <= 0:
                break
        if self._found:
            return self._found.popleft()
        return FoundBlocks(b"", b"", is_last=True) if self._has_all_found else None

    def submit(self, order: Read | Write) -> None:
        """Send an order. `poll` returns its result; it fails if the process has ended or ends before."""
        self._expect_answer()
        self._in_flight[order.ticket] = order
        self._send(order)

    def forget(self, disk_slots: Sequence[int]) -> None:
        """Delete blocks, durably soon, in order of submission with writes."""
        if disk_slots:
            self._send(Forget(disk_slots))

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
        self._send(messages.Clear(tenant, ends_persistence))

    @property
    def is_clearing(self) -> bool:
        """Whether a clear is not durable yet."""
        return self._unanswered_clears > 0

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` may have something to do."""
        if self.is_alive:
            self._channel.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def poll(self) -> list[DiskResult]:
        """Return the tickets that have ended since the last call."""
        self._receive()
        self._watch()
        for result in self._results:
            self._in_flight.pop(result.ticket, None)
        results, self._results = self._results, []
        if self._cleared:
            results = [self._without_cleared(result) for result in results]
        return results

    def close(self, timeout_s: float) -> None:
        """Fail what has not started, wait at most `timeout_s` for running I/O, and end the process.

        A process that does not answer is killed, and so is each if `timeout_s` is 0. `poll` still returns what was
        reported before.
        """
        self._receive()
        self._watch()
        self.is_silent |= timeout_s <= 0
        if not self.is_silent:
            self._send(messages.Close(timeout_s))
            deadline_s = time.monotonic() + timeout_s + GRACE_S
            while self.is_alive and time.monotonic() < deadline_s:
                self._channel.wait(max(0.0, deadline_s - time.monotonic()))
                self._receive(is_closing=True)
        self._end()

    def wait_for_end(self) -> int:
        """Block until the process has exited; return its exit code. For a separate thread."""
        code = self._child.wait()
        self._has_exited = True
        return code

    def discard(self) -> None:
        """Release the channel of a process that has exited."""
        self._channel.close()
        self.is_alive = False

    def _wait_until_open(
        self,
        progress: Callable[[int, int], None] | None,
        first: FirstOpening | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> messages.Opened:
        self._heard_s = moved_s = time.monotonic()
        while self.is_alive:
            self._channel.wait(min(BEAT_LIMIT_S, OPENING_CHECK_S))
            received = self._messages()
            now = time.monotonic()
            has_moved = any(not isinstance(message, Opening) for message in received)
            moved_s = now if has_moved else moved_s
            if received and first is not None:
                first.heard(has_moved=has_moved)
            if is_cancelled():
                raise UnresponsiveDisk("closed")
            if now - self._heard_s >= BEAT_LIMIT_S:
                raise UnresponsiveDisk(f"disk process {self.pid} does not answer for {BEAT_LIMIT_S:g} s")
            if now - moved_s >= OPEN_LIMIT_S:
                raise UnresponsiveDisk(f"opening the disk cache has made no progress for {OPEN_LIMIT_S:g} s")
            for message in received:
                match message:
                    case messages.SpaceTaken() if progress is not None:
                        progress(*message)
                    case messages.Problem():
                        raise EnvironmentProblem(message.message, hint=message.hint)
                    case messages.Opened():
                        return message
                    case Logged():
                        log_for(message)
        raise EnvironmentProblem(f"the disk process exited with code {self._child.wait(EXIT_S)}")

    def _take_over(self, opened: messages.Opened) -> None:
        self.slot_count = opened.slot_count
        self.io_name = opened.io_name
        self.path = opened.path
        self.counters = opened.counters
        self.device = opened.device
        self._wear = WearMeter(opened.path)

    def _send(self, message: object) -> None:
        """Send a message; once the child has exited, fail all tickets in flight."""
        if self.is_alive:
            try:
                self._channel.send(message)
                return
            except ChannelClosed:
                self._handle_end_of_channel()
        if not self.is_alive:
            self._fail_in_flight()

    def _receive(self, *, is_closing: bool = False) -> None:
        for message in self._messages(is_closing=is_closing):
            match message:
                case messages.Status():
                    self._results += message.results
                    self.off_because = message.off_because
                    self._moved_s = max(self._moved_s, message.moved_s)
                    self.counters = replace(message.counters, times_off=message.counters.times_off + self._silences)
                case messages.Cleared():
                    self._unanswered_clears = 0
                case FoundBlocks():
                    self._is_recover_pending = False
                    if not self._has_all_found:
                        self._found.extend(message.parts(FOUND_BATCH_BLOCKS))
                        self._has_all_found = message.is_last
                case Logged():
                    log_for(message)

    def _messages(self, *, is_closing: bool = False) -> list[object]:
        if not self.is_alive:
            return []
        try:
            self._channel.flush()
            received = self._channel.receive()
        except ChannelClosed:
            self._handle_end_of_channel(is_expected=is_closing)
            return []
        if received:
            self._heard_s = time.monotonic()
        return received

    def _handle_end_of_channel(self, *, is_expected: bool = False) -> None:
        """Kill a process that closed the channel or sent invalid data: it may still write into host memory. Treat it as
        silent until it has ended. The kernel ends it only after the last I/O of its threads."""
        if is_expected or is_gone(self.pid):
            self._handle_exit(is_expected=is_expected)
        else:
            self._child.kill()

    def _is_awaited(self) -> bool:
        return bool(self._in_flight or self._unanswered_clears or self._is_recover_pending)

    def _expect_answer(self) -> None:
        """Note that an answer is expected from now on. Call before something is sent that is answered."""
        if not self._is_awaited():
            self._heard_s = self._moved_s = time.monotonic()

    def _watch(self) -> None:
        """Turn the disk off while the process does not answer, and on again when it does. Call after `_receive`.

        The process reports every BEAT_S until when its reads have made progress, so a process that is stopped or hangs
        and a disk that hangs or is much too slow are noticed alike. After REPLACE_AFTER_S the process is replaced, so
        that the host memory of its reads is free again.
        """
        was_silent, now = self.is_silent, time.monotonic()
        self.is_silent = self.is_alive and self._is_awaited() and now - self._moved_s > ANSWER_LIMIT_S
        if self.is_silent and not was_silent:
            self._silences += 1
            self.counters = replace(self.counters, times_off=self.counters.times_off + 1)
            log.warning("the disk tier is off until disk process %d answers or its reads make progress", self.pid)
        elif was_silent and not self.is_silent and self.is_alive:
            log.warning("disk process %d answers again", self.pid)
        if self.is_silent and now - min(self._heard_s, self._moved_s) > REPLACE_AFTER_S:
            log.error("disk process %d has made no progress for %g s: killing it", self.pid, REPLACE_AFTER_S)
            self._heard_s = self._moved_s = now
            self._child.kill()

    def _handle_exit(self, *, is_expected: bool = False) -> None:
        """Handle the exit of the child: its I/O has ended."""
        self.is_alive = False
        if is_expected:
            return
        self.off_because = "the disk process has exited"
        self.counters = replace(self.counters, times_off=self.counters.times_off + 1)
        log.error("the disk tier is off: its process %d has exited", self.pid)
        self._fail_in_flight()

    def _fail_in_flight(self) -> None:
        ended = {result.ticket for result in self._results}
        for ticket, order in self._in_flight.items():
            if ticket not in ended:
                self._results.append(DiskResult.failed(order, f"off: {self.off_because}"))

    def _without_cleared(self, result: DiskResult) -> DiskResult:
        """Mark the blocks of a write that were cleared before its result was returned."""
        cleared = self._cleared.pop(result.ticket, set())
        is_good = tuple(good and position not in cleared for position, good in enumerate(result.is_good))
        return replace(result, is_good=is_good)

    def _end(self) -> None:
        """Close the channel, which makes the child exit, and kill a child that does not exit by itself."""
        self._channel.close()
        self.is_alive = False
        if not self.is_silent and has_ended(self._child, EXIT_S):
            return
        self._child.kill()
        self.is_blocked = not has_ended(self._child, EXIT_S)
        if self.is_blocked:
            log.warning("disk process %d is blocked in I/O: the cache stays locked until it exits", self.pid)
