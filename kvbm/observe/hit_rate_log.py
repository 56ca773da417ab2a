"""Hit rate log: a log line with the cache hit rates at regular intervals.

A separate thread reads the leader's counters; no engine step waits for it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.metrics import Counters

log = logging.getLogger(__name__)


class HitRateLog:
    """Logs every `interval_s` seconds and at the end, if a request has finished since the last line."""

    def __init__(self, counters: Counters, interval_s: float) -> None:
        self._counters = counters
        self._reported_requests = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(interval_s,), name="kvbm-hit-rates", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self._report()
        self._report()

    def _report(self) -> None:
        finished = self._counters.finished_requests
        if finished != self._reported_requests:
            self._reported_requests = finished
            log.info("%s", hit_rates(self._counters))


def hit_rates(counters: Counters) -> str:
    """`kvbm: cache hit rates of the last 12 requests: host 42.0% (21/50 blocks), disk 0.0% (0/50)`"""
    host, disk, shared, queried = counters.hits()
    count = len(counters.hit_window)
    percent = 100 / queried if queried else 0.0
    text = (
        f"kvbm: cache hit rates of the last {count} requests: "
        f"host {host * percent:.1f}% ({host}/{queried} blocks), disk {disk * percent:.1f}% ({disk}/{queried})"
    )
    return f"{text}, shared {shared * percent:.1f}% ({shared}/{queried})" if shared else text
