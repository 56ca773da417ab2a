"""Detects vLLM in the interpreter of an engine, which may differ from the one that runs `kvbm`.

Runs one short subprocess, which reads the metadata of installed packages and does not import them.

No child interpreter imports modules from the working directory, which may hold files of others. Programs of kvbm get
`-P`. An interpreter of the user gets SAFE_PATH, which also applies to the processes that it starts.
"""

from __future__ import annotations

import json
import os
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


@cache
def find_vllm(python: str) -> VllmInstallation | None:
    """Returns vLLM as installed in `python`, None without it. Raises EnvironmentProblem if `python` does not work."""
    found = _probe(python)
    return VllmInstallation(**found) if found is not None else None


def _probe(python: str) -> dict[str, Any] | None:
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env={**os.environ, **SAFE_PATH},
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        answer = ...
    if not isinstance(answer, dict | None):
        raise EnvironmentProblem(f"`{python}` is not a working Python interpreter", hint="check `engine.python`")
    return answer
