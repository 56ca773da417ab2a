"""`kvbm stop`: ends runs as Ctrl-C does, and returns when all their processes have ended.

The launcher gets SIGTERM, waits for the engine and kills it at the deadline. If the launcher hangs, `kvbm stop` kills
it; then its guard process removes what is left. Processes that were stopped (SIGSTOP, Ctrl-Z) are continued.

A run whose run.json cannot be read, or names another launcher, is stopped too, by the process that holds and names its
lock. Processes that write to the log of a run without a launcher are named and left.

Exit codes: 0 if all have ended, KILLED if one had to be killed at its deadline, STILL_RUNNING if one still runs, or may
still run.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbm.errors import EnvironmentProblem, EnvironmentProblems, UsageError, reason_of
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.runs.locks import locked
from kvbm_cli.runs.run_directory import LOCK, EngineRun, Runs, UnreadableRun, write_stop_timeout
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.system.open_files import files_by_writer
from kvbm_cli.system.process_identity import descendants
from kvbm_cli.terminal.console import print_data, print_json, print_note, stopped_text
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.show_error import show_kvbm_error, show_warning

Problems = dict[str, EnvironmentProblem]  # by the name of a run: why it cannot be stopped

KILLED = 3
STILL_RUNNING = 1
POLL_S = 0.1
NOTE_TIMEOUT_S = 1.0  # for a launcher to record that it was signalled
RUNNING = (RunState.STARTING, RunState.HEALTHY)
LINGER_S = 10.0  # for a launcher that has ended its engine: its terminal or the machine may be slow
UNKNOWN_TIMEOUT_S = 60.0  # for the engine of a run whose description cannot be read
GRACE_S = 15.0  # after the deadline, for the launcher and its guard to kill and to remove


@dataclass(frozen=True, slots=True)
class StoppedRun:
    name: str
    took_s: float
    has_ended: bool
    exit_code: int | None

    @property
    def was_killed(self) -> bool:
        return self.exit_code is None or self.exit_code == 128 + signal.SIGKILL

    def text(self) -> str:
        if not self.has_ended:
            return f"{self.name} is still running after {self.took_s:.1f} s"
        return stopped_text(self.name, self.took_s, was_killed=self.was_killed)

    def as_data(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "has_ended": self.has_ended,
            "was_killed": self.was_killed,
            "exit_code": self.exit_code,
            "took_s": round(self.took_s, 3),
        }


def stop_runs(reference: str | None, *, every: bool, timeout_s: float | None, as_json: bool) -> int:
    """Return the exit code. What cannot be stopped is named, and the rest is stopped. Raises UsageError if `reference`
    is ambiguous."""
    runs, unreadable = _select(Runs.of_user(), reference, every=every)
    selected: list[EngineRun | UnreadableRun] = [*runs, *unreadable]
    problems = {run.name: why for run in selected if (why := _obstacle(run)) is not None}
    stopped = _stop(
        [run for run in runs if run.name not in problems],
        [run for run in unreadable if run.name not in problems],
        timeout_s,
        problems,
    )
    left = _left(reference, 0.0 if problems else LINGER_S)
    if not (runs or unreadable or left):
        print_note(f"{reference} has already ended" if reference is not None else "no engine is running")
    if as_json:
        print_json([one.as_data() for one in stopped])
    else:
        for one in stopped:
            print_data(one.text())
    found_problems = [*problems.values(), *left]
    if found_problems:
        show_kvbm_error(found_problems[0] if len(found_problems) == 1 else EnvironmentProblems(found_problems))
    if found_problems or not all(one.has_ended for one in stopped):
        return STILL_RUNNING
    return KILLED if any(one.was_killed for one in stopped) else 0


def _select(runs: Runs, reference: str | None, *, every: bool) -> tuple[list[EngineRun], list[UnreadableRun]]:
    """Return the runs to stop, and those of which the description cannot be read."""
    if every and reference is not None:
        raise UsageError("`--all` stops every engine and cannot be combined with a name", hint="omit one of them")
    unreadable = [run for run in runs.unreadable() if reference in (None, run.name, run.name.rpartition("-")[0])]
    for run in unreadable:
        if run.has_launcher is False:
            show_warning(run.problem())
    alive = [run for run in unreadable if run.has_launcher is not False]
    try:
        found = runs.find(reference, ended=False) or runs.with_leftovers(reference)
    except UsageError:
        if not unreadable:
            raise
        found = []
    running: list[EngineRun | UnreadableRun] = [*found, *alive]
    if len(running) > 1 and not every:
        listed = ", ".join(f"`{run.name}`" for run in running)
        raise UsageError(f"several engines are running: {listed}", hint="name one of them, or use `kvbm stop --all`")
    return found, alive


def _left(reference: str | None, timeout_s: float) -> list[EnvironmentProblem]:
    """Return a problem for each run without a launcher of which processes are alive after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (found := _left_processes(reference)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    problems = []
    for name, pids in sorted(found.items()):
        message = f"processes of `{name}` are still running: {', '.join(map(str, sorted(pids)))}"
        hint = f"check them with `ps -fp {','.join(map(str, sorted(pids)))}`, and end them with `kill PID`"
        problems.append(EnvironmentProblem(message, hint=hint))
    return problems


def _left_processes(reference: str | None) -> dict[str, set[int]]:
    """Return the processes that write to the lock or a log of a run without a launcher, by the name of the run."""
    runs = Runs.of_user()
    living = {run.name: run.facts.launcher.pid for run in runs.living()}
    found: dict[str, set[int]] = {}
    for pid, path in files_by_writer():
        name = path.parent.name
        is_mark = path.parent.parent == runs.directory and (path.name == LOCK or path.suffix == ".log")
        if is_mark and name not in living and reference in (None, name, name.rpartition("-")[0]):
            found.setdefault(name, set()).add(pid)
    if not found:
        return {}
    others = {pid for launcher in living.values() for pid in descendants(launcher)}  # `--log` may name any log
    return {name: pids - others for name, pids in found.items() if pids - others}


def _obstacle(run: EngineRun | UnreadableRun) -> EnvironmentProblem | None:
    """Return why a run cannot be stopped from here. The launcher of one that cannot be read must hold the lock that
    names it."""
    launcher = run.launcher
    if isinstance(run, EngineRun) and not run.is_elsewhere:
        return None
    if launcher is not None and not launcher.is_here():
        message = f"`{run.name}` runs on {launcher.host} or in another container"
        return EnvironmentProblem(message, hint=f"run `kvbm stop {shlex.quote(run.name)}` there")
    assert isinstance(run, UnreadableRun), "a run that is elsewhere has its launcher there"
    if run.has_launcher and launcher is not None and launcher.is_alive():
        return None
    hint = "find its launcher with `pgrep -af 'kvbm serve'`, and stop it with `kill PID`"
    return EnvironmentProblem(f"cannot stop `{run.name}`: {run.problem()}", hint=hint)


def _stop(
    runs: Sequence[EngineRun],
    unreadable: Sequence[UnreadableRun],
    timeout_s: float | None,
    problems: Problems,
) -> list[StoppedRun]:
    """Stop all in parallel. Does not signal a run that is already stopping: a second signal would kill it."""
    started = time.monotonic()
    with ProgressDisplay("stopping") as display:
        signalled = _signal_all(runs, started, timeout_s, problems)
        found = [run for run in unreadable if _signal_launcher(run, timeout_s, problems)]
        stopped = [
            _wait(run, started, timeout_s, display, is_signalled=run in signalled)
            for run in runs
            if run.name not in problems
        ]
        return [*stopped, *(_wait_unreadable(run, started, timeout_s, display) for run in found)]


def _signal_launcher(run: EngineRun | UnreadableRun, timeout_s: float | None, problems: Problems) -> bool:
    """Tell the launcher to stop its engine. Return False, with the reason in `problems`, if that is not possible."""
    if timeout_s is not None:
        _request_timeout(run, timeout_s)
    try:
        _signal(run, signal.SIGTERM)
        _signal(run, signal.SIGCONT)  # a stopped launcher handles no signal
    except EnvironmentProblem as problem:
        problems[run.name] = problem
        return False
    return True


def _wait_unreadable(
    run: UnreadableRun, started: float, timeout_s: float | None, display: ProgressDisplay
) -> StoppedRun:
    """Wait like `_wait` once the launcher, which was signalled, has written the description of the run again. If it
    does not, kills it after the deadline; its guard then ends the engine."""
    assert run.launcher is not None, f"{run.name} has no known launcher"
    deadline = started + (UNKNOWN_TIMEOUT_S if timeout_s is None else timeout_s) + GRACE_S
    is_killed = False
    while True:
        is_alive = run.launcher.is_alive()  # before the description is read for the last time
        if isinstance(now := run.again(), EngineRun):
            return _wait(now, started, timeout_s, display, is_signalled=True)
        is_late = time.monotonic() > deadline
        if not is_alive or (is_late and is_killed):
            return StoppedRun(run.name, time.monotonic() - started, not is_alive, None if is_killed else 0)
        if is_late:
            run.launcher.signal(signal.SIGKILL)
            is_killed, deadline = True, time.monotonic() + GRACE_S
        display.report(run.name)
        time.sleep(POLL_S)


def _signal_all(
    runs: Sequence[EngineRun], started: float, timeout_s: float | None, problems: Problems
) -> list[EngineRun]:
    """Signals the launchers that are not stopping yet. Returns their runs when they have recorded it."""
    with contextlib.ExitStack() as locks:
        for run in runs:
            with contextlib.suppress(OSError):  # removed a moment ago
                locks.enter_context(locked(run.path))  # other `kvbm stop` commands signal nothing in the meantime
        for run in runs:
            if run.has_leftovers():
                _continue_processes(run)  # its guard then removes them
        running = [run for run in runs if run.again().state in RUNNING]
        running = [run for run in running if _signal_launcher(run, timeout_s, problems)]
        while any(run.again().state in RUNNING for run in running) and time.monotonic() < started + NOTE_TIMEOUT_S:
            time.sleep(POLL_S / 4)
    return running


def _request_timeout(run: EngineRun | UnreadableRun, timeout_s: float) -> None:
    """Only warns if the disk is full: the engine must still be stopped."""
    try:
        write_stop_timeout(run.path, timeout_s)
    except OSError as error:
        reason = reason_of(error)
        show_warning(f"cannot pass `--timeout` to `{run.name}`: {reason}; the timeout of its profile applies")


def _signal(run: EngineRun | UnreadableRun, number: signal.Signals) -> None:
    assert run.launcher is not None, f"{run.name} has no known launcher"
    try:
        run.launcher.signal(number)
    except PermissionError:
        message = f"`{run.name}` belongs to another user"
        raise EnvironmentProblem(message, hint="stop it as the user who started it") from None


def _wait(
    run: EngineRun, started: float, timeout_s: float | None, display: ProgressDisplay, *, is_signalled: bool
) -> StoppedRun:
    """Wait until the launcher and its processes have ended. After the deadline, kills the launcher and the engine.

    A launcher that another command signalled does not know this `timeout_s`: it gets a second signal when it is over.
    """
    log = EngineLog(list(run.facts.log_paths.values())[-1], 0).from_here()
    allowed_s = run.facts.stop_timeout_s if timeout_s is None else timeout_s
    deadline = started + (allowed_s if run.is_living else 0.0) + GRACE_S
    is_killed = False
    while not (now := run.again()).has_ended():
        if not (now.is_living or now.has_leftovers()):  # only its launcher is left
            deadline = min(deadline, time.monotonic() + LINGER_S)
        if not is_signalled and timeout_s is not None and time.monotonic() > started + timeout_s:
            _signal(run, signal.SIGTERM)
            is_signalled = True
        if time.monotonic() > deadline and is_killed:
            break
        if time.monotonic() > deadline:
            _signal(run, signal.SIGKILL)
            _continue_processes(now)
            is_killed, deadline = True, time.monotonic() + GRACE_S
        display.report(": ".join(filter(None, (run.name, log.phase()))))
        time.sleep(POLL_S)
    now = run.again()
    return StoppedRun(now.name, time.monotonic() - started, now.has_ended(), now.facts.exit_code)


def _continue_processes(run: EngineRun) -> None:
    for process in run.facts.processes.values():
        with contextlib.suppress(PermissionError):
            process.signal(signal.SIGCONT)
