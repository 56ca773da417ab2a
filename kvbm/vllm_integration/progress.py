"""Progress log: log lines for slow steps of an engine's start-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 2.0

log = logging.getLogger(__name__)


def progress_log(what: str) -> Callable[[int, int], None]:
    """Return a callback (bytes done, bytes in total) that logs the progress at most every INTERVAL_S seconds."""
    last_s = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > INTERVAL_S:
            last_s = time.monotonic()
            log.info("kvbm: allocated %.1f of %.1f GB %s", done_bytes / 1e9, total_bytes / 1e9, what)

    return progress
