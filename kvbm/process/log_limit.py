"""RepeatFilter: limits how often one kind of message is logged: 10,000 damaged blocks must not write 10,000 lines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 10.0
MAX_KINDS = 1000


class RepeatFilter(logging.Filter):
    """Passes a message of one logger, level and format string once per INTERVAL_S, with the number of those dropped.

    Any thread may log. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int, str], tuple[float, int]] = {}  # kind -> (when it passed, dropped since)

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, record.levelno, str(record.msg)), self._clock()
        with self._lock:
            passed_s, dropped = self._last.get(kind, (float("-inf"), 0))
            if now - passed_s < INTERVAL_S:
                self._last[kind] = passed_s, dropped + 1
                return False
            if len(self._last) >= MAX_KINDS:
                self._last.clear()
            self._last[kind] = now, 0
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped} similar messages dropped)", ()
        return True
