"""Threads: on which cores they may run, and how they are started when memory is short.

`Thread.start` waits for the first step of the new thread. If memory runs out there, the thread is gone and the wait
never ends: an engine would stop in the middle of a step. `start` raises RuntimeError instead, as `Thread.start` does if
no thread can be created.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

START_LIMIT_S = 30.0  # a late thread is not a dead one: on a busy machine, 5 s were too short


def allowed_cores() -> set[int]:
    """Return the cores that this process or its parent may use.

    An engine binds its process, but not its parent, to the cores it computes on. A thread that inherited this binding
    would compete for a core with the engine thread that waits for it.
    """
    cores = os.sched_getaffinity(0)
    with suppress(OSError):  # a parent in another namespace, or none
        cores |= os.sched_getaffinity(os.getppid())
    return cores


class _LimitedEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(START_LIMIT_S if timeout is None else timeout):
            raise RuntimeError("cannot start a thread: it has ended before its first step")
        return True


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises RuntimeError if it does not run, also if memory runs out while it starts."""
    vars(thread)["_started"] = _LimitedEvent()  # private to Thread, and what its `start` waits for
    try:
        thread.start()
    except MemoryError as error:
        raise RuntimeError("cannot start a thread: no memory") from error
