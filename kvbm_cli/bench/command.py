"""`kvbm bench`: runs one experiment and prints its result. Only the table or the JSON goes to stdout."""

from __future__ import annotations

import contextlib
import difflib
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvbm.config.layers import find
from kvbm.errors import KvbmError, ProfileError, UsageError
from kvbm_cli.bench.arms import ProfileEngines
from kvbm_cli.bench.comparison import AGAINST_BASELINE, BASELINE, Comparison
from kvbm_cli.bench.experiment import Engines, run_experiment
from kvbm_cli.bench.machine import load_average, machine, usable_cpu_count, versions
from kvbm_cli.bench.output_directory import OutputDirectory, cannot_write
from kvbm_cli.bench.progress import BenchProgress
from kvbm_cli.bench.report import WIDTH, show
from kvbm_cli.bench.summary import interrupted_summary, summarise
from kvbm_cli.bench.verdict import DEFAULT_LIMITS, Verdict, VerdictLimits
from kvbm_cli.engine.engines import engine_version, has_prefix_caching, make_model, runs_on_cpu
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.diff import differences
from kvbm_cli.profile.machine_problems import problems_here, require_none
from kvbm_cli.profile.preflight import check
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.size import as_data, size_if_known
from kvbm_cli.profile.workload import Workload, load_workload
from kvbm_cli.terminal.console import print_note

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

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
    """Resolve the profiles and the workload, then measure. Returns the exit code of the verdict."""
    resolved = resolve(reference, overrides)
    other = None if compare == BASELINE else _profile_to_compare(compare)
    profiles = [resolved, *([other] if other else [])]
    for profile in profiles:
        _require_one_engine(profile)
        _require_endpoints(profile)
    if other:
        _require_comparable(resolved, other)
    chosen = load_workload(workload or resolved.profile.bench.workload or DEFAULT_WORKLOAD)
    for profile in profiles:
        require_none(problems_here(_on_free_port(profile), check(profile)))
    for profile in profiles:
        make_model(profile.profile, say=print_note)
    return measure(resolved, chosen, other=other, output=output, as_json=as_json)


def _profile_to_compare(compare: str) -> ResolvedProfile:
    """UsageError for a name that is neither `baseline` nor a profile; ProfileError for a wrong profile."""
    try:
        find(compare, directories=[profiles_directory()])
    except ProfileError as error:
        hint = f"did you mean `{BASELINE}`?" if difflib.get_close_matches(compare, [BASELINE]) else error.hint
        raise UsageError(f"--compare takes `{BASELINE}` or a profile: {error.message}", hint=hint) from None
    return resolve(compare)


def _on_free_port(resolved: ResolvedProfile) -> ResolvedProfile:
    """Returns the profile with a free port for its server, as each arm has it."""
    server = resolved.profile.server.model_copy(update={"port": 0})
    return replace(resolved, profile=resolved.profile.model_copy(update={"server": server}))


def _require_one_engine(resolved: ResolvedProfile) -> None:
    if resolved.profile.disaggregated.is_enabled:
        message = f"`{resolved.name}` starts several engines, and `kvbm bench` starts one per arm"
        raise UsageError(message, hint="use the profile that it extends")


def _require_endpoints(resolved: ResolvedProfile) -> None:
    """UsageError for an engine whose server cannot count tokens and cannot empty its cache."""
    if resolved.profile.engine.kind == "tensorrt-llm":
        message = "`kvbm bench` cannot measure TensorRT-LLM: its server has no `/tokenize` and no `/reset_prefix_cache`"
        hint = (
            "start `kvbm serve` and then `kvbm serve --baseline`, and send both the same requests with another client"
        )
        raise UsageError(message, hint=hint)


def _require_comparable(resolved: ResolvedProfile, other: ResolvedProfile) -> None:
    """UsageError unless both engines answer the same requests."""
    for key, one, another in (
        ("engine.kind", resolved.profile.engine.kind, other.profile.engine.kind),
        ("engine.model", resolved.profile.engine.model, other.profile.engine.model),
        ("engine.arguments.served_model_name", resolved.profile.engine.served_name, other.profile.engine.served_name),
    ):
        if one != another:
            message = f"`{resolved.name}` and `{other.name}` cannot be compared: `{key}` is `{one}` and `{another}`"
            raise UsageError(message, hint=f"`--compare` takes a profile with the same `{key}`")


