"""The engine's interpreter: its engine and version, the connector, CUDA, NIXL, and NVIDIA's package of our name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvbm_cli.doctor.machine import NoAnswer
from kvbm_cli.doctor.result import Check, State, failure, ok, skipped, warning
from kvbm_cli.doctor.subject import Subject

IMPORT_TIMEOUT_S = 120.0
NIXL_TIMEOUT_S = 90.0
QUICK_TIMEOUT_S = 8.0
MODULES = {
    "vllm": ["kvbm.vllm_integration.connector"],
    "embedded": ["kvbm.embedded.driver", "kvbm.embedded.engine.engine", "transformers"],
}


def checks(subject: Subject) -> Iterator[Check]:
    profile = subject.resolved.profile if subject.resolved is not None else None
    python = (profile.engine.python if profile is not None else None) or sys.executable
    yield _rival(subject)
    if profile is None:
        yield skipped("version", "a profile says which engine there is", "`--profile PROFILE`")
    elif profile.engine.kind == "vllm":
        yield from _vllm(subject)
    else:
        yield ok("version", "embedded, of this kvbm")
    if profile is not None:
        yield _connector(subject, python, profile.engine.kind)
    yield _cuda(subject, python)
    yield from _nixl(subject, python)


def _rival(subject: Subject) -> Check:
    """NVIDIA's distribution in the interpreter of the command itself; that of an engine is `_vllm`'s."""
    rival = subject.machine.rival
    if rival is None:
        return ok("NVIDIA's kvbm", "not installed beside this command")
    return failure("NVIDIA's kvbm", f"{rival} is installed, and its modules have our names", "`pip uninstall kvbm`")


def _vllm(subject: Subject) -> Iterator[Check]:
    from kvbm.vllm_integration.versions import RUN, shown
    from kvbm_cli.engine.engines import vllm_of, vllm_problem

    assert subject.resolved is not None
    profile = subject.resolved.profile
    problem, found = vllm_problem(profile), vllm_of(profile)
    if problem is not None:
        yield failure("version", problem.message, problem.hint)
    elif found is not None:
        yield ok("version", f"vLLM {found.version}; {shown(RUN)} were run", version=found.version)


def _connector(subject: Subject, python: str, kind: str) -> Check:
    if subject.is_quick:
        return skipped("connector", "importing an engine takes a while", "`kvbm doctor` without --quick")
    subject.say("importing the connector")
    answer = _asked(subject, python, "connector", MODULES[kind], timeout_s=IMPORT_TIMEOUT_S)
    if isinstance(answer, Check):
        return answer
    if answer["error"] is not None:
        remedy = f"`{python} -c 'import {', '.join(MODULES[kind])}'` shows where"
        return failure("connector", f"cannot be imported: {answer['error']}", remedy)
    return ok("connector", f"imported in {answer['seconds']:.1f} s", seconds=answer["seconds"])


def _asked(
    subject: Subject, python: str, program: str, arguments: list[str], *, timeout_s: float
) -> dict[str, Any] | Check:
    """The answer, or the check that says why there is none."""
    timeout_s = min(timeout_s, QUICK_TIMEOUT_S) if subject.is_quick else timeout_s
    try:
        return subject.machine.ask(python, program, arguments, timeout_s=timeout_s)
    except NoAnswer as error:
        if subject.is_quick:
            return skipped(_NAMES[program], str(error), "`kvbm doctor` without --quick waits longer")
        return failure(_NAMES[program], f"`{python}`: {error}", "check `engine.python`")


_NAMES = {"connector": "connector", "cuda": "CUDA", "nixl": "NIXL"}


def _cuda(subject: Subject, python: str) -> Check:
    driver = subject.machine.devices / "nvidiactl"
    if not driver.exists():
        return skipped("CUDA", "no driver of NVIDIA")
    subject.say("asking torch for CUDA")
    answer = _asked(subject, python, "cuda", [], timeout_s=IMPORT_TIMEOUT_S)
    if isinstance(answer, Check):
        return answer
    if answer["error"] is not None:
        return failure("CUDA", f"no torch: {answer['error']}", f"install torch for `{python}`")
    shown = f"torch {answer['torch']} for CUDA {answer['cuda'] or '-'}, driver {answer['driver'] or 'unknown'}"
    facts = {name: answer[name] for name in ("torch", "cuda", "driver", "devices")}
    if not answer["devices"]:
        return failure("CUDA", f"{shown}: no device can be used", "a torch whose CUDA the driver supports", **facts)
    return ok("CUDA", f"{shown}, {answer['devices']} devices", **facts)


def _nixl(subject: Subject, python: str) -> Iterator[Check]:
    """Plugins are listed whether or not they load, so each makes a backend, in a process of its own."""
    io = subject.disk.io if subject.disk is not None else None
    wanted = io in ("nixl", "gds")
    plugin = "GDS" if io == "gds" else "POSIX"
    if subject.is_quick and io in (None, "threads"):
        yield skipped("NIXL", "not asked for, and it takes a while", "`kvbm doctor` without --quick")
        return
    subject.say("loading the plugins of NIXL")
    answer = _asked(subject, python, "nixl", [plugin] if subject.is_quick else [], timeout_s=NIXL_TIMEOUT_S)
    if isinstance(answer, Check):
        yield answer if wanted else replace(answer, state=State.SKIPPED)
        return
    if answer["version"] is None:
        say = failure if wanted else skipped
        yield say("NIXL", f"`{python}` has none", "`tiers.disk.io: threads`" if wanted else None)
        return
    plugins: dict[str, str | None] = answer["plugins"]
    works = [name for name, error in plugins.items() if error is None]
    if any(name.partition(" ")[0] == plugin for name in works):
        yield ok("NIXL", f"{answer['version']}, with {', '.join(works)}", version=answer["version"])
    else:
        say = failure if wanted else warning
        yield say("NIXL", f"{answer['version']}, and {plugin} does not load", "`tiers.disk.io: threads`")
    absent = {name: error for name, error in plugins.items() if error is not None}
    if absent:
        yield Check("NIXL", State.SKIPPED, f"without {', '.join(absent)}, which do not load here", None, absent)
