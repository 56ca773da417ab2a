"""Which plugins of NIXL make a backend: `{"version": ..., "plugins": {name: null or what is wrong}}`.

The arguments name the plugins, else all that NIXL lists, most of which need hardware or libraries. Each is tried in a
process of its own with a time limit, because creating one can hang for ever (GDS without /proc/modules), and a process
that has loaded UCX may crash when it ends.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TRY_TIMEOUT_S = 15.0
DISTRIBUTIONS = {"nixl": "nixl", "nixl-cu13": "nixl_cu13", "nixl-cu12": "nixl_cu12"}
NEEDS_GPU = ("GDS", "GPUNETIO")
VARIANTS = {"POSIX": {"POSIX (io_uring)": {"use_uring": "true"}, "POSIX (aio)": {"use_aio": "true"}}}


def main() -> None:
    found = _module()
    if found is None:
        print(json.dumps({"version": None, "plugins": {}}), flush=True)
        os._exit(0)
    held, api = found
    plugins: dict[str, str | None] = {}
    for name in sys.argv[1:] or _listed(api):
        if name.startswith(NEEDS_GPU) and not os.path.exists("/dev/nvidiactl"):
            plugins[name] = "there is no GPU"
            continue
        for shown, parameters in VARIANTS.get(name, {name: {}}).items():
            plugins[shown] = _tried(api, name, parameters)
    print(json.dumps({"version": held, "plugins": plugins}), flush=True)
    os._exit(0)  # past the libraries' own clearing away, in which UCX can crash


def _module() -> tuple[str, Any] | None:
    for distribution, package in DISTRIBUTIONS.items():
        try:
            held = version(distribution)
            with _quiet():
                return held, importlib.import_module(f"{package}._api")
        except (PackageNotFoundError, ImportError):
            continue
    return None


@contextlib.contextmanager
def _quiet() -> Any:
    """NIXL writes to both streams."""
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout.flush()
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _listed(api: Any) -> list[str]:
    with _quiet():
        agent = api.nixl_agent("doctor-lists", api.nixl_agent_config(backends=[]))
        return sorted(agent.get_plugin_list())


def _tried(api: Any, name: str, parameters: dict[str, str]) -> str | None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _die_with_parent()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            api.nixl_agent("doctor", api.nixl_agent_config(backends=[])).create_backend(name, parameters)
            os.write(writer, b"+")
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".splitlines()[0].encode())
        os._exit(0)
    os.close(writer)
    answer = _answer(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return None if answer == "+" else answer


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _answer(reader: int) -> str:
    if not select.select([reader], [], [], TRY_TIMEOUT_S)[0]:
        return f"hangs for more than {TRY_TIMEOUT_S:.0f} s"
    return os.read(reader, 4096).decode(errors="replace") or "it crashes"


if __name__ == "__main__":
    main()
