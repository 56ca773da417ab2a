"""The cores that threads beside an engine's own may run on."""

from __future__ import annotations

import os
from contextlib import suppress


def allowed_cores() -> set[int]:
    """The cores that this process or its parent may use. An engine binds itself to those it computes on, and leaves its
    parent as it is: a thread that inherited the engine's would wait for the very thread that waits for it."""
    cores = os.sched_getaffinity(0)
    with suppress(OSError):  # a parent in another namespace, or none
        cores |= os.sched_getaffinity(os.getppid())
    return cores
