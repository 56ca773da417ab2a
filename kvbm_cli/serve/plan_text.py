"""Texts of `kvbm serve`: the plan that it prints before the start, and the result of `--dry-run`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from kvbm.config.variables import PREFIX, STORE_VARIABLES
from kvbm.engines.launch_plan import LaunchPlan
from kvbm.engines.table import how_to_make_model
from kvbm.text.outside import without_secret_values, without_secrets
from kvbm_cli.disaggregated.plan import DisaggregatedPlan
from kvbm_cli.engine.process import additions
from kvbm_cli.profile.size import as_data, block_line, chosen_lines, tier_table
from kvbm_cli.profile.state_check import state_notes
from kvbm_cli.serve.served_profile import ServedProfile
from kvbm_cli.terminal.console import print_data, print_json

END = "END"  # ends the text of a file in a command


def named_plans(plan: LaunchPlan | DisaggregatedPlan) -> dict[str, LaunchPlan]:
    """Return the engines behind a proxy by name, empty without a proxy."""
    return {} if isinstance(plan, LaunchPlan) else dict(plan.engines)


def endpoint_of(plan: LaunchPlan | DisaggregatedPlan) -> LaunchPlan:
    """Return the server that clients use: the engine, or the proxy."""
    return plan if isinstance(plan, LaunchPlan) else plan.proxy


def print_dry_run(served: ServedProfile, plan: LaunchPlan | DisaggregatedPlan, *, as_json: bool) -> None:
    endpoint, named = endpoint_of(plan), named_plans(plan)
    if as_json:
        about = {"name": served.resolved.name, "path": served.resolved.place}
        engines = {"engines": {name: _as_data(one) for name, one in named.items()}} if named else {}
        baseline = {"is_baseline": served.is_baseline}
        print_json({"profile": about, **baseline, **_as_data(endpoint), **engines, **_sizes(served)})
        return
    commands = [f"# {name}\n{_command(one)}" for name, one in {**named, "proxy": endpoint}.items()]
    first = [shlex.join(making)] if (making := how_to_make_model(served.profile)) else []
    files = {name: text for one in (*named.values(), endpoint) for name, text in one.files.items()}
    first += [_creation(name, text) for name, text in files.items()]
    print_data("\n\n".join([plan_text(served, endpoint), *first, *(commands if named else [_command(endpoint)])]))


def _as_data(plan: LaunchPlan) -> dict[str, object]:
    files = {"files": dict(plan.files)} if plan.files else {}
    shown = without_secret_values(additions(plan))
    return {"url": plan.base_url, "argv": list(map(without_secrets, plan.argv)), "environment": shown, **files}


def _sizes(served: ServedProfile) -> Mapping[str, object]:
    chosen = {} if served.is_baseline or not served.resolved.chosen else {"chosen": dict(served.resolved.chosen)}
    if isinstance(served.sizing, Exception):
        return {"sizes": str(served.sizing), **chosen}
    return {**as_data(served.sizing, has_cache=not served.is_baseline), **chosen}


def _command(plan: LaunchPlan) -> str:
    """Return the command that starts the engine like `kvbm serve`, except for its temporary directory. `***` stands for
    secrets."""
    names = [name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in STORE_VARIABLES]
    unset = [word for name in names for word in ("-u", name)]
    assignments = [f"{name}={value}" for name, value in without_secret_values(additions(plan)).items()]
    return shlex.join(["env", *unset, *assignments, *map(without_secrets, plan.argv)])


def _creation(name: str, text: str) -> str:
    """Return the command that writes a file of the plan into the current directory."""
    assert END not in text.splitlines(), "the text would end the command early"
    return f"cat > {shlex.quote(name)} <<'{END}'\n{text}{END}"


def plan_text(served: ServedProfile, launch_plan: LaunchPlan) -> str:
    resolved, sizing = served.resolved, served.sizing
    engine = resolved.profile.engine
    address = launch_plan.base_url if not launch_plan.base_url.endswith(":0") else "a free port, chosen at the start"
    dtype = f" in {engine.arguments.dtype}" if engine.arguments.dtype else ""
    blocks = "" if isinstance(sizing, Exception) else f"; {block_line(sizing)}"
    wanted = resolved.profile.disaggregated
    pair = f"{wanted.prefill} for prefill, each with the tiers below; {wanted.decode} for decode, with G1 only"
    lines = [
        f"profile  {resolved.name} ({resolved.place})",
        f"engine   {engine.kind}, {engine.model}{dtype}{blocks}",
        *(["cache    none: this is the baseline"] if served.is_baseline else []),
        *([f"engines  {pair}"] if wanted.is_enabled else []),
        f"server   {address}",
        *(f"note     {note}" for note in ([] if served.is_baseline else state_notes(resolved))),
    ]
    chosen = [] if served.is_baseline else chosen_lines(resolved)
    if isinstance(sizing, Exception):
        return "\n".join([*lines, f"sizes    {sizing}", *chosen])
    return "\n".join([*lines, "", tier_table(resolved, sizing, has_cache=not served.is_baseline), *chosen])
