"""`kvbm serve`: checks a profile, prints the resulting plan, and passes it to the launcher (launcher.py).

Other `kvbm serve` commands wait from the check of reservations until the run directory records those of this engine.
With `--detach` all this happens in a child process (background.py), which prints to the same terminal until the engine
is ready.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvbm.config.launch_plan import LaunchPlan
from kvbm.config.variables import PREFIX
from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.disaggregated.engines import log_of
from kvbm_cli.disaggregated.plan import DisaggregatedPlan, free_ports, plan, require_nixl
from kvbm_cli.engine.engines import copy_count, how_to_make_model, launch_plan, make_model, versions
from kvbm_cli.engine.process import STOP_TIMEOUT_S, additions, choose_port
from kvbm_cli.profile.preflight import (
    check,
    require_disk_space,
    require_engine,
    require_free_port,
    require_log,
    require_metrics_ports,
)
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.size import as_data, block_line, tier_table
from kvbm_cli.runs.run_directory import EngineRun, RunDirectory, Runs
from kvbm_cli.runs.run_facts import RunFacts
from kvbm_cli.serve.background import Background
from kvbm_cli.serve.launcher import launch
from kvbm_cli.serve.reservations import living_runs, require_memory, require_port, taken_ports
from kvbm_cli.system.process_identity import ProcessIdentity
from kvbm_cli.terminal.console import print_data, print_json, print_note
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Profile
    from kvbm.sizing import SizeUnknown, Sizing


def serve(
    reference: str,
    overrides: Sequence[str],
    *,
    port: str | None,
    dry_run: bool,
    force: bool,
    detach: bool,
    as_json: bool,
    log: Path | None,
) -> int:
    """Runs the engine of a profile and returns its exit code; with `detach`, returns 0 when it is ready."""
    if detach and dry_run:
        raise UsageError("`--dry-run` and `--detach` cannot be combined", hint="omit one of them")
    if log is not None:
        require_log(log)
    background = None
    if detach:
        _runs(is_detached=True)  # fails here, before the fork
        background = Background.fork()
        if background.is_parent:
            return background.wait()
    resolved = resolve(reference, overrides, {"server.port": ("--port", port)} if port is not None else None)
    require_engine(resolved, force=force or dry_run)
    sizing = check(resolved, warns_of_space=force or dry_run)
    server = resolved.profile.server
    if dry_run:
        plan = _plan(resolved.profile, server.port)
        _print_dry_run(resolved, sizing, plan, as_json=as_json)
        return 0
    if resolved.profile.disaggregated.is_enabled:
        require_nixl(resolved.profile)
    if not force:
        require_disk_space(resolved, sizing)
    _free_port(resolved, living_runs())
    require_metrics_ports(resolved)
    if how_to_make_model(resolved.profile) is not None:
        with ProgressDisplay("making", delay_s=0.5) as display:
            display.report(f"{resolved.profile.engine.model}, once")
            make_model(resolved.profile, say=print_note)
    runs = _runs(is_detached=detach)
    with runs.starting() as living:
        plan = _plan(resolved.profile, _free_port(resolved, living), living)
        if not force:
            require_memory(resolved, _memory_bytes(resolved.profile, sizing), living)
        run = runs.create(resolved.name)
        try:
            _describe(run, resolved, sizing, plan, log, is_detached=detach)
        except BaseException:
            run.remove()
            raise
    print_note(f"{_plan_text(resolved, sizing, _endpoint(plan))}\n")
    return launch(plan, run, log or run.log, resolved.profile.transfer.init_timeout_s, background, as_json=as_json)


def _runs(*, is_detached: bool) -> Runs:
    runs = Runs.writable()
    if runs is not None:
        return runs
    problem = "cannot create a run directory in ~/.local/state/kvbm"
    if is_detached:
        raise EnvironmentProblem(problem, hint="set `XDG_STATE_HOME` to a writable directory")
    show_warning(f"{problem}; `kvbm status`, `logs` and `stop` will not find this engine")
    return Runs.temporary()


def _free_port(resolved: ResolvedProfile, living: Sequence[EngineRun]) -> int:
    """Returns the port of the profile, or a free one that no starting engine has reserved."""
    server, taken = resolved.profile.server, taken_ports(living)
    require_port(server.host, server.port, living)
    require_free_port(resolved)
    while (port := choose_port(server.host, server.port)) in taken:
        pass
    return port


def _memory_bytes(profile: Profile, sizing: Sizing | SizeUnknown) -> int:
    """Returns the host memory for blocks (G2) of all engines of the profile, 0 if unknown."""
    host = profile.tiers.host
    if isinstance(sizing, Exception):
        return (host.capacity or 0) * copy_count(profile) if host is not None and host.blocks is None else 0
    return sizing.host.total_bytes * copy_count(profile)


def _describe(
    run: RunDirectory,
    resolved: ResolvedProfile,
    sizing: Sizing | SizeUnknown,
    plan: LaunchPlan | DisaggregatedPlan,
    log: Path | None,
    *,
    is_detached: bool,
) -> None:
    """Writes the run directory's facts before the engine starts."""
    profile, endpoint, named = resolved.profile, _endpoint(plan), _named(plan)
    disk = profile.tiers.disk
    logs = {name: str(log_of(log or run.log, name)) for name in named}
    launcher = ProcessIdentity.of(os.getpid())
    assert launcher is not None, "this process is alive"
    run.begin(
        RunFacts(
            name=run.name,
            profile=resolved.name,
            profile_path=str(resolved.path.absolute()),
            engine=profile.engine.kind,
            model=endpoint.model,
            url=endpoint.base_url,
            ports=tuple(urlsplit(one.base_url).port or 0 for one in (endpoint, *named.values())),
            logs={**logs, "proxy" if named else "engine": str((log or run.log).absolute())},
            launcher=launcher,
            memory_bytes=_memory_bytes(profile, sizing),
            disk_directory=None if disk is None else str(Path(disk.directory).expanduser()),
            directory=os.getcwd(),
            command=tuple(sys.argv),
            versions=versions(profile),
            stop_timeout_s=STOP_TIMEOUT_S + (0.0 if disk is None else disk.drain_s),
            started_s=time.time(),
            is_detached=is_detached,
        )
    )
    content = profile.model_dump(mode="json", exclude_none=True)
    run.write_profile(content, f"# {run.name}: `{resolved.path}` with all overrides, resolved at {time.ctime()}.")


