"""How long a thread waits for something, on a machine of any load."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

LIMIT_S = 240  # nothing on a busy machine takes as long
Found = TypeVar("Found")


def eventually(condition: Callable[[], Found], what: str = "") -> Found:
    """Wait until a condition is true, and return what it returned."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"did not come true within {LIMIT_S} s {what}"
        time.sleep(0.01)
    return found


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def own_children() -> list[psutil.Process]:
    """Return the living children of this process, also those that other tests have left."""
    return [child for child in psutil.Process().children() if not is_gone(child.pid)]


def slept_s() -> float:
    """Return how long this thread has neither run nor waited for a core: a busy machine does not add to it."""
    on_core_ns, for_core_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    return time.monotonic() - (on_core_ns + for_core_ns) / 1e9
