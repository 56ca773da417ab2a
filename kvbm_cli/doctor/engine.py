"""Checks of the engine: version, connector, compiler, CUDA and NIXL of its interpreter, NVIDIA's `kvbm`, its ports."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.engines.table import installation_of, kind_of
from kvbm_cli.doctor.check import DoctorContext
from kvbm_cli.engine.process import FREE_PORT
from kvbm_cli.profile.machine_check import Check, Severity, failure, ok, skipped, warning
from kvbm_cli.profile.machine_problems import engine_checks, metrics_checks, server_check
from kvbm_cli.profile.preflight import unstorable_arguments
from kvbm_cli.runs.reservations import living_runs
from kvbm_cli.system.answering import answers
from kvbm_cli.system.filesystem import nearest_existing

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

IMPORT_TIMEOUT_S = 120.0
NIXL_TIMEOUT_S = 90.0
COMPILER_TIMEOUT_S = 60.0
QUICK_TIMEOUT_S = 8.0


def checks(context: DoctorContext) -> Iterator[Check]:
    resolved, python = context.resolved, sys.executable
    yield _nvidia_kvbm(context)
    if resolved is None:
        yield skipped("version", "the engine is unknown without a profile", "add `--profile PROFILE`")
    else:
        profile, kind = resolved.profile, kind_of(resolved.profile)
        python = profile.engine.python or sys.executable
        yield from _installed(resolved)
        for mistake in unstorable_arguments(resolved):
            yield failure("arguments", mistake.message, mistake.hint)
        yield _connector(context, python, kind.imported(profile))
        if kind.to_compile is not None:
            yield _compiler(context, python, kind.traits.title, kind.to_compile)
    yield _cuda(context, python)
    yield from _nixl(context, python)


def _nvidia_kvbm(context: DoctorContext) -> Check:
    """Check the interpreter of the command itself; `_installed` checks that of the engine."""
    nvidia_kvbm = context.machine.nvidia_kvbm
    if nvidia_kvbm is None:
        return ok("NVIDIA's kvbm", "not installed")
    return failure(
        "NVIDIA's kvbm",
        f"{nvidia_kvbm} is installed; its modules have the same names as this kvbm",
        "`pip uninstall kvbm`",
    )


def _installed(resolved: ResolvedProfile) -> Iterator[Check]:
    """Yield what `kvbm serve` would refuse, or the version."""
    problems = list(engine_checks(resolved))
    yield from problems
    kind, found = kind_of(resolved.profile), installation_of(resolved.profile)
    if kind.tested is None:
        yield ok("version", f"{resolved.profile.engine.kind}, part of this kvbm")
    elif found is not None and all(one.name != "version" for one in problems):
        yield ok("version", f"{kind.traits.title} {found.version} ({kind.tested})", version=found.version)
    if found is not None:
        yield ok("command", found.script or "its module: the interpreter has no such command")


def _connector(context: DoctorContext, python: str, modules: list[str]) -> Check:
    if context.is_quick:
        return skipped("connector", "importing an engine is slow", "run `kvbm doctor` without `--quick`")
    context.on_phase("importing the connector")
    answer = _run_probe(context, python, "connector", modules, timeout_s=IMPORT_TIMEOUT_S)
    if isinstance(answer, Check):
        return answer
    if answer["error"] is not None:
        remedy = f"run `{python} -c 'import {', '.join(modules)}'` for the traceback"
        return failure("connector", f"cannot be imported: {answer['error']}", remedy)
    return ok("connector", f"imported in {answer['seconds']:.1f} s", seconds=answer["seconds"])


def _run_probe(
    context: DoctorContext, python: str, name: str, arguments: list[str], *, timeout_s: float
) -> dict[str, Any] | Check:
    """Return the answer of the probe for the check `name`, or a check with the reason why there is none."""
    timeout_s = min(timeout_s, QUICK_TIMEOUT_S) if context.is_quick else timeout_s
    remedy = "check the value of `engine.python`"
    given = [name.lower(), *arguments]
    return context.answer_of(name, python, "engine", given, timeout_s=timeout_s, remedy=remedy)


def _compiler(context: DoctorContext, python: str, title: str, to_install: str) -> Check:
    """Check what the engine needs to build an extension; kvbm lets it do that at its start."""
    answer = _run_probe(context, python, "compiler", [], timeout_s=COMPILER_TIMEOUT_S)
    if isinstance(answer, Check):
        return answer
    if missing := answer["missing"]:
        finding = f"{title} builds an extension when it starts, and lacks {', '.join(missing)}"
        return failure("compiler", finding, f"install {to_install}")
    return ok("compiler", "a C++ compiler, ninja, and the headers of Python and OpenSSL")


def _cuda(context: DoctorContext, python: str) -> Check:
    driver = context.machine.devices / "nvidiactl"
    if not driver.exists():
        return skipped("CUDA", "no NVIDIA driver")
    context.on_phase("loading CUDA in torch")
    answer = _run_probe(context, python, "CUDA", [], timeout_s=IMPORT_TIMEOUT_S)
    if isinstance(answer, Check):
        return answer
    if answer["error"] is not None:
        return failure("CUDA", f"torch cannot be imported: {answer['error']}", f"install torch for `{python}`")
    shown = f"torch {answer['torch']} for CUDA {answer['cuda'] or '-'}, driver {answer['driver'] or 'unknown'}"
    facts = {name: answer[name] for name in ("torch", "cuda", "driver", "devices")}
    if not answer["devices"]:
        return failure(
            "CUDA", f"{shown}: no usable device", "install a torch whose CUDA version the driver supports", **facts
        )
    return ok("CUDA", f"{shown}, {answer['devices']} devices", **facts)


def _nixl(context: DoctorContext, python: str) -> Iterator[Check]:
    """Check which plugins move bytes, as a disk tier does that uses them."""
    io = context.disk.io if context.disk is not None else None
    wanted = io in ("nixl", "gds")
    plugin = "GDS" if io == "gds" else "POSIX"
    if context.is_quick and io in (None, "threads"):
        yield skipped(
            "NIXL", "not requested by `tiers.disk.io`, and the check is slow", "run `kvbm doctor` without `--quick`"
        )
        return
    context.on_phase("loading NIXL plugins")
    arguments = [str(_directory_for_nixl(context.directory)), *([plugin] if context.is_quick else [])]
    answer = _run_probe(context, python, "NIXL", arguments, timeout_s=NIXL_TIMEOUT_S)
    if isinstance(answer, Check):
        yield answer if wanted else replace(answer, severity=Severity.SKIPPED)
        return
    if answer["version"] is None:
        check = failure if wanted else skipped
        yield check("NIXL", f"not installed for `{python}`", "set `tiers.disk.io: threads`" if wanted else None)
        return
    plugins: dict[str, str | None] = answer["plugins"]
    works = [name for name, error in plugins.items() if error is None]
    if any(name.partition(" ")[0] == plugin for name in works):
        yield ok("NIXL", f"{answer['version']}, plugins: {', '.join(works)}", version=answer["version"])
    else:
        check = failure if wanted else warning
        yield check("NIXL", f"{answer['version']}: plugin {plugin} does not work", "set `tiers.disk.io: threads`")
    absent = {name: error for name, error in plugins.items() if error is not None}
    if absent:
        names = [f"{name} (no GPU)" if error.startswith("no GPU") else name for name, error in absent.items()]
        yield Check("NIXL", Severity.SKIPPED, f"plugins that do not work: {', '.join(names)}", None, absent)


def _directory_for_nixl(wanted: Path | None) -> Path:
    """Return where the plugins move bytes, since a file system may lack what they need: in the directory of the disk
    tier, or where it will be made. Without one that can be used, which other checks report, in that for temporary
    files."""
    if wanted is not None and answers(wanted, changes=True):
        place = nearest_existing(wanted)
        if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return place
    return Path(tempfile.gettempdir())


def port_checks(context: DoctorContext) -> Iterator[Check]:
    if context.resolved is None:
        yield skipped("server", "the address is unknown without a profile", "add `--profile PROFILE`")
        return
    server = server_check(context.resolved, living_runs())
    if server.remedy is not None:  # this command has no `--port`
        server = replace(server, remedy=server.remedy.replace(FREE_PORT, "set `server.port: 0`"))
    yield server
    yield from metrics_checks(context.resolved)