def _plan(profile: Profile, port: int, living: Sequence[EngineRun] = ()) -> LaunchPlan | DisaggregatedPlan:
    if profile.disaggregated.is_enabled:
        taken = {port, *taken_ports(living)}
        return plan(profile, port=port, ports=(free for free in free_ports() if free not in taken))
    return launch_plan(profile, connector=True, port=port)


def _named(plan: LaunchPlan | DisaggregatedPlan) -> dict[str, LaunchPlan]:
    """Returns the engines behind a proxy by name, empty without a proxy."""
    return {} if isinstance(plan, LaunchPlan) else dict(plan.engines)


def _endpoint(plan: LaunchPlan | DisaggregatedPlan) -> LaunchPlan:
    """Returns the server that clients use: the engine, or the proxy."""
    return plan if isinstance(plan, LaunchPlan) else plan.proxy


def _print_dry_run(
    resolved: ResolvedProfile,
    sizing: Sizing | SizeUnknown,
    plan: LaunchPlan | DisaggregatedPlan,
    *,
    as_json: bool,
) -> None:
    endpoint, named = _endpoint(plan), _named(plan)
    if as_json:
        data = {"profile": {"name": resolved.name, "path": str(resolved.path)}, **_as_data(endpoint)}
        engines = {"engines": {name: _as_data(one) for name, one in named.items()}} if named else {}
        sizes = {"sizes": str(sizing)} if isinstance(sizing, Exception) else as_data(sizing)
        print_json({**data, **engines, **sizes})
        return
    commands = [f"# {name}\n{_command(one)}" for name, one in {**named, "proxy": endpoint}.items()]
    first = [shlex.join(making)] if (making := how_to_make_model(resolved.profile)) else []
    print_data(
        "\n\n".join([_plan_text(resolved, sizing, endpoint), *first, *(commands if named else [_command(endpoint)])])
    )


def _as_data(plan: LaunchPlan) -> dict[str, object]:
    return {"url": plan.base_url, "argv": list(plan.argv), "environment": additions(plan)}


def _command(plan: LaunchPlan) -> str:
    """Returns the command that starts the engine like `kvbm serve`, except for its temporary directory."""
    unset = [word for name in sorted(os.environ) if name.startswith(PREFIX) for word in ("-u", name)]
    assignments = [f"{name}={value}" for name, value in additions(plan).items()]
    return shlex.join(["env", *unset, *assignments, *plan.argv])


def _plan_text(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, launch_plan: LaunchPlan) -> str:
    engine = resolved.profile.engine
    address = launch_plan.base_url if not launch_plan.base_url.endswith(":0") else "a free port, chosen at the start"
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
    text = f"engines  {wanted.prefill} for prefill, each with the tiers below; {wanted.decode} for decode, with G1 only"
    return [text] if wanted.is_enabled else []
