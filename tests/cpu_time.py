"""How much of a processor a piece of work takes, on a machine of unknown speed that does other things meanwhile."""

from __future__ import annotations

import gc
import resource
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


def of_children_s(work: Callable[[], object]) -> float:
    """Return the CPU time, in seconds, of the processes that `work` starts and waits for.

    Children of earlier tests that end meanwhile are counted too.
    """
    before_s = children_s()
    work()
    return children_s() - before_s


def children_s() -> float:
    """Return the CPU time of all processes that this one has waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
