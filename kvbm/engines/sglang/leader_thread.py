"""LeaderThread: the thread that owns a StorageLeader, and how SGLang's threads ask it.

SGLang calls a storage backend from several threads, and gives it no step. So this thread is the clock: it steps the
leader, and advances the questions that are open. It never waits for one of them, nor for a tier.

    SGLang's thread                                the leader's thread
    ask(question) ─────── inbox ─────────────────▶ advances the question at each turn
    copies each loan ◀─── answers of the question ─ lends slots of G2
    sets `loan.is_over` ─────────────────────────▶ releases or registers them
    has the answer ◀───────────────────────────── the question has ended

A thread of SGLang waits at most LIMIT_S for the next answer, and `total_s` altogether. Then it gives the question up:
the leader's thread closes it, and what arrives later stays in G2. Only SGLang's thread copies, so that nothing is
written into SGLang's memory after that. Between `refuse` and `accept`, all questions are given up at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvbm.host import threads
from kvbm.leader.storage_leader import has_ended

if TYPE_CHECKING:
    from kvbm.boundary import Boundary
    from kvbm.leader.storage_leader import Lend, Loan, Question, StorageLeader

LIMIT_S = 2.0
ASKED_S, BUSY_S, IDLE_S = 0.0005, 0.002, 0.25  # between two turns: with a question, with writes, without either
CLOSE_S = 5.0  # beyond the time that the tiers may write

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Open(Generic[Answer]):
    """A question. The leader's thread puts its loans into `answers`, and at the end None. It sets `result` before that.
    The asking thread sets `is_given_up`."""

    begin: Callable[[StorageLeader, Lend], Question[Answer]]
    answers: SimpleQueue[Loan | None] = field(default_factory=SimpleQueue)
    question: Question[Answer] | None = None
    result: Answer | None = None
    is_given_up: bool = False

    def end(self, result: Answer) -> None:
        self.result = result
        self.answers.put(None)


class LeaderThread:
    """See the module's text. *Consumes* the leader. An exception in it turns the `boundary` off."""

    def __init__(self, leader: StorageLeader, boundary: Boundary, *, total_s: float, drain_s: float) -> None:
        self._leader = leader
        self._boundary = boundary
        self._total_s = total_s
        self._drain_s = drain_s
        self._inbox: SimpleQueue[_Open[Any] | None] = SimpleQueue()
        self._open: list[_Open[Any]] = []
        self._asked: set[_Open[Any]] = set()  # each by the thread that asks it
        self._is_refusing = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvbm-leader", daemon=True)
        threads.start(self._thread)

    def ask(
        self,
        begin: Callable[[StorageLeader, Lend], Question[Answer]],
        copy: Callable[[Loan], None] | None = None,
        *,
        limit_s: float = LIMIT_S,
    ) -> Answer | None:
        """Return the answer; None if it did not come in time. `copy` runs in this thread, for each loan."""
        asked = _Open(begin)
        end_s = time.monotonic() + self._total_s
        self._asked.add(asked)
        try:
            if self._is_refusing:
                return None
            self._inbox.put(asked)
            while True:
                loan = asked.answers.get(timeout=max(0.0, min(limit_s, end_s - time.monotonic())))
                if loan is None:
                    return asked.result
                assert copy is not None, "a question without loans"
                copy(loan)
                loan.is_over = True
                self._inbox.put(None)  # wakes the leader's thread
        except Empty:
            return None
        finally:
            self._asked.discard(asked)
            asked.is_given_up = True
            self._inbox.put(None)

    def refuse(self) -> None:
        """Answer all questions with None, those that wait too. Any thread may call it."""
        self._is_refusing = True
        for asked in self._asked.copy():
            asked.answers.put(None)

    def accept(self) -> None:
        """Answer questions again."""
        self._is_refusing = False

    def wake(self) -> None:
        """Begin the next turn now. Any thread may call it."""
        self._inbox.put(None)

    def close(self) -> bool:
        """Let the leader write what is due, and end. False if it has not ended in time. No thread may ask any more."""
        self._is_closing = True
        self._inbox.put(None)
        self._thread.join(self._drain_s + CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._receive()
                self._leader.step()
                self._open = [one for one in self._open if not self._has_ended(one)]
            for one in self._open:
                if one.question is not None:
                    one.question.close()
            self._leader.close()
        except Exception as error:  # the last resort of this thread: the metadata may be damaged
            self._boundary.caught("leader thread", error, turns_off=True)
            self._boundary.attempt("abandon", self._leader.abandon)
        finally:
            self._leader.control.refuse_all("kvbm has ended in this engine: its log says why")
            for one in self._open:
                one.answers.put(None)

    def _receive(self) -> None:
        """Take new questions. Waits for the next turn, but no longer than until one arrives."""
        pause_s = ASKED_S if self._open else BUSY_S if self._leader.is_busy() else IDLE_S
        try:
            one = self._inbox.get(timeout=pause_s)
            while True:
                if one is not None:
                    self._open.append(one)
                one = self._inbox.get_nowait()
        except Empty:
            return

    def _has_ended(self, asked: _Open[Answer]) -> bool:
        """Advance a question; return whether it has ended."""
        if asked.is_given_up:
            if asked.question is not None:
                asked.question.close()
            return True
        if asked.question is None:
            asked.question = asked.begin(self._leader, asked.answers.put)
        return has_ended(asked.question, asked.end)
