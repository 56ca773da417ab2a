"""`kvbm stop`: ends runs as Ctrl-C does, and returns when all their processes have ended.

The launcher gets SIGTERM, waits for the engine and kills it at the deadline. If the launcher hangs, `kvbm stop` kills
it; then its guard process removes what is left. Processes that were stopped (SIGSTOP, Ctrl-Z) are continued.

Exit codes: 0 if all have ended, KILLED if one had to be killed at its deadline, STILL_RUNNING if one still runs.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbm.errors import EnvironmentProblem, UsageError, reason_of
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.runs.locks import locked
from kvbm_cli.runs.run_directory import EngineRun, Runs, write_stop_timeout
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.runs.status import log_paths, names, warn_of_unreadable
from kvbm_cli.terminal.console import print_data, print_json, print_note, stopped_text
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.show_error import show_warning

KILLED = 3
STILL_RUNNING = 1
POLL_S = 0.1
NOTE_TIMEOUT_S = 1.0  # for a launcher to record that it was signalled
RUNNING = (RunState.STARTING, RunState.HEALTHY)
LINGER_S = 3.0  # for a launcher that has ended its engine to write to a slow terminal
GRACE_S = 15.0  # after the deadline, for the launcher and its guard to kill and to remove


@dataclass(frozen=True, slots=True)
class StoppedRun:
    run: EngineRun
    took_s: float
    has_ended: bool
    exit_code: int | None

    @property
    def was_killed(self) -> bool:
        return self.exit_code is None or self.exit_code == 128 + signal.SIGKILL

    def text(self) -> str:
        name = self.run.facts.name
        if not self.has_ended:
            return f"{name} is still running after {self.took_s:.1f} s"
        return stopped_text(name, self.took_s, was_killed=self.was_killed)

    def as_data(self) -> dict[str, Any]:
        return {
            "run": self.run.facts.name,
            "has_ended": self.has_ended,
            "was_killed": self.was_killed,
            "exit_code": self.exit_code,
            "took_s": round(self.took_s, 3),
        }


def stop_runs(reference: str | None, *, every: bool, timeout_s: float | None, as_json: bool) -> int:
    """Returns the exit code. Raises UsageError if `reference` is ambiguous, EnvironmentProblem if it cannot signal."""
    every_run = Runs.of_user()
    warn_of_unreadable(every_run)
    runs = _select(every_run, reference, every=every)
    _require_visible(runs)
    stopped = _stop(runs, timeout_s)
    if as_json:
        print_json([one.as_data() for one in stopped])
    else:
        for one in stopped:
            print_data(one.text())
    if not all(one.has_ended for one in stopped):
        return STILL_RUNNING
    return KILLED if any(one.was_killed for one in stopped) else 0


def _select(runs: Runs, reference: str | None, *, every: bool) -> list[EngineRun]:
    if every and reference is not None:
        raise UsageError("`--all` stops every engine and cannot be combined with a name", hint="omit one of them")
    found = runs.find(reference, ended=False) or runs.with_leftovers(reference)
    if len(found) > 1 and not every:
        listed = ", ".join(f"`{name}`" for name in names(found))
        raise UsageError(f"several engines are running: {listed}", hint="name one of them, or use `kvbm stop --all`")
    if not found:
        print_note(f"{reference} has already ended" if reference is not None else "no engine is running")
    return found


def _require_visible(runs: Sequence[EngineRun]) -> None:
    for run in runs:
        if run.is_elsewhere:
            facts = run.facts
            message = f"`{facts.name}` runs on {facts.launcher.host} or in another container"
            raise EnvironmentProblem(message, hint=f"run `kvbm stop {facts.name}` there")


def _stop(runs: Sequence[EngineRun], timeout_s: float | None) -> list[StoppedRun]:
    """Stops all in parallel. Does not signal a run that is already stopping: a second signal would kill it."""
    started = time.monotonic()
    with ProgressDisplay("stopping") as display:
        signalled = _signal_all(runs, started, timeout_s)
        return [_wait(run, started, timeout_s, display, is_signalled=run in signalled) for run in runs]


def _signal_all(runs: Sequence[EngineRun], started: float, timeout_s: float | None) -> list[EngineRun]:
    """Signals the launchers that are not stopping yet. Returns their runs when they have recorded it."""
    with contextlib.ExitStack() as locks:
        for run in runs:
            with contextlib.suppress(OSError):  # removed a moment ago
                locks.enter_context(locked(run.path))  # other `kvbm stop` commands signal nothing in the meantime
        for run in runs:
            if run.has_leftovers():
                _continue_processes(run)  # its guard then removes them
        running = [run for run in runs if run.again().state in RUNNING]
        for run in running:
            if timeout_s is not None:
                _request_timeout(run, timeout_s)
            _signal(run, signal.SIGTERM)
            _signal(run, signal.SIGCONT)  # a stopped launcher handles no signal
        while any(run.again().state in RUNNING for run in running) and time.monotonic() < started + NOTE_TIMEOUT_S:
            time.sleep(POLL_S / 4)
    return running


def _request_timeout(run: EngineRun, timeout_s: float) -> None:
    """Only warns if the disk is full: the engine must still be stopped."""
    try:
        write_stop_timeout(run, timeout_s)
    except OSError as error:
        reason = reason_of(error)
        show_warning(f"cannot pass `--timeout` to `{run.facts.name}`: {reason}; the timeout of its profile applies")


def _signal(run: EngineRun, number: signal.Signals) -> None:
    try:
        run.facts.launcher.signal(number)
    except PermissionError:
        hint = "stop it as the user who started it"
        raise EnvironmentProblem(f"`{run.facts.name}` belongs to another user", hint=hint) from None


def _wait(
    run: EngineRun, started: float, timeout_s: float | None, display: ProgressDisplay, *, is_signalled: bool
) -> StoppedRun:
    """Waits until the launcher and its processes have ended. After the deadline, kills the launcher and the engine.

    A launcher that another command signalled does not know this `timeout_s`: it gets a second signal when it is over.
    """
    log = EngineLog(list(log_paths(run).values())[-1], 0).from_here()
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
        display.report(": ".join(filter(None, (run.facts.name, log.phase()))))
        time.sleep(POLL_S)
    now = run.again()
    return StoppedRun(now, time.monotonic() - started, now.has_ended(), now.facts.exit_code)


def _continue_processes(run: EngineRun) -> None:
    for process in run.facts.processes.values():
        with contextlib.suppress(PermissionError):
            process.signal(signal.SIGCONT)
