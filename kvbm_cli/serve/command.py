"""`kvbm serve`: checks a profile, prints the resulting plan, and passes it to the launcher (launcher.py).

Other `kvbm serve` commands wait from the check of reservations until the run directory records those of this engine.
Sizes that are `auto` are chosen in between.
With `--detach` all this happens in a child process (background.py), which prints to the same terminal until the engine
is ready; also without it if the run directory or the log may hang.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvbm.engines.launch_plan import LaunchPlan
from kvbm.engines.table import how_to_make_model, kind_of, make_model, versions
from kvbm.errors import EnvironmentProblem, UsageError
from kvbm.host.mounts import may_hang
from kvbm.sizing import Sizing
from kvbm_cli.disaggregated.engines import log_of
from kvbm_cli.disaggregated.plan import DisaggregatedPlan
from kvbm_cli.engine.process import choose_port, open_log
from kvbm_cli.profile.machine_check import require_none, warn_of
from kvbm_cli.profile.machine_problems import problems_here, reservation_problems
from kvbm_cli.profile.preflight import check
from kvbm_cli.profile.resolve import resolve_to_start
from kvbm_cli.profile.size import order_checks
from kvbm_cli.runs.memory_claims import claiming
from kvbm_cli.runs.reservations import taken_ports
from kvbm_cli.runs.run_directory import EngineRun, RunDirectory, Runs
from kvbm_cli.runs.run_facts import RunFacts
from kvbm_cli.serve.background import Background
from kvbm_cli.serve.launcher import launch
from kvbm_cli.serve.options import ServeOptions
from kvbm_cli.serve.plan_text import endpoint_of, named_plans, plan_text, print_dry_run
from kvbm_cli.serve.predecessors import await_predecessors
from kvbm_cli.serve.served_profile import ServedProfile, require_baseline
from kvbm_cli.system.filesystem import state_directory
from kvbm_cli.system.process_identity import ProcessIdentity
from kvbm_cli.terminal.console import print_note
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile


def serve(references: Sequence[str], overrides: Sequence[str], options: ServeOptions) -> int:
    """Run the engine of a profile and return its exit code; if detached, returns 0 when it is ready."""
    if options.is_detached and options.is_dry_run:
        raise UsageError("`--dry-run` and `--detach` cannot be combined", hint="omit one of them")
    if options.log is not None and not options.is_dry_run:
        open_log(options.log).close()  # fails here, before the checks
    background = None
    paths = _may_hang(options)
    if options.is_detached:
        _runs(is_detached=True)  # fails here, before the fork
    if options.is_detached or (paths and not options.is_dry_run):
        background = Background.fork(is_detached=options.is_detached)
        if background.is_parent:
            return background.wait(paths)
    served = _checked(references, overrides, options)
    has_cache = not options.is_baseline
    resolved = served.resolved
    if has_cache and isinstance(served.sizing, Sizing):
        require_none(resolved, order_checks(resolved, served.sizing), is_strict=options.is_strict)
    if options.is_dry_run:
        warn_of(resolved, problems_here(resolved, served.sizing, has_cache=has_cache))
        served = served.decided()
        print_dry_run(served, served.plan(served.profile.server.port), as_json=options.as_json)
        return 0
    await_predecessors(served)
    problems = problems_here(resolved, served.sizing, has_cache=has_cache)
    require_none(resolved, problems, is_forced=options.is_forced, may_lack_disk=True)
    _make_model(served)
    runs = _runs(is_detached=options.is_detached)
    with claiming(), runs.starting() as living:
        served = served.decided()
        problems = reservation_problems(served.resolved, served.sizing, living, has_cache=has_cache)
        require_none(served.resolved, problems, is_forced=options.is_forced)
        plan = served.plan(_free_port(served.resolved, living), taken=tuple(taken_ports(living)))
        run = runs.create(served.run_name)
        plan = plan.placed(run.path)
        try:
            _describe(run, served, plan, options)
        except BaseException:
            run.remove()
            raise
    heading, timeout_s = f"{plan_text(served, endpoint_of(plan))}\n", served.profile.transfer.init_timeout_s
    return launch(
        plan,
        run,
        options,
        heading=heading,
        sizing=served.sizing,
        targets=_targets(plan, served),
        init_timeout_s=timeout_s,
        background=background if options.is_detached else None,
    )


def _targets(plan: LaunchPlan | DisaggregatedPlan, served: ServedProfile) -> list[str]:
    """Return the addresses at which Prometheus finds the metrics of the engines."""
    plans = list(named_plans(plan).values()) or [endpoint_of(plan)]
    traits = kind_of(served.profile).traits
    has_all = traits.has_kvbm_metrics and not served.profile.tiers.are_below_engine
    urls = [one.metrics_url for one in plans]
    urls += [one.base_url for one in plans if traits.has_metrics and not (one.metrics_url and has_all)]
    return [urlsplit(url).netloc for url in urls if url]


def _may_hang(options: ServeOptions) -> list[Path]:
    """Return the paths that the launcher uses while the engine runs, and whose file system may hang."""
    paths = [] if options.log is None else [options.log.absolute().parent]
    with suppress(RuntimeError):  # without a home
        paths.append(state_directory())
    return [path for path in paths if may_hang(str(path))]


def _checked(references: Sequence[str], overrides: Sequence[str], options: ServeOptions) -> ServedProfile:
    """Return the profile. ProfileError for mistakes in it."""
    port, has_cache = options.port, not options.is_baseline
    given = {"server.port": ("--port", port)} if port is not None else None
    resolved = resolve_to_start(*references, overrides=overrides, options=given, has_cache=has_cache)
    if options.log is not None and options.log.exists() and any(map(options.log.samefile, resolved.paths)):
        raise UsageError(f"`--log {options.log}` is the profile itself", hint="name another file with `--log FILE`")
    if options.is_baseline:
        require_baseline(resolved, overrides)
    if options.is_dry_run and not options.is_forced:
        kind_of(resolved.profile).installed(resolved.profile)  # raises if unknown: the command depends on that
    sizing = check(resolved, has_cache=has_cache, verifies_flags=not options.is_forced)
    return ServedProfile(resolved, sizing, options.is_baseline)


def _make_model(served: ServedProfile) -> None:
    if how_to_make_model(served.profile) is not None:
        with ProgressDisplay("making", delay_s=0.5) as display:
            display.report(f"{served.profile.engine.model}, once")
            make_model(served.profile, say=print_note)


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
    """Return the port of the profile, or a free one that no starting engine has reserved."""
    server, taken = resolved.profile.server, taken_ports(living)
    while (port := choose_port(server.host, server.port)) in taken:
        pass
    return port


def _describe(
    run: RunDirectory, served: ServedProfile, plan: LaunchPlan | DisaggregatedPlan, options: ServeOptions
) -> None:
    """Write the run directory's facts before the engine starts."""
    endpoint, named, resolved = endpoint_of(plan), named_plans(plan), served.resolved
    log = options.log or run.log
    logs = {name: str(log_of(log, name)) for name in named}
    launcher = ProcessIdentity.of(os.getpid())
    assert launcher is not None, "this process is alive"
    run.begin(
        RunFacts(
            name=run.name,
            profile=resolved.name,
            profile_path=", ".join(str(path.absolute()) for path in resolved.paths),
            engine=served.profile.engine.kind,
            model=endpoint.model,
            url=endpoint.base_url,
            metrics_url=endpoint.metrics_url,
            ports=tuple(urlsplit(one.base_url).port or 0 for one in (endpoint, *named.values())),
            logs={**logs, "proxy" if named else "engine": str(log.absolute())},
            launcher=launcher,
            memory_bytes=served.memory_bytes,
            engine_bytes=served.engine_bytes,
            chosen={} if options.is_baseline else served.resolved.chosen,
            disk_directory=None if served.disk is None else str(Path(served.disk.directory).expanduser()),
            directory=os.getcwd(),
            command=tuple(sys.argv),
            versions=versions(served.profile),
            stop_timeout_s=served.stop_timeout_s,
            started_s=time.time(),
            is_detached=options.is_detached,
            is_baseline=options.is_baseline,
        )
    )
    content = served.profile.model_dump(mode="json", exclude_none=True)
    baseline = ", for `kvbm serve --baseline`" if options.is_baseline else ""
    head = f"# {run.name}: `{resolved.place}` with all overrides, resolved at {time.ctime()}{baseline}."
    run.write_profile(content, head)
