"""A line of the log with the hit rates, from time to time, as long as requests end.

A thread of its own reads what the leader counts; no step waits for it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.metrics import Counters

log = logging.getLogger(__name__)


class HitRateLog:
    """A line every `interval_s` seconds, unless no request has ended since the last; one more at the end."""

    def __init__(self, counters: Counters, interval_s: float) -> None:
        self._counters = counters
        self._told_requests = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(interval_s,), name="kvbm-hit-rates", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self._tell()
        self._tell()

    def _tell(self) -> None:
        finished = self._counters.finished_requests
        if finished != self._told_requests:
            self._told_requests = finished
            log.info("%s", hit_rates(self._counters))


def hit_rates(counters: Counters) -> str:
    """`kvbm: cache hit rates of the last 12 requests: host 42.0% (21/50 blocks), disk 0.0% (0/50)`"""
    host, disk, asked = counters.hits()
    count = len(counters.hit_window)
    share = 100 / asked if asked else 0.0
    return (
        f"kvbm: cache hit rates of the last {count} requests: "
        f"host {host * share:.1f}% ({host}/{asked} blocks), disk {disk * share:.1f}% ({disk}/{asked})"
    )
