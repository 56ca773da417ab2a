"""BodyTurns: one long body is parsed at a time, so that a client with many bodies delays others by one body at most."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class BodyTurns:
    """Gives the turn to the smallest of those that wait. Only the event loop uses it; `give_back` every turn."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = itertools.count()

    async def take(self, size: int) -> None:
        """Wait for a turn. After a cancellation there is none to give back."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._number), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got the turn and was cancelled before it ran
                self.give_back()
            raise

    def give_back(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
