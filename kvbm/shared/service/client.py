"""SharedClient: the leader's end of the process of the shared tier, which is restarted when it exits.

Calls send a message and do not block, except `open` and `close`. If the process exits, all orders in flight fail; a
thread starts the next one after a pause. The process holds no state that a leader needs. If it does not answer for
ANSWER_LIMIT_S, the tier is off until it does; its orders stay open, because it may still write into host memory. If it
does not answer, or ends no read, for REPLACE_AFTER_S, it is killed, which ends its orders.

The first process can start later than the engine (`open_later`, or a store that hangs), on the path of a process that
is restarted.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace

from kvbm.errors import EnvironmentProblem
from kvbm.host.cores import allowed_cores
from kvbm.host.threads import start
from kvbm.process.channel import Channel, ChannelClosed
from kvbm.process.child import Logged, Opening
from kvbm.process.first_opening import FirstOpening
from kvbm.process.parent import has_ended, how_it_ended, is_gone, log_for, start_child
from kvbm.shared.orders import Get, Listing, ObjectResult, Order, Probe, ProbeResult, Result
from kvbm.shared.protection import protection_of
from kvbm.shared.service import messages
from kvbm.shared.settings import SharedSettings
from kvbm.shared.storage import SharedCounters
from kvbm.types import SegmentInfo

MODULE = "kvbm.shared.service.server"
ANSWER_LIMIT_S = 2.0  # without any message; 4 beats
REPLACE_AFTER_S = 60.0
OPEN_LIMIT_S = 300.0  # the engine does not wait for it
OPENING_CHECK_S = 0.2
GRACE_S = 1.0
EXIT_S = 1.0
JOIN_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
NAME_INTERVAL_S = 0.2  # between looks whether a tier that waits for its name is closed

Named = tuple[bytes, Mapping[str, object]]  # digest of what names the blocks, and facts that describe it

log = logging.getLogger(__name__)


class SharedClient:
    """See the module's text. `run_blocks` is the number of blocks in an object, 0 until the first process has started.
    Only the leader's thread uses it."""

    def __init__(
        self,
        open_next: Callable[[Callable[[], bool]], OpenProcess],
        named: Future[Named | None],
        first: FirstOpening | None = None,
    ) -> None:
        """`open_next(is_cancelled)` starts a process, the first one when `named` is done; `first` may wait for that."""
        self.run_blocks = self.run_bytes = 0
        self.engine_name = ""
        self.counters = SharedCounters()
        self.restarts = 0
        self.off_because: str | None = None
        self.is_silent = False
        self._process: OpenProcess | None = None
        self._is_lost = True
        self._in_flight: dict[int, Order] = {}
        self._results: list[Result] = []
        self._listings: list[Listing] = []
        self._heard_s = 0.0
        self._moved_s = 0.0  # when a read last ended, or the first of those in flight was sent
        self._silences = 0
        self._earlier_counters = SharedCounters()
        self._is_closing = threading.Event()
        self._next: OpenProcess | None = None  # written by the thread, taken by the leader
        self._open_next = open_next
        self._first = self._awaited = first
        self._thread = threading.Thread(target=self._keep, args=(named,), name="kvbm-shared-keeper", daemon=True)
        start(self._thread)

    @classmethod
    def begin(
        cls,
        settings: SharedSettings,
        digest: bytes,
        facts: Mapping[str, object],
        segments: Sequence[SegmentInfo],
        *,
        hash_bytes: int,
        block_tokens: int,
        has_runs: bool,
    ) -> SharedClient:
        """Start to connect the first process to the store. `digest` names the blocks, 16 bytes. `has_runs`: an object
        may hold several blocks of a chain. Raises EnvironmentProblem if the secret is missing.
        """
        order = _order(settings, (digest, facts), segments, hash_bytes, block_tokens, has_runs)
        named: Future[Named | None] = Future()
        named.set_result((digest, facts))
        first = FirstOpening("shared", settings.url)
        return cls(lambda is_cancelled: OpenProcess.start(order, first, is_cancelled), named, first)

    @classmethod
    def open_later(
        cls,
        named: Future[Named | None],
        settings: SharedSettings,
        segments: Sequence[SegmentInfo],
        *,
        hash_bytes: int,
        block_tokens: int,
        has_runs: bool,
    ) -> SharedClient:
        """Start the first process when `named` is done, without waiting for it. With None, the tier stays off.

        Raises EnvironmentProblem if the secret is missing.
        """
        protection_of(settings.protection, settings.key_file)

        def open_next(is_cancelled: Callable[[], bool]) -> OpenProcess:
            name = named.result()
            assert name is not None, "a tier that stays off starts no process"
            order = _order(settings, name, segments, hash_bytes, block_tokens, has_runs)
            return OpenProcess.start(order, None, is_cancelled)

        return cls(open_next, named)

    def await_opening(self) -> None:
        """Wait for the first process of `begin`; do not wait for that of `open_later`.

        Raises EnvironmentProblem if the store does not exist. A store that hangs is left out, see FirstOpening, and
        used when it answers.
        """
        if self._awaited is not None and self._awaited.wait():
            self._take_next()

    @property
    def is_on(self) -> bool:
        """False while the store or the process does not answer, and after the end of the process."""
        return self.off_because is None and not self._is_lost and not self.is_silent

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.child.pid

    def submit(self, order: Order) -> None:
        """Send an order. `poll` returns its result."""
        if not self._in_flight:
            self._heard_s = time.monotonic()
        if isinstance(order, Get) and not self._has_reads():
            self._moved_s = time.monotonic()
        self._in_flight[order.ticket] = order
        self._send(order)

    def poll(self) -> list[Result]:
        """Return the orders that have ended since the last call."""
        if self._is_lost:
            self._take_next()
        self._receive()
        self._watch()
        results, self._results = self._results, []
        for result in results:
            if isinstance(self._in_flight.pop(result.ticket, None), Get):
                self._moved_s = time.monotonic()
        return results

    def take_listing(self) -> Listing | None:
        """Return the next part of a listing of the namespace, if one has arrived."""
        if not self._listings:
            return None
        part = self._listings.pop(0)
        if part.is_last:
            self._send(messages.ListingTaken())
        return part

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` may have something to do."""
        if self._is_lost or self._process is None:
            time.sleep(timeout_s)
        else:
            self._process.channel.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish writes within `timeout_s`, and end the process. One that does not answer is killed, and so is each if
        `timeout_s` is 0."""
        self._is_closing.set()
        self.poll()
        process = self._process
        if process is not None and not self._is_lost and not self.is_silent and timeout_s > 0:
            self._send(messages.CloseStore(timeout_s))
            deadline_s = time.monotonic() + timeout_s + GRACE_S
            while not self._is_lost and time.monotonic() < deadline_s:
                process.channel.wait(max(0.0, deadline_s - time.monotonic()))
                self._receive(is_closing=True)
        if process is not None:
            process.end(EXIT_S if timeout_s > 0 else 0.0)
        if process is None or process.child.returncode is not None:  # else it is blocked in I/O
            self._thread.join(JOIN_S)
        if self._next is not None:
            self._next.end(EXIT_S)

    def _send(self, message: object) -> None:
        if not self._is_lost and self._process is not None:
            try:
                self._process.channel.send(message)
                return
            except ChannelClosed:
                self._handle_end_of_channel()
        if self._is_lost:
            self._fail_in_flight()

    def _receive(self, *, is_closing: bool = False) -> None:
        if self._is_lost or self._process is None:
            return
        try:
            self._process.channel.flush()
            received = self._process.channel.receive()
        except ChannelClosed:
            self._handle_end_of_channel(is_expected=is_closing)
            return
        if received:
            self._heard_s = time.monotonic()
        self._handle(received)

    def _handle(self, received: Sequence[object]) -> None:
        for message in received:
            match message:
                case messages.StoreStatus():
                    self._results += message.results
                    self._follow(message)
                case Listing():
                    self._listings.append(message)
                case Logged():
                    log_for(message)

    def _follow(self, status: messages.StoreStatus) -> None:
        if status.off_because is not None and self.off_because is None:
            log.warning("kvbm: the shared tier is off until its store answers: %s", status.off_because)
        elif status.off_because is None and self.off_because is not None:
            log.warning("kvbm: the shared tier is on again")
        self.off_because = status.off_because
        counters = self._earlier_counters.plus(status.counters)
        self.counters = replace(counters, times_off=counters.times_off + self._silences)

    def _handle_end_of_channel(self, *, is_expected: bool = False) -> None:
        """Kill a process that closed the channel or sent invalid data: it may still write into host memory. Treat it as
        silent until it has ended."""
        if self._process is not None and not (is_expected or is_gone(self.pid)):
            self._process.child.kill()
            return
        self._is_lost = True
        self._listings.clear()
        if not is_expected:
            self._fail_in_flight()

    def _fail_in_flight(self) -> None:
        ended = {result.ticket for result in self._results}
        why = "off: the process has exited"
        for ticket, order in self._in_flight.items():
            if ticket not in ended:
                failed = ProbeResult(ticket, None) if isinstance(order, Probe) else ObjectResult.failed(order, why)
                self._results.append(failed)

    def _watch(self) -> None:
        """Turn the tier off while the process does not answer; replace one that sends nothing for long."""
        was_silent, now = self.is_silent, time.monotonic()
        quiet_s = now - self._heard_s if self._in_flight and not self._is_lost else 0.0
        self.is_silent = quiet_s > ANSWER_LIMIT_S
        if self.is_silent and not was_silent:
            self._silences += 1
            self.counters = replace(self.counters, times_off=self.counters.times_off + 1)
            why = f"no answer for {ANSWER_LIMIT_S:g} s"
            log.warning("kvbm: the shared tier is off until its process %d answers: %s", self.pid, why)
        elif was_silent and not self.is_silent and not self._is_lost:
            log.warning("kvbm: the process %d of the shared tier answers again", self.pid)
        stuck_s = now - self._moved_s if self._has_reads() and not self._is_lost else 0.0
        if max(quiet_s, stuck_s) > REPLACE_AFTER_S:
            why = "sent nothing" if quiet_s > REPLACE_AFTER_S else "has ended no read"
            log.error("kvbm: the process %d of the shared tier %s for %g s: killing it", self.pid, why, REPLACE_AFTER_S)
            self._heard_s = self._moved_s = now
            if self._process is not None:
                self._process.child.kill()

    def _has_reads(self) -> bool:
        return any(isinstance(order, Get) for order in self._in_flight.values())

    def _take_next(self) -> None:
        """Continue with the next process, if it has started."""
        taken, self._next = self._next, None
        if taken is None:
            return
        self._earlier_counters = self.counters
        self._silences = 0
        if self._process is not None:
            self._process.channel.close()
            self.restarts += 1
        self._process, self._is_lost, self.off_because = taken, False, None
        self._take(taken)

    def _take(self, process: OpenProcess) -> None:
        opened = process.opened
        self.run_blocks, self.run_bytes, self.engine_name = opened.run_blocks, opened.run_bytes, opened.engine_name
        self._handle(process.received_early)

    def _keep(self, named: Future[Named | None]) -> None:
        """Start the first process when its name is known. Wait for the end of each process, and start the next one."""
        process = self._open_after(0.0)[0] if self._await(named) else None
        if process is not None and self._first is not None:
            self._first.succeed()
        pause_s = FIRST_PAUSE_S
        while process is not None:
            began_s = time.monotonic()
            code = process.child.wait()
            if self._is_closing.is_set():
                return
            lasted = time.monotonic() - began_s >= LONGEST_PAUSE_S
            pause_s = FIRST_PAUSE_S if lasted else min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("kvbm: the process %d of the shared tier %s", process.child.pid, how_it_ended(code))
            process, pause_s = self._open_after(pause_s)

    def _await(self, named: Future[Named | None]) -> bool:
        """Wait until the name is known. Return whether the tier may be used; False if it is closed before."""
        while not named.done():
            wait_for([named], NAME_INTERVAL_S)
            if self._is_closing.is_set():
                return False
        return named.result() is not None

    def _open_after(self, pause_s: float) -> tuple[OpenProcess | None, float]:
        """Open a process after a pause, again and again; None if the tier is closed. Return the last pause too."""
        while not self._is_closing.wait(pause_s):
            try:
                opened = self._open_next(self._is_closing.is_set)
            except (EnvironmentProblem, OSError, RuntimeError, MemoryError) as error:
                first, self._first = self._first, None
                if self._is_closing.is_set() or (first is not None and first.fail(error)):
                    break
                log.warning("kvbm: the shared tier stays off: %s", error)
                pause_s = min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
                continue
            self._next = opened
            if self._is_closing.is_set():  # `close` may have looked for it before
                opened.end(EXIT_S)
                break
            return opened, pause_s
        return None, pause_s


def _order(
    settings: SharedSettings,
    named: Named,
    segments: Sequence[SegmentInfo],
    hash_bytes: int,
    block_tokens: int,
    has_runs: bool,
) -> messages.OpenStore:
    """Raise EnvironmentProblem if the secret is missing."""
    digest, facts = named
    namespace = protection_of(settings.protection, settings.key_file).namespace(digest)
    cores = frozenset(allowed_cores())
    return messages.OpenStore(
        settings, digest, namespace, facts, tuple(segments), hash_bytes, block_tokens, has_runs, cores
    )


class OpenProcess:
    """A process that has connected to its store. *Owns* both. `received_early`: what it has sent right after it opened
    the store, such as its first listing."""

    def __init__(self, child: subprocess.Popen[bytes], channel: Channel) -> None:
        self.child = child
        self.channel = channel
        self.opened: messages.StoreOpened
        self.received_early: list[object] = []

    @classmethod
    def start(
        cls,
        order: messages.OpenStore,
        first: FirstOpening | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> OpenProcess:
        """May raise EnvironmentProblem. `first` hears the messages of the process."""
        process = cls(*start_child(MODULE, "the process of the shared tier"))
        try:
            process.channel.send(order)
            process.opened = process._wait_until_open(order.settings.url, first, is_cancelled)
        except ChannelClosed:
            process.end(EXIT_S)
            raise EnvironmentProblem("the process of the shared tier exited while it connected to the store") from None
        except BaseException:
            process.end(0.0)
            raise
        return process

    def end(self, timeout_s: float) -> None:
        """Close the channel, which makes the child exit; kill one that does not."""
        self.channel.close()
        if not has_ended(self.child, timeout_s):
            self.child.kill()
            has_ended(self.child, EXIT_S)

    def _wait_until_open(
        self, url: str, first: FirstOpening | None, is_cancelled: Callable[[], bool]
    ) -> messages.StoreOpened:
        deadline_s = time.monotonic() + OPEN_LIMIT_S
        while time.monotonic() < deadline_s:
            self.channel.wait(OPENING_CHECK_S)
            received = self.channel.receive()
            if received and first is not None:
                first.heard(has_moved=False)
            if is_cancelled():
                raise EnvironmentProblem("closed")
            for position, message in enumerate(received):
                match message:
                    case messages.StoreOpened():
                        self.received_early = received[position + 1 :]
                        return message
                    case messages.StoreProblem():
                        raise EnvironmentProblem(message.message, hint=message.hint)
                    case Logged():
                        log_for(message)
                    case Opening():
                        pass
        raise EnvironmentProblem(
            f"`tiers.shared.url` {url}: the store did not answer for {OPEN_LIMIT_S:g} s",
            hint=f"run `kvbm doctor --url {shlex.quote(url)}`",
        )
