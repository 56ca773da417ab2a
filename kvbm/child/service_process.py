"""ServiceProcess: the leader's end of a child process that executes orders.

Calls send a message and do not block, except `start` and `close`. The child exits with this process. If it exits
earlier, all orders in flight fail and it stays off. If it does not answer for ANSWER_LIMIT_S, it is off until it does;
its orders stay open, because it may still write into host memory. If that lasts for REPLACE_AFTER_S, it is killed,
which ends its orders. A process that has not started yet is like one that has exited.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from typing import ClassVar, Generic, Protocol, TypeVar

from kvbm.child import deadlines
from kvbm.child.channel import Channel, ChannelClosed
from kvbm.child.child import Close, Logged, Opening, Problem, ServiceCounters, Status
from kvbm.child.first_opening import FirstOpening
from kvbm.child.parent import has_ended, how_it_ended, is_gone, start_child
from kvbm.errors import EnvironmentProblem, TierProblem
from kvbm.text.log_limit import Lines

log = logging.getLogger(__name__)


class HasTicket(Protocol):
    @property
    def ticket(self) -> int: ...


Order = TypeVar("Order", bound=HasTicket)
Result = TypeVar("Result", bound=HasTicket)
Counters = TypeVar("Counters", bound=ServiceCounters)


class UnresponsiveProcess(TierProblem):
    """It does not answer while it opens what it serves."""


class ServiceProcess(Generic[Order, Result, Counters]):
    """One process. `counters` are its own, and `times_off` counts its silences too. `failed(order, why)` returns the
    result of an order of which nothing is known."""

    tier: ClassVar[str]  # for people
    module: ClassVar[str]  # what the process runs

    def __init__(self, counters: Counters, failed: Callable[[Order, str], Result]) -> None:
        self.counters = counters
        self._failed = failed
        self.off_because: str | None = f"the {self.tier} tier has not started yet"
        self.pid = 0
        self.is_alive = False  # from the start until its end is noticed
        self.is_silent = False  # an answer is due, and has been for ANSWER_LIMIT_S
        self.is_blocked = False  # it was killed, and its I/O has not ended
        self._child: subprocess.Popen[bytes]  # once it has started, as the channel
        self._channel: Channel
        self._is_open = False
        self._has_exited = False  # set by `wait_for_end`, before the channel reports it
        self._in_flight: dict[int, Order] = {}  # ticket -> order, until `poll` returns it
        self._results: list[Result] = []
        self._heard_s = self._moved_s = 0.0  # the last message, and the last progress, since an answer is due
        self._silences = 0

    def start(self, order: object, place: object, first: FirstOpening | None, is_cancelled: Callable[[], bool]) -> None:
        """Start the process, and wait until it has opened what `order` says. Raises EnvironmentProblem,
        UnresponsiveProcess if it does not answer or is cancelled.

        `place` is for its message. `first` hears the messages of the process.
        """
        self._adopt(*start_child(self.module, f"the {self.tier} process"))
        try:
            self._send(order)
            self._wait_until_open(place, first, is_cancelled)
        except BaseException as error:
            self.is_silent = isinstance(error, UnresponsiveProcess)
            self._end()
            raise

    @property
    def is_on(self) -> bool:
        """False before its start, while it does not answer or is off by its own judgement, and after its end."""
        return self.off_because is None and not (self._has_exited or self.is_silent)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has a result."""
        return self._channel.fileno()

    def submit(self, order: Order) -> None:
        """Send an order. `poll` returns its result; it fails if the process has ended or ends before."""
        self._expect_answer()
        self._in_flight[order.ticket] = order
        self._send(order)

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` may have something to do."""
        if self.is_alive:
            self._channel.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def poll(self) -> list[Result]:
        """Return the orders that have ended since the last call."""
        self._receive()
        self._watch()
        for result in self._results:
            self._in_flight.pop(result.ticket, None)
        results, self._results = self._results, []
        return results

    def close(self, timeout_s: float) -> None:
        """Let it finish its work within `timeout_s`, and end the process.

        One that does not answer is killed, and so is each if `timeout_s` is 0. `poll` still returns what was reported
        before.
        """
        if not self.pid:
            return
        self._receive()
        self._watch()
        self.is_silent |= timeout_s <= 0
        if not self.is_silent:
            self._send(Close(timeout_s))
            deadline_s = time.monotonic() + timeout_s + deadlines.GRACE_S
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
        if self.pid:
            self._channel.close()
        self.is_alive = False

    def _handle(self, message: object) -> None:
        """Take a message. A service adds its own messages, and sets `_is_open` when the process has opened."""
        match message:
            case Status():
                self._results += message.results
                self.off_because = message.off_because
                self._moved_s = max(self._moved_s, message.moved_s)
                self.counters = message.counters
                self.counters.times_off += self._silences
            case Problem():
                kind = TierProblem if message.can_pass else EnvironmentProblem
                raise kind(message.message, hint=message.hint)
            case Logged():
                logging.getLogger(message.name).log(message.level, "%s", Lines(message.text))

    def _is_awaited(self) -> bool:
        return bool(self._in_flight)

    def _answered_s(self) -> float:
        """When it last answered; silence is judged by this."""
        return self._heard_s

    def _progressed_s(self) -> float:
        """When it last made progress; its replacement is judged by this."""
        return min(self._heard_s, self._moved_s)

    def _adopt(self, child: subprocess.Popen[bytes], channel: Channel) -> None:
        self._child, self._channel = child, channel
        self.pid, self.is_alive, self.off_because = child.pid, True, None

    def _wait_until_open(self, place: object, first: FirstOpening | None, is_cancelled: Callable[[], bool]) -> None:
        self._heard_s = moved_s = time.monotonic()
        while self.is_alive:
            self._channel.wait(deadlines.OPENING_CHECK_S)
            received = self._messages()
            now = time.monotonic()
            has_moved = any(not isinstance(message, Opening) for message in received)
            moved_s = now if has_moved else moved_s
            if received and first is not None:
                first.heard(has_moved=has_moved)
            if is_cancelled():
                raise UnresponsiveProcess("closed")
            if now - self._heard_s >= deadlines.BEAT_LIMIT_S:
                limit_s = deadlines.BEAT_LIMIT_S
                raise UnresponsiveProcess(f"{place}: {self.tier} process {self.pid} does not answer for {limit_s:g} s")
            if now - moved_s >= deadlines.OPEN_LIMIT_S:
                raise UnresponsiveProcess(f"{place}: opening has made no progress for {deadlines.OPEN_LIMIT_S:g} s")
            for message in received:
                self._handle(message)
            if self._is_open:
                return
        code = self._child.wait(deadlines.EXIT_S)
        raise TierProblem(f"{place}: the {self.tier} process {how_it_ended(code)} while it opened")

    def _send(self, message: object) -> None:
        """Send a message; once the child has exited, fail all orders in flight."""
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
            self._handle(message)

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
        if not (is_expected or is_gone(self.pid)):
            self._child.kill()
            return
        self.is_alive = False
        if not is_expected:
            self._handle_loss()

    def _handle_loss(self) -> None:
        """Handle an exit that was not asked for: its I/O has ended."""
        self.off_because = f"the {self.tier} process has exited"
        self._fail_in_flight()

    def _fail_in_flight(self) -> None:
        ended = {result.ticket for result in self._results}
        for ticket, order in self._in_flight.items():
            if ticket not in ended:
                self._results.append(self._failed(order, f"off: {self.off_because}"))

    def _expect_answer(self) -> None:
        """Note that an answer is due from now on. Call before something is sent that is answered."""
        if not self._is_awaited():
            self._heard_s = self._moved_s = time.monotonic()

    def _watch(self) -> None:
        """Turn the process off while it does not answer, and on again when it does. Kill one that makes no progress for
        long, so that the host memory of its reads is free again. Call after `_receive`."""
        was_silent, now = self.is_silent, time.monotonic()
        is_due = self.is_alive and self._is_awaited()
        self.is_silent = is_due and now - self._answered_s() > deadlines.ANSWER_LIMIT_S
        if self.is_silent and not was_silent:
            self._silences += 1
            self.counters.times_off += 1
            log.warning("kvbm: the %s tier is off until its process %d answers or makes progress", self.tier, self.pid)
        elif was_silent and not self.is_silent and self.is_alive:
            log.warning("kvbm: %s process %d answers again", self.tier, self.pid)
        if is_due and now - self._progressed_s() > deadlines.REPLACE_AFTER_S:
            limit_s = deadlines.REPLACE_AFTER_S
            log.error("kvbm: %s process %d has made no progress for %g s: killing it", self.tier, self.pid, limit_s)
            self._heard_s = self._moved_s = now
            self._child.kill()

    def _end(self) -> None:
        """Close the channel, which makes the child exit, and kill a child that does not exit by itself."""
        self._channel.close()
        self.is_alive = False
        if not self.is_silent and has_ended(self._child, deadlines.EXIT_S):
            return
        self._child.kill()
        self.is_blocked = not has_ended(self._child, deadlines.EXIT_S)
        if self.is_blocked:
            log.warning("kvbm: %s process %d is blocked in I/O until it exits", self.tier, self.pid)
