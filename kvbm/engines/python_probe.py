"""Detects an engine in a Python interpreter, which may differ from the one that runs `kvbm`.

Runs one short subprocess, which reads the metadata of installed packages and does not import them. It finds the flags
of an engine in its source: the names in calls of `add_argument`, and the fields of classes such as `FrontendArgs`.

No child interpreter imports modules from the working directory, which may hold files of others. Programs of kvbm get
`-P`. An interpreter of the user gets SAFE_PATH, which also applies to the processes that it starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from kvbm.child.run import Ended, run
from kvbm.engines.installation import Installation, ProbedPackage
from kvbm.errors import EnvironmentProblem, reason_of
from kvbm.text.reading import parse_json

PROBE_TIMEOUT_S = 30
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


_PROGRAM = """
import sys
sys.path = [entry for entry in sys.path if entry]  # before 3.11, SAFE_PATH is ignored
import ast, importlib.metadata as metadata, importlib.util, json, os, sysconfig
module, command = sys.argv[1:3]
interface, parsers = json.loads(sys.argv[3])
def files(package, names):
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    paths = [os.path.join(place, *name.split("/")) for place in places for name in names]
    return [path for path in paths if os.path.isfile(path)]
def flags(paths):
    for path in paths:
        with open(path, "rb") as source:
            tree = ast.parse(source.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                yield from (word[2:].replace("-", "_") for word in words if str(word).startswith("--"))
            elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
                yield from (one.target.id for one in node.body if isinstance(one, ast.AnnAssign))
found = None
for name in (module, *sorted(n for n in metadata.packages_distributions().get(module, ()) if n != module)):
    try:
        found = {"distribution": name, "version": metadata.version(name)}
        break
    except metadata.PackageNotFoundError:
        pass
if found:
    script = os.path.join(sysconfig.get_path("scripts"), command)
    works = found["distribution"] == module and os.access(script, os.X_OK)
    found["script"] = script if works else None
    found["has_kvbm"] = bool(files("kvbm", ["config/connector.py"]))
    try:
        found["rival"] = metadata.version("kvbm")
    except metadata.PackageNotFoundError:
        found["rival"] = None
    if interface:
        found["has_interface"] = bool(files(module, interface))
    if parsers:
        try:
            found["flags"] = sorted(set(flags(files(module, parsers))))
        except (OSError, SyntaxError, ValueError, RecursionError):
            found["flags"] = []  # unknown
print(json.dumps(found))
"""


def find(python: str, package: ProbedPackage) -> Installation | None:
    """Return an engine as installed in `python`, None without it. Raises EnvironmentProblem if `python` does not work.

    Probes once: all parts of a command get the same answer, also if the probe failed or timed out.
    """
    found = _probe_once(python, package)
    if isinstance(found, EnvironmentProblem):
        raise found
    return None if found is None else Installation(**found)


@cache
def _probe_once(python: str, package: ProbedPackage) -> dict[str, Any] | EnvironmentProblem | None:
    try:
        return _probe(python, package)
    except EnvironmentProblem as problem:
        return problem


def _probe(python: str, package: ProbedPackage) -> dict[str, Any] | None:
    try:
        details = json.dumps([package.interface, package.parsers])
        ended = run_elsewhere(python, _PROGRAM, package.module, package.command, details, timeout_s=PROBE_TIMEOUT_S)
    except TimeoutError:
        raise EnvironmentProblem(
            f"`{python}` did not answer within {PROBE_TIMEOUT_S} s, so its {package.title} is unknown",
            hint="run the command again; if it times out again, check `engine.python`",
        ) from None
    except OSError as error:
        raise _not_working(python, reason_of(error)) from None
    try:
        answer = parse_json(ended.out)
    except ValueError:
        answer = ...
    if not isinstance(answer, dict | None):
        raise _not_working(python, f"exit code {ended.code}" if ended.code else "its answer is not JSON")
    return answer


def run_elsewhere(
    python: str,
    program: str,
    *arguments: str,
    timeout_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run the text of a program in an interpreter of the user, see `run`."""
    environment = {**os.environ, **SAFE_PATH, **(variables or {})}
    return run([python, "-c", program, *arguments], timeout_s=timeout_s, environment=environment)


def _not_working(python: str, reason: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"`{python}` is not a working Python interpreter: {reason}", hint="check `engine.python`")
