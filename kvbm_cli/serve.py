"""`kvbm serve`: checks a profile, prints what it amounts to, starts the engine and stays in front of it until it ends.

It serves when it is healthy and has given a first token. The first SIGINT, SIGTERM or SIGHUP (as SIGTERM) is passed on
to the engine, which then has STOP_TIMEOUT_S to finish what it serves; a second one kills it. The exit code is the
engine's own, or 128 + n where signal n came before it served.
"""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvbm.config.launch_plan import LaunchPlan
from kvbm.errors import EngineError
from kvbm_cli.check import check, require_engine
from kvbm_cli.console import StartProgress, print_data, print_json, print_note
from kvbm_cli.first_token import wait_first_token
from kvbm_cli.process import STOP_TIMEOUT_S, EngineProcess, Progress, choose_port
from kvbm_cli.profiles import resolve
from kvbm_cli.show_error import show_warning
from kvbm_cli.size import as_data, block_line, tier_table

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Profile
    from kvbm.sizing import SizeUnknown, Sizing
    from kvbm_cli.pd.engines import DisaggregatedEngines
    from kvbm_cli.pd.plan import DisaggregatedPlan

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
    from kvbm_cli.engines import make_model
    from kvbm_cli.pd.plan import require_nixl

    resolved = resolve(reference, overrides, {"server.port": ("--port", port)} if port is not None else None)
    require_engine(resolved, force=force or dry_run)
    sizing = check(resolved)
    server = resolved.profile.server
    if dry_run:
        plan = _plan(resolved.profile, server.port)
        _print_dry_run(resolved, sizing, plan, as_json=as_json)
        return 0
    if resolved.profile.disaggregated.is_wanted:
        require_nixl(resolved.profile)
    make_model(resolved.profile, say=print_note)
    plan = _plan(resolved.profile, choose_port(server.host, server.port))
    print_note(f"{_plan_text(resolved, sizing, _asked(plan))}\n")
    return _run(plan, log or _default_log(), resolved.profile.transfer.init_timeout_s, as_json=as_json)


def _plan(profile: Profile, port: int) -> LaunchPlan | DisaggregatedPlan:
    if profile.disaggregated.is_wanted:
        from kvbm_cli.pd.plan import plan

        return plan(profile, port=port)
    from kvbm_cli.engines import launch_plan

    return launch_plan(profile, connector=True, port=port)


def _start(plan: LaunchPlan | DisaggregatedPlan, log_path: Path) -> EngineProcess | DisaggregatedEngines:
    if isinstance(plan, LaunchPlan):
        return EngineProcess.start(plan, log_path=log_path)
    from kvbm_cli.pd.engines import DisaggregatedEngines

    return DisaggregatedEngines.start(plan, log_path=log_path)


def _named(plan: LaunchPlan | DisaggregatedPlan) -> dict[str, LaunchPlan]:
    """The engines behind a proxy by their names; none where clients ask the engine itself."""
    return {} if isinstance(plan, LaunchPlan) else dict(plan.engines)


def _asked(plan: LaunchPlan | DisaggregatedPlan) -> LaunchPlan:
    """What clients ask."""
    return plan if isinstance(plan, LaunchPlan) else plan.proxy


def _run(plan: LaunchPlan | DisaggregatedPlan, log_path: Path, init_timeout_s: float, *, as_json: bool) -> int:
    with _Signals() as signals, _start(plan, log_path) as engine:
        try:
            with StartProgress() as show:

                def on_progress(progress: Progress) -> None:
                    signals.pass_on(engine)
                    show(progress)

                engine.wait_healthy(init_timeout_s, on_progress)
                refusal = wait_first_token(engine, init_timeout_s, on_progress)
        except EngineError:
            if signals.received:
                engine.stop()
                return 128 + signals.received[0]
            raise
        if refusal is not None:
            show_warning(f"the engine is healthy, but a completion of one token was refused: {refusal}")
        _print_ready(engine, _named(plan), as_json=as_json)
        while (code := engine.poll()) is None:
            signals.pass_on(engine)
            time.sleep(WATCH_S)
        if not signals.received:
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

    def pass_on(self, engine: EngineProcess | DisaggregatedEngines) -> None:
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
    resolved: ResolvedProfile,
    sizing: Sizing | SizeUnknown,
    plan: LaunchPlan | DisaggregatedPlan,
    *,
    as_json: bool,
) -> None:
    asked, named = _asked(plan), _named(plan)
    if as_json:
        data = {"profile": {"name": resolved.name, "path": str(resolved.path)}, **_as_data(asked)}
        engines = {"engines": {name: _as_data(one) for name, one in named.items()}} if named else {}
        sizes = {"sizes": str(sizing)} if isinstance(sizing, Exception) else as_data(sizing)
        print_json({**data, **engines, **sizes})
        return
    commands = [f"# {name}\n{_command(one)}" for name, one in {**named, "proxy": asked}.items()]
    print_data("\n\n".join([_plan_text(resolved, sizing, asked), *(commands if named else [_command(asked)])]))


def _as_data(plan: LaunchPlan) -> dict[str, object]:
    return {"url": plan.base_url, "argv": list(plan.argv), "environment": dict(plan.environment)}


def _command(plan: LaunchPlan) -> str:
    assignments = [f"{name}={value}" for name, value in plan.environment.items()]
    return shlex.join([*(["env"] if assignments else []), *assignments, *plan.argv])


def _plan_text(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, launch_plan: LaunchPlan) -> str:
    engine = resolved.profile.engine
    address = launch_plan.base_url if not launch_plan.base_url.endswith(":0") else "a free port is chosen at the start"
    dtype = f" in {engine.arguments.dtype}" if engine.arguments.dtype else ""
    blocks = "" if isinstance(sizing, Exception) else f"; {block_line(sizing)}"
    lines = [
        f"profile  {resolved.name} ({resolved.path})",
        f"engine   {engine.kind}, {engine.model}{dtype}{blocks}",
        *_disaggregated_line(resolved),
        f"server   {address}",
    ]
    if isinstance(sizing, Exception):
        return "\n".join([*lines, f"sizes    {sizing}"])
    return "\n".join([*lines, "", tier_table(resolved, sizing)])


def _disaggregated_line(resolved: ResolvedProfile) -> list[str]:
    wanted = resolved.profile.disaggregated
    text = (
        f"engines  {wanted.prefill} to prefill, each with the tiers below, and {wanted.decode} to decode, with G1 alone"
    )
    return [text] if wanted.is_wanted else []


def _print_ready(
    engine: EngineProcess | DisaggregatedEngines, named: Mapping[str, LaunchPlan], *, as_json: bool
) -> None:
    launch_plan = engine.plan
    if as_json:
        engines = {"engines": {name: one.base_url for name, one in named.items()}} if named else {}
        ready = {"url": launch_plan.base_url, "model": launch_plan.model, "log": str(engine.log_path)}
        print_json({**ready, **engines})
        return
    body = f'{{"model": "{launch_plan.model}", "prompt": "Once upon a time", "max_tokens": 16}}'
    curl = ["curl", f"{launch_plan.base_url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    addresses = "".join(f"\n{name:<9}  {one.base_url}" for name, one in named.items())
    print_note(f"ready after {engine.elapsed_s:.1f} s; log {engine.log_path}; Ctrl-C stops{addresses}\n")
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
