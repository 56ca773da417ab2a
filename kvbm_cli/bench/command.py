"""`kvbm bench`: the command line around one experiment. The table, or the JSON, is all that goes to stdout."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvbm.errors import EnvironmentProblem, KvbmError, UsageError

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm_cli.bench.experiment import Engines
    from kvbm_cli.bench.verdict import Limits
    from kvbm_cli.profile.workload import Workload

INTERRUPTED_EXIT_CODE = 130
DEFAULT_WORKLOAD = "conversations"


def bench(
    reference: str,
    overrides: Sequence[str],
    *,
    compare: str,
    workload: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Resolve profile and workload, then measure. Returns the exit code of the verdict."""
    from kvbm_cli.engine.engines import make_model
    from kvbm_cli.profile.preflight import require_engine
    from kvbm_cli.profile.resolve import resolve
    from kvbm_cli.profile.workload import load_workload
    from kvbm_cli.terminal.console import print_note

    if compare != "baseline":
        raise UsageError(f"--compare takes `baseline`, not `{compare}`", hint="`kvbm bench --compare baseline`")
    resolved = resolve(reference, overrides)
    if resolved.profile.disaggregated.is_wanted:
        message = f"`{resolved.name}` starts several engines, and `kvbm bench` compares one with one"
        raise UsageError(message, hint="take the profile that it extends")
    chosen = load_workload(workload or resolved.profile.bench.workload or DEFAULT_WORKLOAD)
    require_engine(resolved, force=False)
    make_model(resolved.profile, say=print_note)
    return measure(resolved, chosen, output=output, as_json=as_json)


def measure(
    resolved: ResolvedProfile,
    workload: Workload,
    *,
    output: Path | None,
    as_json: bool,
    engines: Engines | None = None,
    limits: Limits | None = None,
) -> int:
    """Run, write, print; returns the exit code. `engines` and `limits` replace the profile's own and the defaults."""
    from rich.console import Console

    from kvbm_cli.bench.arms import ProfileEngines
    from kvbm_cli.bench.experiment import run_experiment
    from kvbm_cli.bench.output_directory import OutputDirectory
    from kvbm_cli.bench.progress import BenchProgress
    from kvbm_cli.bench.report import WIDTH, show
    from kvbm_cli.bench.summary import interrupted_summary, summarise
    from kvbm_cli.bench.verdict import DEFAULT_LIMITS, Verdict

    directory = OutputDirectory.create(output)
    surroundings = _surroundings(resolved)
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        with BenchProgress() as progress:
            engines = engines or ProfileEngines(resolved.profile, workload, directory)
            experiment = run_experiment(workload, engines, directory, progress)
        summary = summarise(
            experiment, surroundings=surroundings, caveats=_caveats(resolved, workload), limits=limits or DEFAULT_LIMITS
        )
    except KeyboardInterrupt:
        directory.write_json("summary.json", interrupted_summary("interrupted", surroundings))
        print(f"interrupted; {directory.path} holds a part of a run, marked as such", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except KvbmError as error:
        with contextlib.suppress(OSError):
            directory.write_json("summary.json", interrupted_summary(error.message, surroundings))
        raise
    except OSError as error:
        reason = f"cannot write to {directory.path}: {(error.strerror or str(error)).lower()}"
        with contextlib.suppress(OSError):
            directory.write_json("summary.json", interrupted_summary(reason, surroundings))
        raise EnvironmentProblem(reason) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        directory.close()
    try:
        directory.write_json("summary.json", summary)
    finally:  # what was measured for minutes is told also where it cannot be written
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            show(summary, Console(width=WIDTH, markup=False), directory=directory.path)
    return Verdict(summary["verdict"]).exit_code


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _surroundings(resolved: ResolvedProfile) -> dict[str, Any]:
    from kvbm_cli.bench.machine import machine, versions

    return {
        "profile": {"name": resolved.name, **resolved.profile.model_dump(mode="json")},
        "machine": machine(),
        "versions": {**versions(), **_engine_version(resolved)},
    }


def _engine_version(resolved: ResolvedProfile) -> dict[str, str]:
    """vLLM may be in an interpreter of its own."""
    from kvbm_cli.engine.engines import vllm_of

    found = vllm_of(resolved.profile) if resolved.profile.engine.kind == "vllm" else None
    return {found.distribution: found.version} if found else {}


def _caveats(resolved: ResolvedProfile, workload: Workload) -> list[str]:
    """What qualifies the numbers before anything is measured, and how busy the machine was meanwhile."""
    from kvbm_cli.bench.machine import load_average, usable_cpu_count
    from kvbm_cli.engine.engines import has_prefix_caching, runs_on_cpu
    from kvbm_cli.profile.size import size_if_known

    caveats = []
    if resolved.profile.engine.kind == "embedded":
        caveats.append("numbers of the embedded reference engine: compare its arms with each other, with nothing else")
    elif runs_on_cpu(resolved.profile):
        caveats.append("vLLM computes on a CPU: how many times faster a GPU would be with kvbm is another number")
    if not has_prefix_caching(resolved.profile):
        caveats.append("the engine's own prefix cache is off, so the baseline computes every prompt whole")
    sizing = size_if_known(resolved)
    if sizing is not None and sizing.host.token_count < workload.working_set_tokens:
        holds = f"G2 holds {sizing.host.token_count} tokens"
        caveats.append(f"{holds}, less than the working set of {workload.working_set_tokens}")
    load, cpu_count = load_average() or 0.0, usable_cpu_count()
    if load > cpu_count:
        caveats.append(f"the machine was busy: load {load:.1f} on {cpu_count} cores")
    return caveats
