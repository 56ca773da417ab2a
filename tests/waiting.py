"""How long a thread waits for something, on a machine of any load."""

from __future__ import annotations

import time
from pathlib import Path


def slept_s() -> float:
    """Return how long this thread has neither run nor waited for a core: a busy machine does not add to it."""
    on_core_ns, for_core_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    return time.monotonic() - (on_core_ns + for_core_ns) / 1e9
