"""`kvbm bench`: runs one experiment and prints its result. Only the table or the JSON goes to stdout."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

from kvbm.engines.table import engine_version, make_model
from kvbm.errors import KvbmError, UsageError
from kvbm.text.outside import shown, without_secret_values, without_secrets
from kvbm_cli.bench.arms import Comparison, comparison_of, lacking_here, profiles_of, require_startable
from kvbm_cli.bench.cells import Overrides, cells_of, parse_pressures, parse_sweep, warnings_of
from kvbm_cli.bench.engines import ArmEngines, OpenArm
from kvbm_cli.bench.experiment import run_experiment
from kvbm_cli.bench.exports.bench_serve import BENCH_SERVE, bench_serve_result
from kvbm_cli.bench.exports.lmbenchmark import csv_files_of
from kvbm_cli.bench.exports.replay import replay_lines
from kvbm_cli.bench.find_limit import find_limits, require_searchable, show_limits
from kvbm_cli.bench.judge.limit import Condition, parse_conditions
from kvbm_cli.bench.judge.verdict import DEFAULT_LIMITS, Verdict, VerdictLimits
from kvbm_cli.bench.result.arm_result import ArmResult, arm_results
from kvbm_cli.bench.result.cost import read_prices
from kvbm_cli.bench.result.directory import LIMIT, SUMMARY, BenchDirectory, writing
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.setup import (
    ASSUMED_G1_TOKENS,
    Setup,
    caveats_of,
    is_on_gpu,
    missing_runs,
    planned_runs,
    show_plan,
)
from kvbm_cli.bench.show.page import build_report
from kvbm_cli.bench.show.terminal import WIDTH, BenchProgress, show
from kvbm_cli.bench.summary import incomplete_summary, interrupted_summary, summarise
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.bench.workload.plan import PATHS
from kvbm_cli.bench.workload.schema import Workload
from kvbm_cli.profile.size import size_if_known
from kvbm_cli.system.filesystem import write_atomically, write_new
from kvbm_cli.system.machine import machine, versions
from kvbm_cli.terminal.console import print_json, print_note
from kvbm_cli.terminal.show_error import show_warning

INTERRUPTED_EXIT_CODE = 130
SURROUNDINGS = ("command", "profile", "machine", "versions", "prices")
UNKNOWN_SURROUNDINGS = "summary.json was missing: the profile, the machine and the versions are unknown"
DEFAULT_WORKLOAD = "conversations"
# Of a request: the flags of fields with another name, and the fields that do not change what is sent.
FLAGS = {"profiles": "--profile", "overrides": "--set", "workloads": "--workload", "duration_s": "--duration"}
NOT_REPEATED = ("schedule", "output", "resume", "has_floor", "is_dry_run", "as_json")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The options of the command."""

    profiles: Sequence[str] = ()
    overrides: Sequence[str] = ()
    compare: Sequence[str] = ()
    ca_file: Path | None = None
    workloads: Sequence[str] = ()
    pressure: str | None = None
    find_limit: str | None = None
    sweep: str | None = None
    price: Path | None = None
    schedule: Overrides = field(default_factory=Overrides)
    output: Path | None = None
    resume: Path | None = None
    has_floor: bool = True
    is_dry_run: bool = False
    as_json: bool = False

    def words(self) -> list[str]:
        """Return the command line that sends the same requests; without the directory of the output."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in NOT_REPEATED}
        words: list[str] = []
        for name, values in {**given, **asdict(self.schedule)}.items():
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            for value in values if isinstance(values, list | tuple) else [values]:
                words += [] if value is None else [flag, without_secrets(f"{value}")]
        return ["kvbm", "bench", *words, *(() if self.has_floor else ("--no-floor",))]


def bench(request: BenchRequest) -> int:
    """Resolve the arms and the workloads, then measure. Returns the exit code of the verdict."""
    if request.schedule.rate is not None and request.schedule.concurrency is not None:
        raise UsageError("`--rate` sends at fixed times and `--concurrency` waits for answers: give one of them")
    if request.schedule.ramp_to is not None and request.schedule.rate is None:
        raise UsageError("`--ramp-to` is the rate at the end of a run, and requires `--rate`, the one at its start")
    if request.sweep is not None and (request.schedule.rate or request.schedule.concurrency):
        raise UsageError("`--sweep` sets the rate or the concurrency: leave out `--rate` and `--concurrency`")
    if request.schedule.endpoint not in (None, *PATHS):
        raise UsageError(f"`--endpoint` is one of {', '.join(PATHS)}, not `{shown(request.schedule.endpoint)}`")
    if request.output is not None and request.resume is not None:
        raise UsageError("`--output` names a new directory and `--resume` an existing one: give one of them")
    if request.find_limit is not None and request.resume is not None:
        raise UsageError("`--find-limit` cannot continue an interrupted search: leave out `--resume`")
    if request.find_limit is not None and request.price is not None:
        raise UsageError("`--price` is for the cost of a benchmark, and `--find-limit` measures none: leave it out")
    prices = None if request.price is None else read_prices(request.price)
    conditions = None if request.find_limit is None else parse_conditions(request.find_limit)
    setup, first_starts, notes = setup_of(request)
    if conditions is not None:
        require_searchable(setup)
    if request.is_dry_run:
        return show_plan(setup, as_json=request.as_json, first_starts=first_starts, notes=notes)
    for resolved in profiles_of(setup.comparison):
        make_model(resolved.profile, say=print_note)
    directory = BenchDirectory.open(request.resume) if request.resume else BenchDirectory.create(request.output)
    if conditions is not None:
        return search(setup, conditions, directory, as_json=request.as_json, words=request.words())
    return measure(setup, directory, as_json=request.as_json, words=request.words(), prices=prices)


def setup_of(request: BenchRequest) -> tuple[Setup, int, list[str]]:
    """Resolve the arms and the workloads, and check that everything can start. KvbmError for the first problem.

    Of a dry run, also returns the number of engines that start only to report the size of G1, and what the plan assumes
    or this machine lacks.
    """
    comparison = comparison_of(
        request.profiles, request.overrides, request.compare, request.ca_file, has_floor=request.has_floor
    )
    workloads = [request.schedule.applied(one) for one in _workloads(request, comparison)]
    if (sweep := parse_sweep(request.sweep)) is not None:
        workloads = sweep.applied(workloads)
    for warning in [one for workload in workloads for one in warnings_of(workload)]:
        show_warning(warning)
    notes = lacking_here(comparison) if request.is_dry_run else []
    if not request.is_dry_run:
        require_startable(comparison)
    pressures = parse_pressures(request.pressure, is_on_gpu=is_on_gpu(comparison))
    scales = pressures.scales(workloads)
    g1_tokens = _planned_g1(request.resume) if request.resume is not None else None
    g1_tokens = g1_tokens or _g1_tokens(comparison, must_know=scales and not request.is_dry_run)
    is_assumed = request.is_dry_run and scales and g1_tokens is None and not comparison.is_of_urls
    if is_assumed:
        g1_tokens = ASSUMED_G1_TOKENS
        notes.append(f"the plan assumes that G1 holds {g1_tokens:,} tokens; the first engine reports it when it starts")
    elif scales and g1_tokens is None and pressures.is_auto:
        print_note("the engine does not report the size of G1, so the workload keeps its own size")
    return Setup(comparison, cells_of(workloads, pressures, g1_tokens)), int(is_assumed), notes


def _workloads(request: BenchRequest, comparison: Comparison) -> list[Workload]:
    measured = comparison.measured.resolved
    named = measured.profile.bench.workload if measured else None
    return [load_workload(one) for one in request.workloads or (named or DEFAULT_WORKLOAD,)]


def _planned_g1(directory: Path) -> int | None:
    """Return what the interrupted benchmark planned with: the next start may report a few blocks more."""
    cells = Results.read(BenchDirectory.open(directory)).plan["cells"]
    return next((cell.get("g1_tokens") for cell in cells), None)


def _g1_tokens(comparison: Comparison, *, must_know: bool) -> int | None:
    """Return what G1 of the first reference holds. With `must_know`, its engine is started if only it knows."""
    arm = comparison.references[0] if comparison.references else comparison.measured
    if arm.resolved is not None:
        sizing = size_if_known(arm.resolved)
        if sizing is not None and sizing.device is not None:
            return sizing.device.token_count
        if not must_know:
            return None
        print_note(f"starting {arm.name} to read the size of its G1")
    engines = ArmEngines(comparison)
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as log, engines(arm.name, Path(log), None) as engine:
        return engine.control().g1_tokens()


def measure(
    setup: Setup,
    directory: BenchDirectory,
    *,
    as_json: bool,
    words: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    engines: OpenArm | None = None,
    limits: VerdictLimits | None = None,
    show_result: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Measure, write and print the result; returns the exit code of the verdict.

    `words` are the command line. `engines` and `limits` are for tests. `show_result` prints the summary instead.
    """
    surroundings = {"command": list(words), **_surroundings(setup.comparison), "prices": prices}

    def note_end(reason: str) -> None:
        with contextlib.suppress(OSError):  # the command ends as it would on a disk that is not full
            directory.write_json(SUMMARY, interrupted_summary(reason, surroundings))

    with _interruptible(), contextlib.closing(directory):
        try:
            with BenchProgress() as progress, writing(directory.path):
                run_experiment(setup, engines or ArmEngines(setup.comparison), directory, progress)
            results = Results.read(directory)
            caveats = caveats_of(setup)
            summary = summarise(results, surroundings=surroundings, caveats=caveats, limits=limits or DEFAULT_LIMITS)
        except KeyboardInterrupt:
            note_end("interrupted")
            again = shlex.join([*words, "--resume", str(directory.path)])
            print_note(f"interrupted; this command continues: {again}")
            return INTERRUPTED_EXIT_CODE
        except UsageError:  # wrong options leave the files of an earlier run as they are
            raise
        except KvbmError as error:
            note_end(error.message)
            raise
    try:
        write_results(directory, results, summary)
    finally:  # the result of minutes of measuring is printed even if it cannot be written
        if show_result is None:
            print_summary(summary, directory.path, as_json=as_json)
        else:
            show_result(summary)
    return Verdict(summary["verdict"]).exit_code


