"""The machine that a result was measured on: hardware, versions and load."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("kvbm-cli", "torch", "transformers", "aiohttp", "numpy")


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cpu_count": usable_cpu_count(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "load_average": load_average(),
        "time_unix_s": time.time(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def usable_cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Average number of runnable threads over the last minute; `None` if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
