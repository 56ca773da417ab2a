"""`kvbm stop`: ends runs as Ctrl-C would, and does not return before nothing of them is left.

The launcher gets SIGTERM, gives the engine its time and kills it at the deadline. A launcher that does not even do that
is killed, and its guard clears away. Exit codes: 0 when all have ended, KILLED when one had to be killed at its
deadline, 1 when one still lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.runs.run_directory import Run, Runs, State, ask_to_stop_within
from kvbm_cli.runs.status import log_paths, names, warn_of_unreadable
from kvbm_cli.terminal.console import print_data, print_json, print_note, stopped_text
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.show_error import show_warning

KILLED = 3
LIVES = 1
LOOK_S = 0.1
TURN_S = 1.0  # in which a launcher notes that it was signalled
RUNNING = (State.STARTING, State.HEALTHY)
GRACE_S = 15.0  # beyond the deadline: what the launcher and its guard need to kill and to clear away


@dataclass(frozen=True, slots=True)
class Stopped:
    run: Run
    took_s: float
    has_ended: bool
    exit_code: int | None

    @property
    def was_killed(self) -> bool:
        return self.exit_code is None or self.exit_code == 128 + signal.SIGKILL

    def text(self) -> str:
        name = self.run.facts.name
        if not self.has_ended:
            return f"{name} still lives after {self.took_s:.1f} s"
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
    """The exit code. UsageError if it is not clear which run is meant, EnvironmentProblem if it cannot be signalled."""
    every_run = Runs.of_user()
    warn_of_unreadable(every_run)
    runs = _meant(every_run, reference, every=every)
    _require_visible(runs)
    stopped = _stop(runs, timeout_s)
    if as_json:
        print_json([one.as_data() for one in stopped])
    else:
        for one in stopped:
            print_data(one.text())
    if not all(one.has_ended for one in stopped):
        return LIVES
    return KILLED if any(one.was_killed for one in stopped) else 0


def _meant(runs: Runs, reference: str | None, *, every: bool) -> list[Run]:
    if every and reference is not None:
        raise UsageError("`--all` stops every engine, and needs no name", hint="leave one of the two out")
    found = runs.find(reference, ended=False)
    if len(found) > 1 and not every:
        listed = ", ".join(f"`{name}`" for name in names(found))
        raise UsageError(f"more than one engine runs: {listed}", hint="name one, or `kvbm stop --all`")
    if not found:
        print_note(f"{reference} has ended already" if reference is not None else "nothing runs")
    return found


def _require_visible(runs: Sequence[Run]) -> None:
    for run in runs:
        if run.is_elsewhere:
            facts = run.facts
            message = f"`{facts.name}` runs on {facts.launcher.host}, or in another container: it cannot be signalled"
            raise EnvironmentProblem(message, hint=f"`kvbm stop {facts.name}` there")


def _stop(runs: Sequence[Run], timeout_s: float | None) -> list[Stopped]:
    """All at once. A second signal would kill: who comes while somebody else stops a run only waits with him."""
    started = time.monotonic()
    with ProgressDisplay("stopping") as display:
        signalled = _signal_all(runs, started, timeout_s)
        return [_wait(run, started, timeout_s, display, is_signalled=run in signalled) for run in runs]


def _signal_all(runs: Sequence[Run], started: float, timeout_s: float | None) -> list[Run]:
    """Signals the launchers that are not stopping yet. Returns when they have noted it, with their runs."""
    with contextlib.ExitStack() as turns:
        for run in runs:
            turns.enter_context(_turn(run))
        running = [run for run in runs if run.again().state is not State.STOPPING]
        for run in running:
            if timeout_s is not None:
                _ask_to_stop_within(run, timeout_s)
            _signal(run, signal.SIGTERM)
        while any(run.again().state in RUNNING for run in running) and time.monotonic() < started + TURN_S:
            time.sleep(LOOK_S / 4)
    return running


@contextlib.contextmanager
def _turn(run: Run) -> Iterator[None]:
    """Nobody else looks at the run's state and signals it in the meantime."""
    try:
        directory = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it has just gone
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _ask_to_stop_within(run: Run, timeout_s: float) -> None:
    """A disk that is full does not keep an engine from being stopped."""
    try:
        ask_to_stop_within(run, timeout_s)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        show_warning(f"`--timeout` cannot be told to `{run.facts.name}`: {reason}; it takes the time of its profile")


def _signal(run: Run, number: signal.Signals) -> None:
    try:
        run.facts.launcher.signal(number)
    except PermissionError:
        hint = "stop it as the user who started it"
        raise EnvironmentProblem(f"`{run.facts.name}` is another user's process", hint=hint) from None


def _wait(
    run: Run, started: float, timeout_s: float | None, display: ProgressDisplay, *, is_signalled: bool
) -> Stopped:
    """The launcher ends when the engine has; if it does not, it is killed, which the engine does not survive.

    A launcher that somebody else had told to stop knows nothing of our `timeout_s`: it is told when that is over.
    """
    log = EngineLog(list(log_paths(run).values())[-1], 0).from_here()
    patience_s = run.facts.stop_timeout_s if timeout_s is None else timeout_s
    deadline = started + patience_s + GRACE_S
    is_killed = False
    while not _has_ended(run):
        if not is_signalled and timeout_s is not None and time.monotonic() > started + timeout_s:
            _signal(run, signal.SIGTERM)
            is_signalled = True
        if time.monotonic() > deadline and is_killed:
            break
        if time.monotonic() > deadline:
            _signal(run, signal.SIGKILL)
            is_killed, deadline = True, time.monotonic() + GRACE_S
        display.report(": ".join(filter(None, (run.facts.name, log.phase()))))
        time.sleep(LOOK_S)
    now = run.again()
    return Stopped(now, time.monotonic() - started, _has_ended(run), now.facts.exit_code)


def _has_ended(run: Run) -> bool:
    now = run.again()
    processes = (now.facts.launcher, *now.facts.processes.values())
    return not now.is_living and not any(process.is_alive() for process in processes)
