"""RequestLimit: how long a request to the store may take, derived from how long earlier ones have taken."""

from __future__ import annotations

import threading

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
