"""ServiceProcess: the leader's end of a child process that executes orders. ChildService: such a process and its
successors.

Calls of a process send a message and do not block, except `start` and `close`. The child exits with this process. If it
exits earlier, all orders in flight fail and it stays off. If it does not answer for ANSWER_LIMIT_S, it is off until it
does; its orders stay open, because it may still write into host memory. If that lasts for REPLACE_AFTER_S, it is
killed, which ends its orders. A process that has not started yet is like one that has exited.

A thread of the service waits for the process, so that no zombie remains and the exit is noticed while the engine is
idle. It then pauses, longer after each short-lived process, and opens the next one. The leader never waits for this:

    process exits          its orders fail, `losses` increases, `is_on` is False
    next process is open   `poll` switches to it

The first process can start later than the engine, on the same path: the name of the blocks may depend on the content of
many files, or a disk or a store hangs (see FirstOpening).
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvbm.child import deadlines
from kvbm.child.channel import Channel, ChannelClosed
from kvbm.child.child import Close, Logged, Opening, Problem, ServiceCounters, Status
from kvbm.child.first_opening import FirstOpening
from kvbm.child.parent import has_ended, how_it_ended, is_gone, start_child
from kvbm.errors import EnvironmentProblem, TierProblem
from kvbm.host.threads import start
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


class ChildService(ABC, Generic[Order, Result, Counters]):
    """See the module's text. `process` is the one in use, or stands for the first one. Only the leader's thread uses
    it."""

    def __init__(
        self,
        unstarted: ServiceProcess[Order, Result, Counters],
        named: Future[Any],
        place: object,
    ) -> None:
        """Start to open the first process when `named` is done, which names the blocks; with None, the service stays
        off. `unstarted` stands for the process until then, and `place` is for the log."""
        self.losses = 0
        self.restarts = 0
        self.process = unstarted
        self._is_lost = True
        self._results: list[Result] = []  # not yet returned by `poll`
        self._earlier_counters: Counters | None = None  # sum of the earlier processes
        self._named = named
        self._awaited = FirstOpening(unstarted.tier, place) if named.done() else None
        self._is_closing = threading.Event()
        # Owned by the holder of the lock. The thread holds it while it opens a process.
        self._lock = threading.Lock()
        self._next: ServiceProcess[Order, Result, Counters] | None = None
        # Owned by the thread.
        self._first = self._awaited
        self._last_error = ""
        self._is_answer_due = False  # by what it opens; others read it
        name = f"kvbm-{unstarted.tier}-keeper"
        self._thread = threading.Thread(target=self._keep, args=(named,), name=name, daemon=True)
        start(self._thread)

    def await_opening(self) -> None:
        """Wait for the first process, if the blocks had a name at once. Raises EnvironmentProblem.

        A disk or store that hangs is left out, see FirstOpening, and used when it answers.
        """
        if self._awaited is not None and self._awaited.wait():
            self._advance()

    @property
    def is_on(self) -> bool:
        return self.process.is_on

    @property
    def is_unnamed(self) -> bool:
        """Whether the name of the blocks is not known yet."""
        return not self._named.done()

    @property
    def is_silent(self) -> bool:
        """Whether it is off because the process, or what it opens, does not answer."""
        return self.process.is_silent or (self._is_lost and self._is_answer_due)

    @property
    def counters(self) -> Counters:
        """The sum of all processes."""
        counters = self.process.counters
        return counters if self._earlier_counters is None else self._earlier_counters.plus(counters)

    def submit(self, order: Order) -> None:
        """Send an order. `poll` returns its result."""
        self.process.submit(order)

    def poll(self) -> list[Result]:
        """Return the orders that have ended. When `losses` increases, all have."""
        self._advance()
        results, self._results = self._results, []
        return results

    def close(self, timeout_s: float) -> None:
        """End the process, as ServiceProcess.close, and start no other."""
        self._is_closing.set()
        self._advance()
        self.process.close(timeout_s)
        if self._lock.acquire(timeout=deadlines.JOIN_S):  # otherwise the thread closes what it is opening
            try:
                if self._next is not None:
                    self._next.close(timeout_s)
            finally:
                self._lock.release()
            self._thread.join(0.0 if self.process.is_blocked else deadlines.JOIN_S)

    @abstractmethod
    def _open_next(self) -> ServiceProcess[Order, Result, Counters]:
        """Start a process and open what it serves. The thread calls it. Raises EnvironmentProblem, also soon after
        `_is_closing` is set."""

    def _note_end(self, code: int) -> None:
        """Note the exit code of a process. The thread calls it."""

    def _note_next(self) -> None:
        """Note that the next process is used from now on."""

    def _advance(self) -> None:
        """Follow the process, its end, and the next one."""
        self._results += self.process.poll()
        if self._is_lost:
            self._take_next()
        elif not self.process.is_alive:
            self._is_lost = True
            self.losses += 1

    def _take_next(self) -> None:
        if self._next is None or not self._lock.acquire(blocking=False):
            return
        try:
            if self.process.pid:
                self._earlier_counters = self.counters
                self.restarts += 1
            self.process.discard()
            self.process, self._next = self._next, None
            self._is_lost = False
            self._note_next()
        finally:
            self._lock.release()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _keep(self, named: Future[Any]) -> None:
        process = self._open_first(named)
        pause_s = deadlines.FIRST_PAUSE_S / 2
        while process is not None:
            began_s = time.monotonic()
            code = process.wait_for_end()
            self._note_end(code)
            if self._is_closing.is_set():
                return
            has_lasted = time.monotonic() - began_s >= deadlines.LONGEST_PAUSE_S
            pause_s = deadlines.FIRST_PAUSE_S if has_lasted else _longer(pause_s)
            how = how_it_ended(code)
            log.warning("kvbm: %s process %d %s; restarting in %g s", process.tier, process.pid, how, pause_s)
            process, pause_s = self._open_after(pause_s)

    def _open_first(self, named: Future[Any]) -> ServiceProcess[Order, Result, Counters] | None:
        """Open the first process when its name is known; None if it has none, or the service is closed before."""
        while not named.done():
            wait_for([named], deadlines.NAME_INTERVAL_S)
            if self._is_closing.is_set():
                return None
        if named.result() is None:
            return None
        opened, first = self._open(), self._first
        if opened is not None and first is not None:
            first.succeed()
        return opened or self._open_after(deadlines.FIRST_PAUSE_S)[0]

    def _open_after(self, pause_s: float) -> tuple[ServiceProcess[Order, Result, Counters] | None, float]:
        """Open a process after a pause, again and again; None if the service is closed. Return the last pause too."""
        while not self._is_closing.wait(pause_s):
            if (opened := self._open()) is not None:
                return opened, pause_s
            pause_s = _longer(pause_s)
        return None, pause_s

    def _open(self) -> ServiceProcess[Order, Result, Counters] | None:
        """Open the next process and hand it to the leader's thread."""
        with self._lock:
            self._is_answer_due = True
            try:
                opened = self._open_next()
            except (EnvironmentProblem, OSError, RuntimeError, MemoryError) as error:
                self._is_answer_due = isinstance(error, UnresponsiveProcess)
                first, self._first = self._first, None
                if first is not None and first.fail(error):
                    self._is_closing.set()
                elif str(error) != self._last_error and not self._is_closing.is_set():
                    self._last_error = str(error)
                    log.warning("kvbm: the %s tier is off until it can be opened: %s", self.process.tier, error)
                return None
            if self._is_closing.is_set():
                opened.close(0)
                return None
            if self._next is not None:  # it exited before `poll` took it
                self._next.discard()
            if self._last_error:
                log.warning("kvbm: the %s tier is open again", opened.tier)
            self._last_error = ""
            self._next = opened
            return opened


def _longer(pause_s: float) -> float:
    return min(2 * pause_s, deadlines.LONGEST_PAUSE_S)
