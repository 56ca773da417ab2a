"""Alarm: wakes an idle engine at a time that the leader has set. One thread, which starts with the first such time."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable

from kvbm.host import threads

MOST_TIMES = 4096

log = logging.getLogger(__name__)


class Alarm:
    """Calls `wake` from its own thread. `after` may be called by any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._times_s: list[float] = []  # a heap; both threads, under `_changed`
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def after(self, delay_s: float) -> None:
        """Wake the engine after so many seconds. Ignored if too many times are set."""
        with self._changed:
            if self._is_closed or len(self._times_s) >= MOST_TIMES:
                return
            if self._thread is None and not self._start():
                return
            heapq.heappush(self._times_s, time.monotonic() + delay_s)
            self._changed.notify()

    def _start(self) -> bool:
        """Start the thread; False if the process can have no more. The leader calls this, so it does not raise."""
        thread = threading.Thread(target=self._run, name="kvbm-alarm", daemon=True)
        try:
            threads.start(thread)
        except RuntimeError as error:
            self._is_closed = True
            log.warning("kvbm: an idle engine does not read ahead, because a thread cannot be started: %s", error)
            return False
        self._thread = thread
        return True

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._await_next():
            self._wake()

    def _await_next(self) -> bool:
        """Wait until the next time has arrived; False when the alarm is closed."""
        with self._changed:
            while not self._is_closed:
                left_s = self._times_s[0] - time.monotonic() if self._times_s else None
                if left_s is not None and left_s <= 0:
                    heapq.heappop(self._times_s)
                    return True
                self._changed.wait(left_s)
        return False
