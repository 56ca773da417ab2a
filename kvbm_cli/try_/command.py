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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.config.document import entry_at, parse_document
from kvbm.config.engine import DEFAULT_KIND, ENGINES
from kvbm.config.sizes import format_size
from kvbm.engines.table import kind_of, make_model
from kvbm.errors import EngineError, EnvironmentProblem, UsageError
from kvbm.host.directories import make_private_directories
from kvbm.text.outside import shown
from kvbm_cli.bench.arms import Arm, profiles_of
from kvbm_cli.bench.cells import OWN_SIZE, Overrides
from kvbm_cli.bench.command import INTERRUPTED_EXIT_CODE, BenchRequest, measure, print_summary, setup_of
from kvbm_cli.bench.engines import LOOPBACK, OpenArm
from kvbm_cli.bench.judge.verdict import VerdictLimits
from kvbm_cli.bench.result.directory import LOCK, PLAN, RUNS, BenchDirectory
from kvbm_cli.bench.setup import AssumedSpeed, CellOutline, plan_of
from kvbm_cli.bench.workload.schema import as_definition
from kvbm_cli.doctor.command import quick_checks
from kvbm_cli.profile.auto_capacity import with_capacities
from kvbm_cli.profile.import_command import import_script, import_words, notes_of
from kvbm_cli.profile.import_profile import Imported
from kvbm_cli.profile.resolve import resolve_to_start
from kvbm_cli.profile.size import order_checks, size_if_known
from kvbm_cli.runs.locks import is_locked
from kvbm_cli.system.filesystem import remove_tree, state_directory, write_new
from kvbm_cli.terminal.console import is_confirmed, print_data, print_json, print_note
from kvbm_cli.terminal.quantities import counted, duration
from kvbm_cli.terminal.show_error import show_warning
from kvbm_cli.try_.forecast import (
    MOST_MINUTES,
    Forecast,
    forecast,
    g1_and_longest,
    sizes,
    speed_of,
    total_s,
    with_device_size,
)
from kvbm_cli.try_.gpus import GpuState, gpus, require_free

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

TRIAL, PROFILE, WORKLOAD = "try.json", "tried.yaml", "requests.yaml"
LEAST_RUN_S = 60.0
KEPT_TRIALS = 20


@dataclass(frozen=True, slots=True)
class TryRequest:
    """The options of the command."""

    words: Sequence[str] = ()
    overrides: Sequence[str] = ()
    trace: Path | None = None
    workload: str | None = None
    minutes: float | None = None
    resume: Path | None = None
    is_confirmed: bool = False
    as_json: bool = False


def try_engine(request: TryRequest, *, engines: OpenArm | None = None, limits: VerdictLimits | None = None) -> int:
    """Return the exit code of the verdict, as `kvbm bench`. `engines` and `limits` are for tests."""
    if request.resume is not None and (request.words or request.overrides or request.trace or request.workload):
        raise UsageError("`--resume` continues a trial as it was: leave out the command and the other options")
    if request.trace is not None and request.workload is not None:
        raise UsageError("`--trace` and `--workload` both set the requests: give one of them")
    directory = BenchDirectory(_prepared(request) if request.resume is None else _with_trial(request.resume))
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
                f"measure again, with other options: {shlex.join(_bench_request(trial).words())}\n"
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
    directory = _new_directory()
    profile, notes = _absolute(request.words[0]), list[str]()
    if start is not None:
        profile, notes = str(directory / PROFILE), notes_of(start)
        write_new(directory / PROFILE, _with_tiers(start.text, request.overrides))
    resolved = resolve_to_start(profile, overrides=request.overrides)
    server, engine = resolved.profile.server, resolved.profile.engine
    notes.append(f"the engines of the trial listen on {LOOPBACK} and free ports, not on {server.host}:{server.port}")
    kind = kind_of(resolved.profile)
    on_cpu = kind.traits.shares_device or kind.runs_on_cpu(resolved.profile)
    found = () if on_cpu else _free_gpus(resolved)
    _require_checks(resolved)
    overrides = list(request.overrides)
    sizing = sizes(resolved, found)
    if on_cpu and engine.kind == DEFAULT_KIND and sizing is not None and sizing.device is None:
        g1 = with_device_size(sizing)
        overrides += g1
        resolved = resolve_to_start(profile, overrides=overrides)
        notes.append(f"on a CPU, G1 is set with and without kvbm: {', '.join(g1)}")
    resolved = with_capacities(resolved)
    sizing = sizes(resolved, found)
    notes += _chosen_sizes(resolved)
    for one in () if sizing is None else order_checks(resolved, sizing):
        show_warning(one.text)
    speed = speed_of(resolved.profile, found, on_cpu=on_cpu)
    g1_tokens, longest = g1_and_longest(resolved.profile, sizing)
    known, is_given = size_if_known(resolved), request.workload is not None or request.trace is not None
    reads_g1 = not is_given and (known is None or known.device is None)
    chosen = forecast(speed, g1_tokens, longest, minutes=request.minutes, first_starts=1 + reads_g1)
    given = [word for override in overrides for word in ("--set", override)]
    trial = {
        "profile": profile,
        "serve": shlex.join(["kvbm", "serve", "--profile", profile, *given]),
        "overrides": overrides,
        "workload": _absolute(request.workload or str(directory / WORKLOAD)),
        "pressure": OWN_SIZE if is_given else chosen.pressure,
        "pairs": 1 if is_given else chosen.pairs,
        "is_given": is_given,
        "reads_g1": reads_g1,
        "duration_s": None,
    }
    if request.workload is None:
        write_new(directory / WORKLOAD, _workload_text(request.trace, chosen))
    if not is_given and chosen.note is not None:
        notes.append(chosen.note)
    if reads_g1:
        notes.append(f"the plan assumes that G1 holds {g1_tokens:,} tokens; the first engine reports it")
    _announce(trial, speed, notes, directory, minutes=request.minutes or MOST_MINUTES)
    return directory


