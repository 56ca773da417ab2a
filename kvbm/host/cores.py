"""CPU cores: which cores kvbm's threads may use in an engine's process."""

from __future__ import annotations

import os
from contextlib import suppress


def allowed_cores() -> set[int]:
    """Return the cores that this process or its parent may use.

    An engine binds its process, but not its parent, to the cores it computes on. A thread that inherited this binding
    would compete for a core with the engine thread that waits for it.
    """
    cores = os.sched_getaffinity(0)
    with suppress(OSError):  # a parent in another namespace, or none
        cores |= os.sched_getaffinity(os.getppid())
    return cores