def search(
    setup: Setup,
    conditions: tuple[Condition, ...],
    directory: BenchDirectory,
    *,
    as_json: bool,
    words: Sequence[str] = (),
    engines: OpenArm | None = None,
) -> int:
    """Find the limit of every arm; write limit.json and print it.

    `words` and `engines`: see `measure`.
    """
    with _interruptible(), contextlib.closing(directory):
        try:
            with BenchProgress() as progress, writing(directory.path):
                found = find_limits(setup, conditions, engines or ArmEngines(setup.comparison), directory, progress)
        except KeyboardInterrupt:
            print_note(f"interrupted; the probes that have ended are in {directory.path}")
            return INTERRUPTED_EXIT_CODE
        try:
            with writing(directory.path):
                directory.write_json(LIMIT, {**found, "command": list(words), **_surroundings(setup.comparison)})
        finally:
            show_limits(found, directory.path, as_json=as_json)
    return 0


def write_results(directory: BenchDirectory, results: Results, summary: dict[str, Any]) -> None:
    """Write summary.json, the files for other tools, and report.html."""
    with writing(directory.path):
        directory.write_json(SUMMARY, summary)
        write_exports(directory.path, results)
        build_report(directory, results, summary)


def report(path: Path, *, as_json: bool, replay: Path | None = None) -> int:
    """`kvbm bench report DIR`: compute the summary of the runs that have ended again, and everything that follows.

    `replay` is a new file for a trace of the requests.

    The surroundings and their caveats are only in summary.json. A process that was killed leaves none.
    """
    directory = BenchDirectory.open(path)
    results = Results.read(directory)
    if replay is not None:
        write_replay(replay, results)
    if directory.has(LIMIT):
        return report_limit(directory, as_json=as_json)
    old = directory.read_json(SUMMARY) if (path / SUMMARY).exists() else {"caveats": [UNKNOWN_SURROUNDINGS]}
    kept = {name: old.get(name) for name in SURROUNDINGS}
    summary = summarise(results, surroundings=kept, caveats=old.get("caveats", ()))
    if missing := missing_runs(results):
        summary = incomplete_summary(summary, missing=len(missing), planned=len(planned_runs(results)))
    try:
        write_results(directory, results, summary)
    finally:
        print_summary(summary, path, as_json=as_json)
    return Verdict(summary["verdict"]).exit_code


