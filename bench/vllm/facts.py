"""The machine, the date and the versions that a result was measured with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def facts(distributions: tuple[str, ...], *, lmcache: Path | None = None) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in distributions}
    if lmcache is not None:
        found = importlib.metadata.distributions(name="lmcache", path=[str(lmcache)])
        versions["lmcache"] = next(iter(found)).version
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "cpu": field("/proc/cpuinfo", "model name"),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
    }


def stolen_s() -> float:
    """Steal time of a virtual machine in CPU seconds since its start."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    return f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"


def commit() -> str:
    """The commit of this repository, with `+` if tracked files differ from it; "unknown" in a copy without `.git`."""
    if not (REPOSITORY / ".git").exists():
        return "unknown"

    def git(*argv: str) -> str:
        return subprocess.run(["git", "-C", str(REPOSITORY), *argv], capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "kvbm")
    return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed.strip() else "")


def field(path: str, name: str) -> str | None:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
