"""`kvbm try`: reads the command of an engine, chooses sizes and requests, asks once, and lets `kvbm bench` measure.

Everything of a trial is in one directory below the state directory: the profile, the workload, try.json, and the files
of the benchmark. So `--resume` needs nothing but the directory.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.config.engine import DEFAULT_KIND
from kvbm.engines.table import copy_count, kind_of, make_model
from kvbm.errors import EngineError, EnvironmentProblem, UsageError
from kvbm.host.directories import make_private_directories
from kvbm.text.outside import shown
from kvbm_cli.bench.arms import Arm, profiles_of
from kvbm_cli.bench.cells import OWN_SIZE, Overrides
from kvbm_cli.bench.command import INTERRUPTED_EXIT_CODE, BenchRequest, measure, print_summary, setup_of
from kvbm_cli.bench.engines import LOOPBACK, OpenArm
from kvbm_cli.bench.judge.verdict import VerdictLimits
from kvbm_cli.bench.result.directory import PLAN, RUNS, BenchDirectory
from kvbm_cli.bench.setup import AssumedSpeed, CellOutline, plan_of
from kvbm_cli.bench.workload.schema import as_definition
from kvbm_cli.doctor.check import CheckState
from kvbm_cli.doctor.command import quick_checks
from kvbm_cli.profile.import_command import ImportedStart, import_script, import_words
from kvbm_cli.profile.resolve import resolve_to_start
from kvbm_cli.system.filesystem import state_directory, write_new
from kvbm_cli.terminal.confirmation import is_confirmed
from kvbm_cli.terminal.console import print_data, print_json, print_note
from kvbm_cli.terminal.quantities import counted, duration
from kvbm_cli.terminal.show_error import show_warning
from kvbm_cli.try_.forecast import (
    ARMS,
    Forecast,
    forecast,
    host_capacity,
    sizes,
    spare_bytes,
    speed_of,
    total_s,
    wanted_bytes,
    with_device_size,
)
from kvbm_cli.try_.gpus import GpuState, gpus, require_free

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

TRIAL, PROFILE, WORKLOAD = "try.json", "tried.yaml", "requests.yaml"
PROVISIONAL = "tiers.host.capacity=1GiB"
LEAST_RUN_S = 60.0


@dataclass(frozen=True, slots=True)
class TryRequest:
    """The options of the command."""

    words: Sequence[str] = ()
    overrides: Sequence[str] = ()
    trace: Path | None = None
    workload: str | None = None
    minutes: float = 30.0
    resume: Path | None = None
    is_confirmed: bool = False
    as_json: bool = False


def try_engine(request: TryRequest, *, engines: OpenArm | None = None, limits: VerdictLimits | None = None) -> int:
    """Return the exit code of the verdict, as `kvbm bench`. `engines` and `limits` are for tests."""
    if request.resume is not None and (request.words or request.overrides or request.trace or request.workload):
        raise UsageError("`--resume` continues a trial as it was: leave out the command and the other options")
    if request.trace is not None and request.workload is not None:
        raise UsageError("`--trace` and `--workload` both set the requests: give one of them")
    directory = BenchDirectory(request.resume or _prepared(request))
    trial = directory.read_json(TRIAL)
    if request.resume is None and not request.is_confirmed and not is_confirmed("start?"):
        return 0
    started = time.monotonic()

    def show_result(summary: dict[str, Any]) -> None:
        trial["took_s"] = round(time.monotonic() - started)
        directory.write_json(TRIAL, trial)
        if request.as_json:
            print_json({**summary, "try": {**trial, "directory": str(directory.path)}})
        else:
            print_summary(summary, directory.path, as_json=False)
            print_data(
                f"\n{summary['verdict']}: {summary['explanation']}\n"
                f"report: {directory.path / 'report.html'}\nprofile: {trial['profile']}\n"
                f"serve with it: {trial['serve']}\n"
                f"took {duration(trial['took_s'])}; {duration(trial['announced_s'])} were announced"
            )

    words = ["kvbm", "try"]
    try:
        resume = directory.path if directory.has(PLAN) else None
        # This may start an engine that reports the size of its G1.
        setup, _, _ = setup_of(_bench_request(trial, resume=resume))
        for resolved in profiles_of(setup.comparison):
            make_model(resolved.profile, say=print_note)
        return measure(
            setup, directory, as_json=False, words=words, engines=engines, limits=limits, show_result=show_result
        )
    except KeyboardInterrupt:
        print_note(f"interrupted; this command continues: {shlex.join([*words, '--resume', str(directory.path)])}")
        return INTERRUPTED_EXIT_CODE
    except EngineError:
        for run in directory.runs() if directory.has(RUNS) else ():
            print_note(f"before the failure, {run['run']} ended after {duration(run['duration_s'])}")
        if directory.has("cells"):
            print_note("before the failure, an engine without kvbm started and answered")
        print_note(f"the logs are in {directory.path}")
        raise


def _bench_request(trial: dict[str, Any], **changes: Any) -> BenchRequest:
    given = {
        "profiles": [trial["profile"]],
        "overrides": trial["overrides"],
        "workloads": [trial["workload"]],
        "pressure": trial["pressure"],
        "schedule": Overrides(pairs=trial["pairs"], duration_s=trial["duration_s"]),
        "has_floor": False,
    }
    return BenchRequest(**{**given, **changes})


def _prepared(request: TryRequest) -> Path:
    """Choose everything, write it to a new directory, and say what will run."""
    start = _start(request.words)
    make_private_directories(state_directory() / "tries")
    prefix = time.strftime("%Y-%m-%dT%H-%M-%S-")
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=state_directory() / "tries"))
    profile, notes, has_tiers = _absolute(request.words[0]), list[str](), True
    if start is not None:
        profile, notes = str(directory / PROFILE), list(start.notes)
        has_tiers = "\ntiers:" in start.text or any(one.startswith("tiers.host.") for one in request.overrides)
        write_new(directory / PROFILE, start.text)
    overrides = [*([] if has_tiers else [PROVISIONAL]), *request.overrides]
    resolved = resolve_to_start(profile, overrides=overrides)
    server, engine = resolved.profile.server, resolved.profile.engine
    notes.append(f"the engines of the trial listen on {LOOPBACK} and free ports, not on {server.host}:{server.port}")
    kind = kind_of(resolved.profile)
    on_cpu = kind.traits.shares_device or kind.runs_on_cpu(resolved.profile)
    found = () if on_cpu else _free_gpus(resolved)
    _require_checks(resolved)
    g1: tuple[str, ...] = ()
    sizing = sizes(resolved, found)
    if on_cpu and engine.kind == DEFAULT_KIND and sizing is not None and sizing.device is None:
        g1 = with_device_size(sizing)
        sizing = sizes(resolve_to_start(profile, overrides=[*overrides, *g1]), found)
        notes.append(f"on a CPU, G1 is set with and without kvbm: {', '.join(g1)}")
    together = spare_bytes(resolved.profile, sizing, engine_count=ARMS)
    shares = on_cpu and together >= wanted_bytes(sizing, together) > 0
    if not has_tiers:
        alone = spare_bytes(resolved.profile, sizing, engine_count=int(on_cpu))
        capacity = host_capacity(sizing, (together if shares else alone) // copy_count(resolved.profile))
        notes.append(f"kvbm uses {capacity} of host memory")
        with open(profile, "a", encoding="utf-8") as file:
            file.write(f"\ntiers:\n  host:\n    capacity: {capacity}  # chosen by `kvbm try`\n")
    speed = speed_of(resolved.profile, found)
    chosen = forecast(speed, sizing, in_turn=not shares, minutes=request.minutes)
    given = [word for override in request.overrides for word in ("--set", override)]
    trial = {
        "profile": profile,
        "serve": shlex.join(["kvbm", "serve", "--profile", profile, *given]),
        "overrides": [*request.overrides, *g1],
        "workload": _absolute(request.workload or str(directory / WORKLOAD)),
        "pressure": OWN_SIZE,
        "pairs": chosen.pairs,
        "is_given": request.workload is not None or request.trace is not None,
        "duration_s": None,
    }
    if request.workload is None:
        write_new(directory / WORKLOAD, _workload_text(request.trace, chosen))
        if request.trace is None and chosen.pressure is not None:
            trial["pressure"] = f"{chosen.pressure:g}"
            notes += [] if chosen.note is None else [chosen.note]
    _announce(
        trial, speed, notes, directory, minutes=request.minutes, reads_g1=bool(found) and trial["pressure"] != OWN_SIZE
    )
    return directory


def _announce(
    trial: dict[str, Any], speed: AssumedSpeed, notes: Sequence[str], directory: Path, *, minutes: float, reads_g1: bool
) -> None:
    """Write try.json, and say what will run. With `reads_g1`, one more engine reports the size of G1."""
    setup, _, _ = setup_of(_bench_request(trial, pressure=OWN_SIZE))  # which is about the final one
    plan = plan_of(setup)
    starts, groups = plan["starts"] + reads_g1, [len(setup.groups(cell)) for cell in setup.cells]
    times = [CellOutline.of(cell, speed).duration_s for cell in setup.cells]
    if trial["is_given"]:  # chosen requests are all sent: without the last ones, no prefix would come again
        trial["duration_s"] = max(LEAST_RUN_S, (60 * minutes - total_s(speed, starts, 0)) / sum(groups))
        times = [min(trial["duration_s"], time_s) for time_s in times]
    runs_s = sum(time_s * count for time_s, count in zip(times, groups, strict=True))
    trial |= {"starts": starts, "announced_s": round(total_s(speed, starts, runs_s))}
    BenchDirectory(directory).write_json(TRIAL, trial)
    for note in notes:
        print_note(f"note: {note}")
    count = sum(cell["most_requests"] for cell in plan["cells"])
    print_note(
        f"measures {', '.join(plan['arms'])} with {counted(count, 'request')} each: {counted(starts, 'engine start')}, "
        f"about {duration(trial['announced_s'])}; everything is kept in {directory}"
    )


def _start(words: Sequence[str]) -> ImportedStart | None:
    """Read the command, the script or the manifest; None for a profile. UsageError without one."""
    if not words:
        hint = "put `kvbm try --` in front of the command that starts your engine"
        raise UsageError("`kvbm try` requires the command that starts an engine", hint=hint)
    first, rest = words[0], words[1:]
    is_file = os.path.isfile(os.path.expanduser(first))
    if rest and is_file and not os.access(first, os.X_OK):
        raise UsageError(f"`{shown(rest[0])}` after `{shown(first)}`: options of `kvbm try` come first")
    if rest:
        return import_words(words)
    return import_script(first) if is_file else None


def _absolute(name: str) -> str:
    """Return the path of a file for a later command in another directory; a shipped name as it is."""
    return os.path.abspath(name) if os.path.isfile(name) else name


def _free_gpus(resolved: ResolvedProfile) -> tuple[GpuState, ...]:
    """Return the GPUs that the engine takes. EnvironmentProblem if one is in use."""
    visible = resolved.profile.engine.environment.get("CUDA_VISIBLE_DEVICES")
    found = gpus(visible)[: Arm("", "kvbm", resolved).ranks]
    require_free(found, getattr(resolved.profile.engine.arguments, "gpu_memory_utilization", None))
    return found


def _require_checks(resolved: ResolvedProfile) -> None:
    """Raise EnvironmentProblem for what doctor refuses, and print its warnings."""
    for check in quick_checks(resolved):
        if check.state is CheckState.FAILURE:
            raise EnvironmentProblem(f"{check.name}: {check.finding}", hint=check.remedy)
        if check.state is CheckState.WARNING:
            show_warning(f"{check.name}: {check.finding}")


def _workload_text(trace: Path | None, chosen: Forecast) -> str:
    """Return a workload file; JSON is YAML."""
    content = as_definition(chosen.workload)
    if trace is not None:
        content = {"name": "trace", "kind": "trace", "file": os.path.abspath(trace)}
    return json.dumps({name: value for name, value in content.items() if value is not None}, indent=2) + "\n"
