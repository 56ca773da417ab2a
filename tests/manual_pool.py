"""ManualPool: the contract of TransferPool without threads. The test runs each copy."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.device.pool import Finished, Task, TurnQueue
from kvbm.errors import TransferError


class ManualPool:
    """A transfer pool whose copies run in the caller's thread, one for each `run_next`."""

    def __init__(self) -> None:
        self._waiting = TurnQueue()
        self._finished: list[Finished] = []
        self._outstanding: set[int] = set()
        self._last_ticket = 0
        self._is_closed = False

    def submit(self, run: Callable[[], None], turn: int = 0) -> int:
        self._last_ticket += 1
        self._outstanding.add(self._last_ticket)
        if self._is_closed:
            self._finished.append(Finished(self._last_ticket, TransferError("closed")))
        else:
            self._waiting.put(Task(self._last_ticket, run, turn))
        return self._last_ticket

    def poll(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        self._outstanding.difference_update(end.ticket for end in finished)
        return finished

    def is_outstanding(self, ticket: int) -> bool:
        return ticket in self._outstanding

    def withdraw(self, ticket: int) -> bool:
        """False: a copy that has not run stands for one that hangs."""
        return False

    def close(self, timeout_s: float) -> None:
        self._is_closed = True
        self._finished += [task.finished(TransferError("closed")) for task in self._waiting.clear()]

    def waiting(self) -> int:
        """Return how many copies have not run."""
        return len(self._waiting)

    def run_next(self) -> None:
        """Run the first waiting copy to its end."""
        self._finished.append(self._waiting.take().attempt())

    def lose_next(self) -> None:
        """Break the contract: the first waiting copy never runs, and its ticket is never reported."""
        if self._waiting:
            self._outstanding.discard(self._waiting.take().ticket)
