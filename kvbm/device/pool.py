"""TransferPool: threads that run copies; and ManualPool, the same promise stepped by hand.

One thread owns a pool and calls `submit`, `poll` and `is_outstanding`; neither waits. Every ticket comes out of `poll`
exactly once, with the error that ended it or None, whatever happens: `run` may raise anything, SystemExit included, the
thread under it may die, the pool may be closed. The one exception are copies that are still running when the pool is
closed; their daemon threads end with the process.

What was submitted first runs first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbm.errors import TransferError
from kvbm.host.cores import allowed_cores


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one ticket: `error` is None exactly when `run` returned."""

    ticket: int
    kind: str
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _Task:
    ticket: int
    kind: str
    run: Callable[[], None]

    def finished(self, error: BaseException | None) -> Finished:
        return Finished(self.ticket, self.kind, error)

    def attempt(self) -> Finished:
        """Run it. Anything that is raised is the ticket's error: a copy may end its thread, but not its ticket."""
        try:
            self.run()
        except BaseException as error:
            return self.finished(error)
        return self.finished(None)


class TransferPool:
    """`thread_count` daemon threads. See the module's text for the promise.

    They run on all `allowed_cores`.
    """

    def __init__(self, thread_count: int, *, name: str) -> None:
        self._name = name
        self._cores = allowed_cores()
        # Owned by everyone, under the lock of `_changed`: waiting tasks, what each thread runs, and what has ended.
        self._changed = threading.Condition()
        self._waiting: deque[_Task] = deque()
        self._running: dict[threading.Thread, _Task] = {}
        self._finished: list[Finished] = []
        self._is_closed = False
        # Owned by the pool's owner.
        self._outstanding: set[int] = set()
        self._last_ticket = 0
        self._threads = [self._start_thread() for _ in range(thread_count)]

    def submit(self, kind: str, run: Callable[[], None]) -> int:
        """Queue a copy. Returns its ticket; on a closed pool the ticket ends as failed."""
        self._last_ticket += 1
        task = _Task(self._last_ticket, kind, run)
        self._outstanding.add(task.ticket)
        with self._changed:
            if self._is_closed:
                self._finished.append(task.finished(TransferError(f"{self._name}: closed")))
            else:
                self._waiting.append(task)
                self._changed.notify()
        return task.ticket

    def poll(self) -> list[Finished]:
        """The tickets that have ended since the last call."""
        self._replace_dead_threads()
        with self._changed:
            finished, self._finished = self._finished, []
        self._outstanding.difference_update(end.ticket for end in finished)
        return finished

    def is_outstanding(self, ticket: int) -> bool:
        """True until `poll` has returned the ticket."""
        return ticket in self._outstanding

    def withdraw(self, ticket: int) -> bool:
        """Take back a copy that has not begun: it never will, and `poll` does not return it. False if it has."""
        with self._changed:
            task = next((task for task in self._waiting if task.ticket == ticket), None)
            if task is None:
                return False
            self._waiting.remove(task)
        self._outstanding.discard(ticket)
        return True

    def close(self, timeout_s: float) -> None:
        """Fail what has not begun, and wait at most `timeout_s` for what runs."""
        with self._changed:
            self._is_closed = True
            self._finished += [task.finished(TransferError(f"{self._name}: closed")) for task in self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        os.sched_setaffinity(0, self._cores)  # of this thread alone
        me = threading.current_thread()
        while (task := self._take(me)) is not None:
            end = task.attempt()
            with self._changed:
                del self._running[me]
                self._finished.append(end)

    def _take(self, me: threading.Thread) -> _Task | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            task = self._running[me] = self._waiting.popleft()
            return task

    def _replace_dead_threads(self) -> None:
        """A thread can die outside of `attempt` too, of an exception that is set from outside or of lack of memory."""
        if self._is_closed or all(thread.is_alive() for thread in self._threads):
            return
        for index, thread in enumerate(self._threads):
            if not thread.is_alive():
                with self._changed:
                    task = self._running.pop(thread, None)
                    if task is not None:
                        self._finished.append(task.finished(TransferError(f"thread {thread.name} died")))
                try:
                    self._threads[index] = self._start_thread()
                except RuntimeError:  # no thread to be had now; the next poll tries again
                    return


class ManualPool:
    """A pool whose copies run in the caller's thread, when a test says so."""

    def __init__(self) -> None:
        self._waiting: list[_Task] = []
        self._finished: list[Finished] = []
        self._outstanding: set[int] = set()
        self._last_ticket = 0
        self._is_closed = False

    def submit(self, kind: str, run: Callable[[], None]) -> int:
        self._last_ticket += 1
        task = _Task(self._last_ticket, kind, run)
        self._outstanding.add(task.ticket)
        if self._is_closed:
            self._finished.append(task.finished(TransferError("closed")))
        else:
            self._waiting.append(task)
        return task.ticket

    def poll(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        self._outstanding.difference_update(end.ticket for end in finished)
        return finished

    def is_outstanding(self, ticket: int) -> bool:
        return ticket in self._outstanding

    def withdraw(self, ticket: int) -> bool:
        """Here what has not run stands for a copy that hangs."""
        return False

    def close(self, timeout_s: float) -> None:
        self._is_closed = True
        self._finished += [task.finished(TransferError("closed")) for task in self._waiting]
        self._waiting.clear()

    def waiting(self, kind: str) -> int:
        """How many copies of this kind have not run."""
        return sum(task.kind == kind for task in self._waiting)

    def run_next(self, kind: str) -> None:
        """Run the first waiting copy of this kind, to its end."""
        self._finished.append(self._pop(kind).attempt())

    def lose_next(self, kind: str) -> None:
        """Break the promise: the first waiting copy of this kind never runs, and its ticket is never reported."""
        if self.waiting(kind):
            self._outstanding.discard(self._pop(kind).ticket)

    def _pop(self, kind: str) -> _Task:
        task = next(task for task in self._waiting if task.kind == kind)
        self._waiting.remove(task)
        return task
