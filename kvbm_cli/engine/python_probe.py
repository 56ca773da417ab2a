"""Detects vLLM in the interpreter of an engine, which may differ from the one that runs `kvbm`.

Runs one short subprocess, which reads the metadata of installed packages and does not import them.

No child interpreter imports modules from the working directory, which may hold files of others. Programs of kvbm get
`-P`. An interpreter of the user gets SAFE_PATH, which also applies to the processes that it starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import cache
from typing import Any

from kvbm.errors import EnvironmentProblem
from kvbm.vllm_integration.versions import VllmInstallation

PROBE_TIMEOUT_S = 30
SAFE_PATH = {"PYTHONSAFEPATH": "1"}

_PROGRAM = """
import sys
sys.path = [entry for entry in sys.path if entry]  # before 3.11, SAFE_PATH is ignored
import importlib.metadata as metadata, importlib.util, json, os, sysconfig
found = None
for name in ("vllm", *sorted(n for n in metadata.packages_distributions().get("vllm", ()) if n != "vllm")):
    try:
        found = {"distribution": name, "version": metadata.version(name)}
        break
    except metadata.PackageNotFoundError:
        pass
if found:
    script = os.path.join(sysconfig.get_path("scripts"), "vllm")
    works = found["distribution"] == "vllm" and os.access(script, os.X_OK)
    found["script"] = script if works else None
    spec = importlib.util.find_spec("kvbm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    found["has_kvbm"] = any(os.path.isfile(os.path.join(p, "config", "connector.py")) for p in places)
    try:
        found["rival"] = metadata.version("kvbm")
    except metadata.PackageNotFoundError:
        found["rival"] = None
print(json.dumps(found))
"""


def find_vllm(python: str) -> VllmInstallation | None:
    """Returns vLLM as installed in `python`, None without it. Raises EnvironmentProblem if `python` does not work.

    Probes once: all parts of a command get the same answer, also if the probe failed or timed out.
    """
    found = _probe_once(python)
    if isinstance(found, EnvironmentProblem):
        raise found
    return found


@cache
def _probe_once(python: str) -> VllmInstallation | EnvironmentProblem | None:
    try:
        found = _probe(python)
        return VllmInstallation(**found) if found is not None else None
    except EnvironmentProblem as problem:
        return problem


def _probe(python: str) -> dict[str, Any] | None:
    try:
        status, out = _run(python)
    except OSError as error:
        raise _not_working(python, (error.strerror or str(error)).lower()) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(
            f"`{python}` did not answer within {PROBE_TIMEOUT_S} s, so its vLLM is unknown",
            hint="run the command again; if it times out again, check `engine.python`",
        ) from None
    try:
        answer = json.loads(out)
    except ValueError:
        answer = ...
    if not isinstance(answer, dict | None):
        raise _not_working(python, f"exit code {status}" if status else "its answer is not JSON")
    return answer


def _run(python: str) -> tuple[int, str]:
    """Returns exit code and output of the probe. Kills it with all its children on a timeout or Ctrl-C."""
    with subprocess.Popen(
        [python, "-c", _PROGRAM],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, **SAFE_PATH},
        process_group=0,
    ) as child:
        try:
            out, _ = child.communicate(timeout=PROBE_TIMEOUT_S)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        return child.returncode, out


def _not_working(python: str, reason: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"`{python}` is not a working Python interpreter: {reason}", hint="check `engine.python`")
