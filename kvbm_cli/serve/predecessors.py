"""Waits for earlier engines that are ending and still hold the port or the disk cache that a new engine needs."""

from __future__ import annotations

import time
from pathlib import Path

from kvbm_cli.runs.reservations import holds_port
from kvbm_cli.runs.run_directory import EngineRun, Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.serve.served_profile import ServedProfile
from kvbm_cli.terminal.console import print_note
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.show_error import show_warning

POLL_S = 0.1
GRACE_S = 15.0  # after its stop timeout, for the launcher and its guard to kill and to remove


def await_predecessors(served: ServedProfile) -> None:
    """Return when they have ended. After their stop timeout, prints a warning and returns anyway."""
    started = time.monotonic()
    for run in Runs.of_user_if_known():
        resource = _resource(run, served) if _is_ending(run) else None
        if resource is None:
            continue
        print_note(f"waiting for `{run.name}` to end, which uses the same {resource}")
        deadline = started + run.facts.stop_timeout_s + GRACE_S
        with ProgressDisplay("waiting") as display:
            while _is_ending(run.again()) and time.monotonic() < deadline:
                display.report(f"for {run.name}")
                time.sleep(POLL_S)
        if _is_ending(run.again()):
            show_warning(f"`{run.name}` has not ended after {time.monotonic() - started:.0f} s")


def _is_ending(run: EngineRun) -> bool:
    """Whether it is stopping, or a process that its launcher has left is alive."""
    return run.state is RunState.STOPPING or run.has_leftovers()


def _resource(run: EngineRun, served: ServedProfile) -> str | None:
    """Return what both use, None if the new engine need not wait."""
    server, disk = served.profile.server, served.disk
    if holds_port(run, server.host, server.port):
        return f"port {server.port}"
    is_same_model = (run.facts.engine, run.facts.model) == (served.profile.engine.kind, served.model)
    if disk is not None and is_same_model and run.facts.disk_directory == str(Path(disk.directory).expanduser()):
        return "disk cache"
    return None
