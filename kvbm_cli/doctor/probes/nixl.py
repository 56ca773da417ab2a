"""Reports which NIXL plugins can create a backend: `{"version": ..., "plugins": {name: null or the error}}`.

The arguments name the plugins; without arguments it tries all that NIXL lists. Most of them need special hardware or
libraries. Each plugin is tried in a process of its own with a timeout: creating a backend can hang forever (GDS without
/proc/modules), and a process that loaded UCX may crash at exit. It starts new processes instead of forking, because a
fork of a process with threads may hang too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TRY = "--try"
TRY_TIMEOUT_S = 15.0
DISTRIBUTIONS = {"nixl": "nixl", "nixl-cu13": "nixl_cu13", "nixl-cu12": "nixl_cu12"}
NEEDS_GPU = ("GDS", "GPUNETIO")
VARIANTS = {"POSIX": {"POSIX (io_uring)": {"use_uring": "true"}, "POSIX (aio)": {"use_aio": "true"}}}
PR_SET_PDEATHSIG, SIGKILL = 1, 9


def main() -> None:
    if sys.argv[1:2] == [TRY]:
        _answer(*_try(sys.argv[2]))
    held = next((found for name in DISTRIBUTIONS if (found := _version(name)) is not None), None)
    plugins: dict[str, str | None] = {}
    if held is not None:
        for name in sys.argv[1:] or _in_a_process([TRY, ""]):
            plugins |= _tried(name)
    _answer({"version": held, "plugins": plugins})


def _answer(*lines: Any) -> None:
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
            [sys.executable, "-P", __file__, *arguments], capture_output=True, text=True, timeout=TRY_TIMEOUT_S
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
        return [] if not name else [f"{type(error).__name__}: {error}".splitlines()[0]]
    return [None]


def _api() -> Any:
    for package in DISTRIBUTIONS.values():
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ImportError("NIXL is installed but cannot be imported")


if __name__ == "__main__":
    main()
