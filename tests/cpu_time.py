"""How much of a processor a piece of work takes, on a machine of unknown speed that does other things meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

ROUNDS = 3


def cpu_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the least CPU time of some rounds in this thread, in seconds.

    Without the garbage collector, which may walk over all that earlier tests have left.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return min(_once_s(work) for _ in range(rounds))
    finally:
        if was_enabled:
            gc.enable()


def _once_s(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s