def _with_tiers(text: str, overrides: Sequence[str]) -> str:
    """Return the text of a profile with the tier that kvbm sizes, if neither it nor an override has one: host memory,
    or disk below an engine that has host memory of its own."""
    kind = entry_at(parse_document(text, label=PROFILE)[0], ("engine", "kind"))
    assert kind is not None, "an imported profile names its engine"
    tier = "disk" if ENGINES[str(kind.value)].keeps_host_memory else "host"
    if "\ntiers:" in text or any(one.startswith(f"tiers.{tier}.") for one in overrides):
        return text
    return f"{text}\ntiers:\n  {tier}:\n    capacity: auto\n"


def _chosen_sizes(resolved: ResolvedProfile) -> Iterator[str]:
    """Yield a note for each tier whose size kvbm chose."""
    tiers = resolved.profile.tiers
    for key, tier, what in (("G2", tiers.host, "host memory"), ("G3", tiers.disk, "disk")):
        if tier is not None and key in resolved.chosen:
            yield f"kvbm uses {format_size(tier.capacity_bytes or 0)} of {what}: {resolved.chosen[key]}"


def _new_directory() -> Path:
    """Make the directory of a trial. Of all but the newest KEPT_TRIALS, only the profile remains: it may be served."""
    parent = state_directory() / "tries"
    make_private_directories(parent)
    for old in sorted(parent.glob("*/"))[: 1 - KEPT_TRIALS]:  # their names begin with the time
        if not is_locked(old / LOCK):
            for path in old.iterdir():
                if path.name != PROFILE:
                    remove_tree(path) if path.is_dir() else path.unlink()
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%dT%H-%M-%S-"), dir=parent))


def _with_trial(path: Path) -> Path:
    """Return the directory of a trial to continue. UsageError if it was emptied, or is none."""
    if not (path / TRIAL).exists():
        profile = path / PROFILE
        hint = f"`kvbm try {shlex.quote(str(profile))}` measures its profile again" if profile.exists() else None
        message = f"{path} cannot be continued: it has no {TRIAL}, which only the newest {KEPT_TRIALS} trials keep"
        raise UsageError(message, hint=hint)
    return path


def _announce(
    trial: dict[str, Any], speed: AssumedSpeed, notes: Sequence[str], directory: Path, *, minutes: float
) -> None:
    """Write try.json, and say what will run."""
    setup, _, _ = setup_of(_bench_request(trial, pressure=OWN_SIZE))  # which is about the final one
    plan = plan_of(setup, first_starts=int(trial["reads_g1"]))
    starts, groups = plan["starts"], [len(setup.groups(cell)) for cell in setup.cells]
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


def _start(words: Sequence[str]) -> Imported | None:
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
        if check.state == "failure":
            text = "\n".join((f"{check.name}: {check.finding}", *check.details))
            raise EnvironmentProblem(text, hint=check.remedy)
        if check.state == "warning":
            show_warning(f"{check.name}: {check.finding}")


def _workload_text(trace: Path | None, chosen: Forecast) -> str:
    """Return a workload file; JSON is YAML."""
    content = as_definition(chosen.workload)
    if trace is not None:
        content = {"name": "trace", "kind": "trace", "file": os.path.abspath(trace)}
    return json.dumps({name: value for name, value in content.items() if value is not None}, indent=2) + "\n"
