"""CapacityCurve: the hit rates that host memory of other sizes would have, for `kvbm plan RUN` and the metrics.

With `metrics.capacities`. The leader notes the chain of each request that has ended: one entry in a queue. A thread
drives the shadow caches with it, one after the other, and rests REST times as long as each of them took. So it takes a
tenth of a core at most, and the engine's thread waits for one cache at most. Requests that do not fit into the queue
are left out. Nothing waits (docs/adr/0028).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvbm.core.shadow_caches import ShadowCaches
from kvbm.host import threads

if TYPE_CHECKING:
    from kvbm.metrics import Counters

MOST_WAITING = 256  # requests; their chains are held meanwhile
REST = 9


class CapacityCurve:
    """The leader's thread calls `note`. The thread of the curve replaces `counters.hit_rates_at` as a whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: SimpleQueue[tuple[float, Sequence[bytes], int] | None] = SimpleQueue()
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, chain: Sequence[bytes], asked_blocks: int) -> None:
        """Note a request that has ended: all its blocks, of which the first ones are the prompt."""
        if self._thread is not None and self._queue.qsize() < MOST_WAITING:
            self._queue.put((self._clock(), chain, asked_blocks))

    def start(self, capacity_blocks: int, counters: Counters) -> None:
        arguments = (ShadowCaches(capacity_blocks), counters)
        self._thread = threading.Thread(target=self._run, args=arguments, name="kvbm-capacities", daemon=True)
        threads.start(self._thread)

    def close(self) -> None:
        self._is_ending.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, caches: ShadowCaches, counters: Counters) -> None:
        while (entry := self._queue.get()) is not None and not self._is_ending.is_set():
            at_s, chain, asked = entry
            began_s = self._clock()
            for _ in caches.use(at_s, chain, asked=asked):
                self._is_ending.wait(REST * (self._clock() - began_s))
                began_s = self._clock()
            counters.hit_rates_at = caches.hit_rates()
