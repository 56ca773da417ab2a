"""TransferPool: threads that run copies.

One thread owns a pool and calls `submit`, `poll` and `is_outstanding`; none of them waits. `poll` returns every ticket
exactly once, with the error that ended it or None: `run` may raise anything, even SystemExit, its thread may die, and
the pool may be closed. The only exception are copies that still run when the pool is closed; their daemon threads end
with the process.

Copies of the same `turn`, the parts of one order, start in the order in which they were submitted. Turns alternate: a
free thread takes a copy of the turn that has waited longest, so that a long order does not delay a short one.

Linux wakes two threads that one thread notifies on the same core, even if another core is free, and there they run one
after the other. Therefore the cores can be divided into disjoint shares, and each thread runs on one share. `submit`
notifies the shares in turn, so that the parts of one order are copied at the same time.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbm.errors import TransferError
from kvbm.host.threads import allowed_cores, start


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one ticket: `error` is None exactly when `run` returned."""

    ticket: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Task:
    """A submitted copy."""

    ticket: int
    run: Callable[[], None]
    turn: int

    def finished(self, error: BaseException | None) -> Finished:
        return Finished(self.ticket, error)

    def attempt(self) -> Finished:
        """Run it. Everything that it raises is the ticket's error: a copy may end its thread, but not its ticket."""
        try:
            self.run()
        except BaseException as error:
            return self.finished(error)
        return self.finished(None)


