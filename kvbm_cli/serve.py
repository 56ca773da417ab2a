"""`kvbm serve`: checks a profile, prints what it amounts to, starts the engine and stays in front of it until it ends.

The first SIGINT, SIGTERM or SIGHUP (as SIGTERM) is passed on to the engine, which then has STOP_TIMEOUT_S to finish
what it serves; a second one kills it. The exit code is the engine's own.
"""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvbm.errors import EngineError
from kvbm_cli.check import check, require_engine
from kvbm_cli.console import StartProgress, print_data, print_json, print_note
from kvbm_cli.process import STOP_TIMEOUT_S, EngineProcess, Progress, choose_port
from kvbm_cli.profiles import resolve
from kvbm_cli.size import as_data, block_line, tier_table

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.load import ResolvedProfile
    from kvbm.sizing import SizeUnknown, Sizing

WATCH_S = 0.1
FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


def serve(
    reference: str,
    overrides: Sequence[str],
    *,
    port: str | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
    log: Path | None,
) -> int:
    """Runs the engine of a profile in the foreground and returns its exit code."""
    from kvbm_cli.engines import launch_plan, make_model

    resolved = resolve(reference, overrides, {"server.port": ("--port", port)} if port is not None else None)
    sizing = check(resolved)
    require_engine(resolved, force=force or dry_run)
    server = resolved.profile.server
    if dry_run:
        plan = launch_plan(resolved.profile, connector=True, port=server.port)
        _print_dry_run(resolved, sizing, plan, as_json=as_json)
        return 0
    make_model(resolved.profile, say=print_note)
    plan = launch_plan(resolved.profile, connector=True, port=choose_port(server.host, server.port))
    print_note(f"{_plan_text(resolved, sizing, plan)}\n")
    return _run(plan, log or _default_log(), resolved.profile.transfer.init_timeout_s, as_json=as_json)


def _run(launch_plan: LaunchPlan, log_path: Path, init_timeout_s: float, *, as_json: bool) -> int:
    with _Signals() as signals, EngineProcess.start(launch_plan, log_path=log_path) as engine:
        try:
            with StartProgress() as show:

                def on_progress(progress: Progress) -> None:
                    signals.pass_on(engine)
                    show(progress)

                engine.wait_healthy(init_timeout_s, on_progress)
        except EngineError:
            if signals.received:
                return engine.stop()
            raise
        _print_ready(engine, as_json=as_json)
        while (code := engine.poll()) is None:
            signals.pass_on(engine)
            time.sleep(WATCH_S)
        if code and not signals.received:
            raise engine.ended_error("the engine ended by itself")
        return code


class _Signals:
    """Collects the signals that arrive, and passes them on from the main loop: handlers themselves only take note."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._passed_on = 0
        self._deadline = float("inf")
        self._previous = {number: signal.getsignal(number) for number in FORWARDED}

    def __enter__(self) -> _Signals:
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN:  # as under `nohup`
                signal.signal(number, self._note)
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def pass_on(self, engine: EngineProcess) -> None:
        """The first signal goes to the engine. The second, or the end of its patience, kills it."""
        if len(self.received) > 1 or time.monotonic() > self._deadline:
            engine.kill()
        elif len(self.received) > self._passed_on:
            self._passed_on = len(self.received)
            self._deadline = time.monotonic() + STOP_TIMEOUT_S
            print_note("stopping; once more kills the engine")
            engine.signal(FORWARDED[self.received[0]])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


def _print_dry_run(
    resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, launch_plan: LaunchPlan, *, as_json: bool
) -> None:
    if as_json:
        data = {
            "profile": {"name": resolved.name, "path": str(resolved.path)},
            "url": launch_plan.base_url,
            "argv": list(launch_plan.argv),
            "environment": dict(launch_plan.environment),
        }
        sizes = {"sizes": str(sizing)} if isinstance(sizing, Exception) else as_data(sizing)
        print_json({**data, **sizes})
        return
    assignments = [f"{name}={value}" for name, value in launch_plan.environment.items()]
    command = shlex.join([*(["env"] if assignments else []), *assignments, *launch_plan.argv])
    print_data(f"{_plan_text(resolved, sizing, launch_plan)}\n\n{command}")


def _plan_text(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, launch_plan: LaunchPlan) -> str:
    engine = resolved.profile.engine
    address = launch_plan.base_url if not launch_plan.base_url.endswith(":0") else "a free port is chosen at the start"
    dtype = f" in {engine.arguments.dtype}" if engine.arguments.dtype else ""
    blocks = "" if isinstance(sizing, Exception) else f"; {block_line(sizing)}"
    lines = [
        f"profile  {resolved.name} ({resolved.path})",
        f"engine   {engine.kind}, {engine.model}{dtype}{blocks}",
        f"server   {address}",
    ]
    if isinstance(sizing, Exception):
        return "\n".join([*lines, f"sizes    {sizing}"])
    return "\n".join([*lines, "", tier_table(resolved, sizing)])


def _print_ready(engine: EngineProcess, *, as_json: bool) -> None:
    launch_plan = engine.plan
    if as_json:
        print_json({"url": launch_plan.base_url, "model": launch_plan.model, "log": str(engine.log_path)})
        return
    body = f'{{"model": "{launch_plan.model}", "prompt": "Once upon a time", "max_tokens": 16}}'
    curl = ["curl", f"{launch_plan.base_url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    print_note(f"healthy after {engine.elapsed_s:.1f} s; log {engine.log_path}; Ctrl-C stops\n")
    print_data(f"{launch_plan.base_url}\n\n{shlex.join(curl)}")


def _default_log() -> Path:
    """A file of its own per run: in the user's state directory, or where there is none, in a new temporary one."""
    name = time.strftime(f"serve-%Y%m%d-%H%M%S-{os.getpid()}.log")
    try:
        directory = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "kvbm"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        directory = Path(tempfile.mkdtemp(prefix="kvbm-"))
    return directory / name