def report_limit(directory: BenchDirectory, *, as_json: bool) -> int:
    """`kvbm bench report DIR` of a search: print its result again."""
    try:
        show_limits(directory.read_json(LIMIT), directory.path, as_json=as_json)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{directory.path} has no result of `--find-limit` that can be read: {error!r}") from None
    return 0


def write_replay(file: Path, results: Results) -> None:
    """Write the requests of the only cell as a trace. UsageError if there are several, or the file exists."""
    if len(results.plan["cells"]) != 1 or len(results.cells) != 1:
        raise UsageError(
            "`--replay` writes the requests of one workload at one load and pressure, and there are others"
        )
    write_new(file, "".join(replay_lines(results.cells[0].plan)))


def print_summary(summary: dict[str, Any], path: Path, *, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        print_json(summary)
    else:
        show(summary, Console(width=WIDTH, markup=False), directory=path)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt like Ctrl-C, unless they are ignored."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _surroundings(comparison: Comparison) -> Mapping[str, Any]:
    found: dict[str, Any] = {"profile": None, "machine": machine(), "versions": versions()}
    measured = comparison.measured.resolved
    if measured is not None:
        found["profile"] = {"name": measured.name, **measured.profile.model_dump(mode="json")}
        engine = found["profile"]["engine"]
        engine["environment"] = without_secret_values(engine["environment"])  # results are passed on
        found["versions"] |= engine_version(measured.profile)
    return found


def write_exports(directory: Path, results: Results) -> list[Path]:
    """Write exports/<arm>/<cell>/ for all arms and cells with a run that has ended; return the files.

    `directory` is the directory of the experiment that `results` were read from. EnvironmentProblem if a file cannot be
    written.
    """
    return [path for result in arm_results(results) for path in _write_files(directory / "exports", result)]


def _write_files(exports: Path, result: ArmResult) -> list[Path]:
    folder = exports / result.arm / result.cell.name
    texts = {
        BENCH_SERVE: json.dumps(bench_serve_result(result), allow_nan=False) + "\n",
        **csv_files_of(result),
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text)
    return [folder / name for name in texts]
