"""Breaker: keeps requests away from a store that does not answer, and finds out when it does again. WritePause: keeps
writes away from one that refuses them, such as a full one, which can still be read.

    closed      requests pass; FAILURES_IN_A_ROW failures open it
    open        requests fail at once, for a pause that doubles up to LONGEST_PAUSE_S
    half-open   one small request tries the store: it closes the breaker, or opens it again

Any thread may call it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES_IN_A_ROW = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """`why` is the last failure while it is open, else None."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until_s = 0.0
        self._is_trying = False
        self.why: str | None = None
        self.times_open = 0

    @property
    def is_closed(self) -> bool:
        return self.why is None

    def succeeded(self) -> None:
        """Note an answer of the store, also one that says that there is no such object."""
        with self._lock:
            self._failures = 0
            if self.why is None:
                self._pause_s = FIRST_PAUSE_S

    def failed(self, why: str) -> None:
        """Note a request without an answer."""
        with self._lock:
            self._failures += 1
            if self.why is None and self._failures >= FAILURES_IN_A_ROW:
                self._open(why)

    def open(self, why: str) -> None:
        with self._lock:
            if self.why is None:
                self._open(why)

    def may_try(self) -> bool:
        """Whether the caller should try the store now, and then call `tried`. True for one caller at a time."""
        with self._lock:
            if self.why is None or self._is_trying or self._clock() < self._until_s:
                return False
            self._is_trying = True
            return True

    def tried(self, why: str | None) -> None:
        """Note the end of a try: None if the store answered."""
        with self._lock:
            self._is_trying = False
            if why is None:
                self.why, self._failures = None, 0
            else:
                self.why = why
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._until_s = self._clock() + self._pause_s

    def _open(self, why: str) -> None:
        self.why = why
        self.times_open += 1
        self._until_s = self._clock() + self._pause_s


class WritePause:
    """After FAILURES_IN_A_ROW failed writes there is a pause; after each further failure a longer one, until a write
    succeeds. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether writes may be sent."""
        return self._clock() >= self._until_s

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._pause_s = 0, FIRST_PAUSE_S

    def failed(self) -> float:
        """Note a failed write. Return the length of the pause that begins with it, 0 if none does."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES_IN_A_ROW or not self.is_over:
                return 0.0
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._until_s = self._clock() + pause_s
            return pause_s
