"""Progress of what takes long at an engine's start, as lines of its log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 2.0

log = logging.getLogger(__name__)


def progress_log(what: str) -> Callable[[int, int], None]:
    """A callback for bytes done and bytes in all, which says now and then how many bytes `what` has taken."""
    last_s = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > INTERVAL_S:
            last_s = time.monotonic()
            log.info("kvbm: taken %.1f of %.1f GB %s", done_bytes / 1e9, total_bytes / 1e9, what)

    return progress
