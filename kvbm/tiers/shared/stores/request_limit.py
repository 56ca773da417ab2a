"""RequestLimit: how long a request to the store may take, derived from how long earlier ones have taken. TimedStore:
what the stores have in common whose requests are for one object and have such a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvbm.tiers.shared.object_store import Incoming, Outgoing, StoreAnswer
from kvbm.tiers.shared.orders import Outcome

FIRST_LIMIT_S = 5.0  # before any rate is known
LEAST_LIMIT_S, MOST_LIMIT_S = 1.0, 20.0
PATIENCE = 4  # a request may take so many times its expected duration
KEPT = 0.9  # weight of the earlier measurements, per request
CHANGE = 1.5  # a limit changes by at least this factor: a client must be made anew for each


class RequestLimit:
    """All requests have about the same size, so that one limit serves all. Any thread may call it."""

    def __init__(self) -> None:
        self.seconds = FIRST_LIMIT_S
        self._lock = threading.Lock()  # of all writes
        self._longest_s = 0.0

    def succeeded(self, took_s: float) -> bool:
        """Note the duration of a request; return whether the limit has changed."""
        with self._lock:
            self._longest_s = max(took_s, KEPT * self._longest_s + (1 - KEPT) * took_s)
            limit_s = min(MOST_LIMIT_S, max(LEAST_LIMIT_S, PATIENCE * self._longest_s))
            if max(limit_s, self.seconds) < CHANGE * min(limit_s, self.seconds):
                return False
            self.seconds = limit_s
            return True

    def failed(self, took_s: float, limit_s: float) -> bool:
        """Double the limit if a request failed because of it: the store may have become slower for good. `limit_s` was
        the limit when the request began. Return whether the limit has changed."""
        if took_s < limit_s or self.seconds != limit_s:
            return False
        return self.succeeded(2 * limit_s / PATIENCE)


class TimedStore:
    """Part of an ObjectStore. A subclass moves one object in `_get` and `_put`, which may raise OSError."""

    batch_objects = 1
    can_list = True
    measured: tuple[Outcome, ...] = (Outcome.GOOD,)  # outcomes after which all bytes have been moved

    def __init__(self) -> None:
        self._limit = RequestLimit()

    @property
    def limit_s(self) -> float:
        return self._limit.seconds

    def use_memory(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Nothing to do: any memory can be read and written."""

    def get(self, objects: Sequence[Incoming]) -> list[StoreAnswer]:
        return [self._timed(partial(self._get, one)) for one in objects]

    def put(self, objects: Sequence[Outgoing]) -> list[StoreAnswer]:
        return [self._timed(partial(self._put, one)) for one in objects]

    def _get(self, one: Incoming) -> StoreAnswer:
        raise NotImplementedError

    def _put(self, one: Outgoing) -> StoreAnswer:
        raise NotImplementedError

    def _use_limit(self) -> None:
        """Use the limit, which has changed."""

    def _timed(self, request: Callable[[], StoreAnswer]) -> StoreAnswer:
        began_s, limit_s = time.monotonic(), self._limit.seconds
        has_changed = False
        try:
            answer = request()
            if answer.outcome in self.measured:
                has_changed = self._limit.succeeded(time.monotonic() - began_s)
        except OSError as error:
            answer = StoreAnswer(Outcome.FAILED, str(error))
            has_changed = self._limit.failed(time.monotonic() - began_s, limit_s)
        if has_changed:
            self._use_limit()
        return answer
