"""ChildService: a child process that executes orders, and its successors.

A thread waits for the process, so that no zombie remains and the exit is noticed while the engine is idle. It then
pauses, longer after each short-lived process, and opens the next one. The leader never waits for this:

    process exits          its orders fail, `losses` increases, `is_on` is False
    next process is open   `poll` switches to it

The first process can start later than the engine, on the same path: the name of the blocks may depend on the content of
many files, or a disk or a store hangs (see FirstOpening).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Generic

from kvbm.child import deadlines
from kvbm.child.first_opening import FirstOpening
from kvbm.child.parent import how_it_ended
from kvbm.child.service_process import Counters, Order, Result, ServiceProcess, UnresponsiveProcess
from kvbm.errors import EnvironmentProblem
from kvbm.host.threads import start

log = logging.getLogger(__name__)


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
    def pid(self) -> int:
        """That of the process, 0 before the first one."""
        return self.process.pid

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
