"""What an engine's interpreter holds. The first argument names the probe:

`connector`: imports the modules in the other arguments: `{"seconds": ..., "error": null or its first line}`.

`cuda`: versions of torch, its CUDA and the driver, and the number of usable devices.

`nixl`: which NIXL plugins can create a backend: `{"version": ..., "plugins": {name: null or the error}}`. The other
arguments name the plugins; without them it tries all that NIXL lists. Most of them need special hardware or libraries.
Each plugin is tried in a process of its own with a timeout: creating a backend can hang forever (GDS without
/proc/modules), and a process that loaded UCX may crash at exit. It starts new processes instead of forking, because a
fork of a process with threads may hang too.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
TRY = "--try"
TRY_TIMEOUT_S = 15.0
DISTRIBUTIONS = {"nixl": "nixl", "nixl-cu13": "nixl_cu13", "nixl-cu12": "nixl_cu12"}
NEEDS_GPU = ("GDS", "GPUNETIO")
VARIANTS = {"POSIX": {"POSIX (io_uring)": {"use_uring": "true"}, "POSIX (aio)": {"use_aio": "true"}}}
PR_SET_PDEATHSIG, SIGKILL = 1, 9


def connector(modules: Sequence[str]) -> dict[str, object]:
    started = time.monotonic()
    error = None
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as caught:
        error = _first_line(caught)
    return {"seconds": time.monotonic() - started, "error": error}


def cuda(ignored: Sequence[str]) -> dict[str, object]:
    answer: dict[str, object] = {"torch": None, "cuda": None, "driver": _driver(), "devices": 0, "error": None}
    try:
        import torch
    except Exception as error:
        return {**answer, "error": _first_line(error)}
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {**answer, "torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _driver() -> str | None:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


def nixl(names: Sequence[str]) -> dict[str, object]:
    if names[:1] == [TRY]:
        _exit(*_try(names[1]))
    held = next((found for name in DISTRIBUTIONS if (found := _version(name)) is not None), None)
    plugins: dict[str, str | None] = {}
    if held is not None:
        for name in names or _in_a_process([TRY, ""]):
            plugins |= _tried(name)
    return {"version": held, "plugins": plugins}


def _exit(*lines: Any) -> None:
    """Print the lines and exits without running the libraries' cleanup, in which UCX can crash."""
    for line in lines:
        print(json.dumps(line), flush=True)
    os._exit(0)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _tried(name: str) -> dict[str, str | None]:
    if name.startswith(NEEDS_GPU) and not os.path.exists("/dev/nvidiactl"):
        return {name: "no NVIDIA GPU"}
    variants = list(VARIANTS.get(name, {name: {}}))
    with ThreadPoolExecutor(len(variants)) as threads:
        answers = list(threads.map(lambda shown: _in_a_process([TRY, shown]), variants))
    hung = f"crashed, or did not respond within {TRY_TIMEOUT_S:.0f} s"
    return {shown: lines[0] if lines else hung for shown, lines in zip(variants, answers, strict=True)}


def _in_a_process(arguments: list[str]) -> list[Any]:
    """Run this program with other arguments and return the objects that it prints; none if it crashes or hangs."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__, "nixl", *arguments], capture_output=True, text=True, timeout=TRY_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in ('"', "n")]


def _try(shown: str) -> list[Any]:
    """Create a backend and return [error or None]. With an empty name, returns the names of all plugins."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    name = shown.partition(" ")[0]
    try:
        api = _api()
        agent = api.nixl_agent("doctor", api.nixl_agent_config(backends=[]))
        if not name:
            return sorted(agent.get_plugin_list())
        agent.create_backend(name, VARIANTS.get(name, {}).get(shown, {}))
    except Exception as error:
        return [] if not name else [_first_line(error)]
    return [None]


def _api() -> Any:
    for package in DISTRIBUTIONS.values():
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ImportError("NIXL is installed but cannot be imported")


PROBES = {"connector": connector, "cuda": cuda, "nixl": nixl}

if __name__ == "__main__":
    _exit(PROBES[sys.argv[1]](sys.argv[2:]))