class TurnQueue:
    """Waiting copies of each turn, in the order of the turns. See the module's text."""

    def __init__(self) -> None:
        self._turns: dict[int, deque[Task]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def put(self, task: Task) -> None:
        self._turns.setdefault(task.turn, deque()).append(task)

    def take(self, may_run: Callable[[int], bool] = lambda turn: True) -> Task | None:
        """Remove and return the next copy whose turn may run. The rest of its turn waits behind all other turns."""
        turn = next(filter(may_run, self._turns), None)
        if turn is None:
            return None
        tasks = self._turns.pop(turn)
        task = tasks.popleft()
        if tasks:
            self._turns[turn] = tasks
        return task

    def remove(self, ticket: int) -> bool:
        """Return whether it was waiting."""
        for turn, tasks in self._turns.items():
            for task in tasks:
                if task.ticket == ticket:
                    tasks.remove(task)
                    if not tasks:
                        del self._turns[turn]
                    return True
        return False

    def clear(self) -> list[Task]:
        tasks = [task for waiting in self._turns.values() for task in waiting]
        self._turns.clear()
        return tasks


def shares_of(cores: Iterable[int], share_count: int) -> list[set[int]]:
    """Divide cores into disjoint shares of equal size, give or take one core. There are fewer if there are fewer cores.
    Neighbours, which may be threads of one core or cores of one NUMA node, are in different shares."""
    ordered = sorted(cores)
    count = max(1, min(share_count, len(ordered)))
    return [set(ordered[first::count]) for first in range(count)]


class TransferPool:
    """`thread_count` daemon threads on all `allowed_cores`, which are divided into at most `share_count` shares. Of the
    threads, at most `parts_at_once`, or all, copy for the same turn. See the module's text for the contract."""

    def __init__(self, thread_count: int, *, name: str, parts_at_once: int | None = None, share_count: int = 1) -> None:
        self._name = name
        self._parts_at_once = parts_at_once or thread_count
        self._shares = shares_of(allowed_cores(), min(share_count, thread_count))
        # Shared, under `_lock`: waiting tasks, the task of each thread, ended tasks, and per share the conditions of
        # the threads that wait for a task and that no `submit` has notified.
        self._lock = threading.Lock()
        self._idle: list[list[threading.Condition]] = [[] for _ in self._shares]
        self._waiting = TurnQueue()
        self._running: dict[threading.Thread, Task] = {}
        self._finished: list[Finished] = []
        self._is_closed = False
        # Owned by the pool's owner.
        self._outstanding: set[int] = set()
        self._last_ticket = 0
        self._next_share = 0
        self._threads = [self._start_thread(index) for index in range(thread_count)]

    def submit(self, run: Callable[[], None], turn: int = 0) -> int:
        """Queue a copy. Returns its ticket; on a closed pool the ticket ends as failed."""
        self._last_ticket += 1
        task = Task(self._last_ticket, run, turn)
        self._outstanding.add(task.ticket)
        with self._lock:
            if self._is_closed:
                self._finished.append(task.finished(TransferError(f"{self._name}: closed")))
            else:
                self._waiting.put(task)
                self._wake_one()
        return task.ticket

    def poll(self) -> list[Finished]:
        """Return the tickets that have ended since the last call."""
        self._replace_dead_threads()
        with self._lock:
            finished, self._finished = self._finished, []
        self._outstanding.difference_update(end.ticket for end in finished)
        return finished

    def is_outstanding(self, ticket: int) -> bool:
        """Return True until `poll` has returned the ticket."""
        return ticket in self._outstanding

    def withdraw(self, ticket: int) -> bool:
        """Cancel a copy that has not started; `poll` does not return it. False if it has started."""
        with self._lock:
            if not self._waiting.remove(ticket):
                return False
        self._outstanding.discard(ticket)
        return True

    def close(self, timeout_s: float) -> None:
        """Fail the copies that have not started, and wait at most `timeout_s` for those that run."""
        with self._lock:
            self._is_closed = True
            self._finished += [task.finished(TransferError(f"{self._name}: closed")) for task in self._waiting.clear()]
            for woken in itertools.chain(*self._idle):
                woken.notify()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _wake_one(self) -> None:
        """Notify a thread of the next share that has an idle one. If none has, a busy thread takes the task later."""
        for step in range(len(self._shares)):
            share = (self._next_share + step) % len(self._shares)
            if self._idle[share]:
                self._next_share = share + 1
                self._idle[share].pop().notify()
                return

    def _start_thread(self, index: int) -> threading.Thread:
        share = index % len(self._shares)
        thread = threading.Thread(target=self._work, args=(share,), name=self._name, daemon=True)
        start(thread)
        return thread

    def _work(self, share: int) -> None:
        os.sched_setaffinity(0, self._shares[share])  # of this thread alone
        me = threading.current_thread()
        while (task := self._take(me, share)) is not None:
            end = task.attempt()
            with self._lock:
                del self._running[me]
                self._finished.append(end)

    def _take(self, me: threading.Thread, share: int) -> Task | None:
        with self._lock:
            while not self._is_closed:
                if (task := self._waiting.take(self._may_run)) is not None:
                    self._running[me] = task
                    return task
                self._wait(self._idle[share])
            return None

    def _may_run(self, turn: int) -> bool:
        """Return whether the thread may run a copy. A turn that may run again at the end of a copy is seen by the
        thread that has ended it."""
        return sum(task.turn == turn for task in self._running.values()) < self._parts_at_once

    def _wait(self, idle: list[threading.Condition]) -> None:
        """Wait until a `submit` notifies this thread. The lock is held before and after."""
        woken = threading.Condition(self._lock)
        idle.append(woken)
        try:
            woken.wait()
        finally:
            if woken in idle:
                idle.remove(woken)

    def _replace_dead_threads(self) -> None:
        """Replace threads that have died. A thread can also die outside `attempt`: another thread may raise an
        exception in it, or memory runs out."""
        if self._is_closed or all(thread.is_alive() for thread in self._threads):
            return
        for index, thread in enumerate(self._threads):
            if not thread.is_alive():
                with self._lock:
                    task = self._running.pop(thread, None)
                    if task is not None:
                        self._finished.append(task.finished(TransferError(f"thread {thread.name} died")))
                try:
                    self._threads[index] = self._start_thread(index)
                except RuntimeError:  # no thread available; the next poll tries again
                    return