def measure(
    resolved: ResolvedProfile,
    workload: Workload,
    *,
    other: ResolvedProfile | None = None,
    output: Path | None,
    as_json: bool,
    engines: Engines | None = None,
    limits: VerdictLimits | None = None,
) -> int:
    """Measure, write and print the result; returns the exit code of the verdict.

    `other` is the profile to compare with, `None` for the baseline. `engines` and `limits` are for tests.
    """
    from rich.console import Console

    directory = OutputDirectory.create(output)
    comparison = AGAINST_BASELINE if other is None else _comparison(resolved, other)
    surroundings = {**_surroundings(resolved), **(_compared_profiles(comparison, resolved, other) if other else {})}
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        with BenchProgress() as progress:
            engines = engines or ProfileEngines(
                resolved.profile, workload, directory, comparison=comparison, reference=other.profile if other else None
            )
            experiment = run_experiment(workload, engines, directory, progress, comparison)
        summary = summarise(
            experiment, surroundings=surroundings, caveats=_caveats(resolved, workload), limits=limits or DEFAULT_LIMITS
        )
    except KeyboardInterrupt:
        directory.write_json("summary.json", interrupted_summary("interrupted", surroundings))
        print_note(f"interrupted; {directory.path} holds an incomplete run, marked as such")
        return INTERRUPTED_EXIT_CODE
    except (KvbmError, OSError) as error:
        problem = error if isinstance(error, KvbmError) else cannot_write(directory.path, error)
        with contextlib.suppress(OSError):
            directory.write_json("summary.json", interrupted_summary(problem.message, surroundings))
        if problem is error:
            raise
        raise problem from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        directory.close()
    try:
        directory.write_json("summary.json", summary)
    finally:  # the result of minutes of measuring is printed even if it cannot be written
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            show(summary, Console(width=WIDTH, markup=False), directory=directory.path)
    return Verdict(summary["verdict"]).exit_code


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _surroundings(resolved: ResolvedProfile) -> dict[str, Any]:
    return {
        "profile": {"name": resolved.name, **resolved.profile.model_dump(mode="json")},
        "machine": machine(),
        "versions": {**versions(), **engine_version(resolved.profile)},
    }


def _comparison(measured: ResolvedProfile, reference: ResolvedProfile) -> Comparison:
    found = {key: (one.value, another.value) for key, one, another in differences(measured, reference)}
    return Comparison.of_profiles(measured.name, reference.name, found)


def _compared_profiles(comparison: Comparison, measured: ResolvedProfile, reference: ResolvedProfile) -> dict[str, Any]:
    def about(resolved: ResolvedProfile) -> dict[str, Any]:
        sizing = size_if_known(resolved)
        return {
            "name": resolved.name,
            "path": str(resolved.path),
            "tiers": as_data(sizing)["tiers"] if sizing else None,
        }

    return {
        "compared_profiles": {comparison.measured: about(measured), comparison.reference: about(reference)},
        "profile_differences": {key: list(values) for key, values in (comparison.differences or {}).items()},
    }


def _caveats(resolved: ResolvedProfile, workload: Workload) -> list[str]:
    """Caveats that follow from the profile, the workload and the load of the machine."""
    caveats = []
    if resolved.profile.engine.kind == "embedded":
        caveats.append("the embedded engine is a reference implementation: compare the arms with each other only")
    elif runs_on_cpu(resolved.profile):
        caveats.append("vLLM computes on a CPU: the speed-up on a GPU is different")
    if not has_prefix_caching(resolved.profile):
        caveats.append("the engine's own prefix cache is off, so the baseline computes the whole of every prompt")
    sizing = size_if_known(resolved)
    if sizing is not None and sizing.host.token_count < workload.working_set_tokens:
        holds = f"G2 holds {sizing.host.token_count} tokens"
        caveats.append(f"{holds}, less than the working set of {workload.working_set_tokens}")
    load, cpu_count = load_average() or 0.0, usable_cpu_count()
    if load > cpu_count:
        caveats.append(f"the machine was busy: load {load:.1f} on {cpu_count} cores")
    return caveats
