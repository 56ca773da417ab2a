"""SharedPage: a page of metrics that all scrapes share which wait for it, so that many of them cost little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

REST = 4  # times as long as a page has taken passes before the next one: nothing else of the process runs meanwhile


class SharedPage:
    """A page of metrics, for the callers of one event loop. Making pages takes at most a fifth of the time, because
    nothing else runs meanwhile."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._next: asyncio.Future[bytes] | None = None
        self._free_at_s = 0.0

    async def get(self) -> bytes:
        """Return a page that is made after this call. Callers that wait share it."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._make_next())
        return await asyncio.shield(self._next)

    async def _make_next(self) -> bytes:
        await asyncio.sleep(self._free_at_s - time.monotonic())
        self._next = None
        began_s = time.monotonic()
        try:
            return self._make()
        finally:
            ended_s = time.monotonic()
            self._free_at_s = ended_s + REST * (ended_s - began_s)
