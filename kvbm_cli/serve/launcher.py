"""Launcher: starts the engine of a plan, watches it until it ends, and updates its run directory.

The engine is ready when it is healthy and has generated a first token. The launcher forwards the first SIGINT, SIGTERM
or SIGHUP (as SIGTERM). The engine then has the run's stop timeout to finish its requests; a second signal kills it. The
exit code is the engine's, or 128 + n if signal n arrived before the engine was ready.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvbm.engines.launch_plan import LaunchPlan
from kvbm.errors import EngineError, KvbmError
from kvbm_cli.engine.process import EngineProcess
from kvbm_cli.runs.log_tail import LogTail, prefixes_of
from kvbm_cli.runs.run_directory import FACTS, OWN_LOG, TARGETS, RunDirectory
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.serve.display import ServeDisplay
from kvbm_cli.serve.first_token import wait_first_token
from kvbm_cli.serve.options import ServeOptions
from kvbm_cli.serve.plan_text import named_plans
from kvbm_cli.serve.reported_sizes import difference_text
from kvbm_cli.system.filesystem import problem_of
from kvbm_cli.system.process_identity import ProcessIdentity
from kvbm_cli.terminal.console import stopped_text
from kvbm_cli.terminal.crash_report import A_BUG
from kvbm_cli.terminal.show_error import warning_text
from kvbm_cli.terminal.streams import BROKEN_PIPE

if TYPE_CHECKING:
    from kvbm.sizing import Sizing
    from kvbm_cli.disaggregated.engines import DisaggregatedEngines
    from kvbm_cli.disaggregated.plan import DisaggregatedPlan
    from kvbm_cli.serve.background import Background

WATCH_S = 0.1
RESTORE_S = 1.0
EFFECTS = {  # of a file that cannot be written
    FACTS: "`kvbm status` may show an old state",
    TARGETS: "Prometheus does not find it by this file",
}
FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


def launch(
    plan: LaunchPlan | DisaggregatedPlan,
    run: RunDirectory,
    options: ServeOptions,
    *,
    heading: str,
    sizing: Sizing | Exception,
    targets: Sequence[str],
    init_timeout_s: float,
    background: Background | None,
) -> int:
    """Print `heading`, run the engine until it ends and record the result. Returns its exit code or raises
    EngineError. When the engine is ready, a difference between `sizing` and its log is printed. `targets` are the
    addresses of its metrics."""
    log_path = options.log or run.log
    tails = _tails(run.logs) if options.streams_log else []
    with (
        _failure_recorded(run),
        _Signals(run) as signals,
        ServeDisplay(tails, heading) as display,
        _start(plan, log_path) as engine,
    ):
        if isinstance(engine, EngineProcess) and engine.admin_token is not None:
            run.write_admin_token(engine.admin_token)
        try:

            def on_progress(phase: str) -> None:
                _record_processes(run, engine)
                if not _forward_signals(display, signals, engine):
                    display.report(phase)

            engine.wait_healthy(init_timeout_s, on_progress)
            refusal = wait_first_token(engine, init_timeout_s, on_progress)
        except EngineError:
            if not signals.received:
                raise
            engine.stop()
            code = 128 + signals.received[0]
        else:
            display.report("")
            if refusal is not None:
                text = f"the engine is healthy, but a completion of one token was refused: {refusal}"
                display.note(warning_text(text))
            if (difference := difference_text(sizing, run.logs.values())) is not None:
                display.note(warning_text(difference))
            run.enter(RunState.HEALTHY)
            _print_ready(display, engine, run, named_plans(plan), run.write_targets(targets), options)
            code = _watch(display, engine, run, signals, background)
        display.report("")
        display.note(signals.stopped_text())
    run.end(code, "")
    return code


def _tails(logs: Mapping[str, Path]) -> Sequence[LogTail]:
    """Return the logs from their current ends on: `--log` may name the log of an earlier engine."""
    starts = [path.stat().st_size if path.is_file() else 0 for path in logs.values()]
    prefixes = prefixes_of(list(logs))
    return [
        LogTail(path, prefix=prefix, start=start)
        for path, prefix, start in zip(logs.values(), prefixes, starts, strict=True)
    ]


@contextlib.contextmanager
def _failure_recorded(run: RunDirectory) -> Iterator[None]:
    """Record an exception as the end of the run."""
    try:
        yield
    except KvbmError as error:
        run.end(error.exit_code, error.message)
        raise
    except KeyboardInterrupt:
        run.end(128 + signal.SIGINT, "")
        raise
    except BrokenPipeError:
        run.end(BROKEN_PIPE, "standard output was closed")
        raise
    except BaseException as error:
        problem = problem_of(error)
        run.end(A_BUG if problem is None else problem.exit_code, f"{type(error).__name__}: {error}")
        raise


def _watch(
    display: ServeDisplay,
    engine: EngineProcess | DisaggregatedEngines,
    run: RunDirectory,
    signals: _Signals,
    background: Background | None,
) -> int:
    """Return the exit code of an engine that was stopped. Releases the background when its output is printed. Keeps the
    run directory up to date, and reports each failure once."""
    next_s, warned = 0.0, set[str]()
    while (code := engine.poll()) is None:
        _record_processes(run, engine)
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + RESTORE_S
            run.restore()
            for name in run.problems.keys() - warned:
                display.note(warning_text(f"{run.problems[name]}; the engine continues, but {EFFECTS[name]}"))
            warned = set(run.problems)
        _forward_signals(display, signals, engine)
        has_printed = display.has_printed()
        display.raise_failure()
        if background is not None and has_printed:
            background.release(run.path / OWN_LOG)
            background = None
        time.sleep(WATCH_S)
    if not signals.received:
        raise engine.ended_error("the engine exited unexpectedly")
    return code


def _forward_signals(display: ServeDisplay, signals: _Signals, engine: EngineProcess | DisaggregatedEngines) -> bool:
    """Forward signals. Returns True once one has arrived, and then shows the progress of the stop."""
    if signals.forward(engine):
        display.restart("stopping")
        display.note("stopping; press Ctrl-C again to kill the engine")
    if signals.received:
        display.report(engine.phase())
    return bool(signals.received)


def _start(plan: LaunchPlan | DisaggregatedPlan, log_path: Path) -> EngineProcess | DisaggregatedEngines:
    if isinstance(plan, LaunchPlan):
        return EngineProcess.start(plan, log_path=log_path)
    from kvbm_cli.disaggregated.engines import DisaggregatedEngines

    return DisaggregatedEngines.start(plan, log_path=log_path)


def _record_processes(run: RunDirectory, engine: EngineProcess | DisaggregatedEngines) -> None:
    """Record the processes that `kvbm stop` waits for. The guard may be replaced by another one."""
    pids = engine.pids()
    if pids != {name: one.pid for name, one in run.processes.items()}:
        found = {name: ProcessIdentity.of(pid) for name, pid in pids.items()}
        run.change(processes={name: one for name, one in found.items() if one is not None})


class _Signals:
    """Records signals in their handlers and forwards them to the engine from the main loop."""

    def __init__(self, run: RunDirectory) -> None:
        self.received: list[signal.Signals] = []
        self._run = run
        self._forwarded_count = 0
        self._has_killed = False
        self._signalled = 0.0
        self._deadline = float("inf")
        self._previous = {number: signal.getsignal(number) for number in FORWARDED}

    def __enter__(self) -> _Signals:
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN:  # as under `nohup`
                signal.signal(number, self._record)
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def forward(self, engine: EngineProcess | DisaggregatedEngines) -> bool:
        """Send the first signal to the engine and return True. A second one, or the stop timeout, kills it."""
        if len(self.received) > 1 or time.monotonic() > self._deadline:
            self._has_killed = True
            engine.kill()
        elif len(self.received) > self._forwarded_count:
            self._forwarded_count = len(self.received)
            self._signalled = time.monotonic()
            self._deadline = self._signalled + self._run.stop_timeout_s()
            self._run.enter(RunState.STOPPING)
            engine.signal(FORWARDED[self.received[0]])
            return True
        return False

    def stopped_text(self) -> str:
        took_s = time.monotonic() - self._signalled if self._forwarded_count else 0.0
        return stopped_text(self._run.name, took_s, was_killed=self._has_killed)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


def _print_ready(
    display: ServeDisplay,
    engine: EngineProcess | DisaggregatedEngines,
    run: RunDirectory,
    named: Mapping[str, LaunchPlan],
    targets: Path | None,
    options: ServeOptions,
) -> None:
    """`named` are the engines behind a proxy, `targets` is the file for Prometheus."""
    endpoint, urls = engine.plan, {name: one.base_url for name, one in named.items()}
    if options.as_json:
        ready = {"run": run.name, "url": endpoint.base_url, "model": endpoint.model, "log": str(engine.log_path)}
        found = {**({"targets": str(targets)} if targets else {}), **({"engines": urls} if urls else {})}
        display.data(json.dumps({**ready, **found}, indent=2))
        return
    body = f'{{"model": "{endpoint.model}", "prompt": "Once upon a time", "max_tokens": 16}}'
    curl = ["curl", f"{endpoint.base_url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    addresses = "".join(f"\n{name:<9}  {url}" for name, url in urls.items())
    ending = f"stop it with `kvbm stop {shlex.quote(run.name)}`" if options.is_detached else "press Ctrl-C to stop it"
    files = f"log {engine.log_path}" + (f"\nPrometheus targets {targets}" if targets else "")
    display.note(f"{run.name} is ready after {engine.elapsed_s:.1f} s; {ending}\n{files}{addresses}\n")
    display.data(f"{endpoint.base_url}\n\n{shlex.join(curl)}")
