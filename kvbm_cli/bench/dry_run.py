"""`kvbm bench --dry-run`: what would run, how long it takes and how much memory it needs. Starts nothing."""

from __future__ import annotations

import json
from typing import Any

from kvbm.config.sizes import format_size
from kvbm_cli.bench.arms import HEADROOM
from kvbm_cli.bench.comparison import Arm
from kvbm_cli.bench.experiment import Setup
from kvbm_cli.profile.size import size_if_known
from kvbm_cli.terminal.printable import printable

TYPICAL_START_S = 20.0


def show_plan(setup: Setup, *, as_json: bool) -> int:
    plan = plan_of(setup)
    if as_json:
        print(json.dumps(plan, indent=2))
        return 0
    print("arms")
    for name, arm in plan["arms"].items():
        about = arm["url"] or f"profile {arm['profile']}, {_memory(arm['memory_bytes'])}"
        print(printable(f"  {name:<16}{arm['kind']:<10}{about}"))
    for cell in plan["cells"]:
        pressure = "" if cell["pressure"] is None else f", pressure {cell['pressure']:g}"
        print(f"\n{cell['name']}: {cell['workload']['kind']}{pressure}")
        print(f"  working set    {_tokens(cell['working_set_tokens'])}; G1 holds {_tokens(cell['g1_tokens'])}")
        print(f"  order          {'  '.join('+'.join(group['arms']) for group in cell['order'])}")
        print(f"  duration       {_duration(cell['duration_s'])}")
    at_once = plan["memory_bytes_at_once"]
    memory = _memory(at_once) + (" at once" if at_once is not None else "")
    print(f"\nin total: {plan['starts']} engine starts, {memory}")
    print(f"duration: {_duration(plan['duration_s'])}")
    return 0


def plan_of(setup: Setup) -> dict[str, Any]:
    """`duration_s` is an estimate; `None` if the interval is measured first, or the requests wait for answers."""
    content = setup.to_json()
    running = {arm.name for arm in setup.comparison.arms if arm.url is not None}
    starts = 0 if setup.comparison.is_of_urls else 1
    for cell, described in zip(setup.cells, content["cells"], strict=True):
        runs = [name for group in setup.groups(cell) for name in group.arms]
        cell_starts = len([name for name in runs if name not in running])
        starts += cell_starts
        described["working_set_tokens"] = cell.workload.working_set_tokens
        described["duration_s"] = _cell_duration_s(described, cell_starts)
    durations = [cell["duration_s"] for cell in content["cells"]]
    working_set = max((cell.workload.working_set_tokens or 0 for cell in setup.cells), default=0)
    memory = {arm.name: _memory_bytes(arm, working_set) for arm in setup.comparison.arms}
    groups = [group.arms for cell in setup.cells for group in setup.groups(cell)]
    at_once = max((sum(memory[one] or 0 for one in arms) for arms in groups), default=0)
    return {
        **content,
        "arms": {name: {**arm, "memory_bytes": memory[name]} for name, arm in content["arms"].items()},
        "starts": starts,
        "duration_s": None if None in durations else sum(durations),
        "memory_bytes_at_once": None if None in memory.values() else at_once,
    }


def _cell_duration_s(cell: dict[str, Any], starts: int) -> float | None:
    schedule = cell["workload"]["schedule"]
    group_s: float | None = schedule["duration_s"]
    requests = _request_count(cell["workload"])
    if group_s is None and schedule["interval_s"] is not None and requests is not None:
        group_s = schedule["interval_s"] * requests
    if group_s is None:
        return None
    return group_s * len(cell["order"]) + TYPICAL_START_S * starts


def _request_count(workload: dict[str, Any]) -> int | None:
    if workload["kind"] == "conversations":
        return int(workload["users"] * workload["turns"] * workload["rounds_of_users"])
    if workload["kind"] == "shared-prefix":
        return int(workload["groups"] * workload["requests_per_group"])
    return workload.get("requests")


def _memory_bytes(arm: Arm, working_set_tokens: int) -> int | None:
    """G1 and G2 of the arm; `None` if only the engine knows, or for a server that runs elsewhere.

    G1 of the floor holds the working set.
    """
    sizing = size_if_known(arm.resolved) if arm.resolved is not None else None
    if sizing is None or sizing.device is None:
        return None
    if arm.kind == "floor":
        needed = round(HEADROOM * working_set_tokens)
        held = sizing.device.block_count // sizing.group_count * sizing.block_tokens
        return sizing.device.total_bytes * max(needed, held) // held
    return sizing.device.total_bytes + (sizing.host.total_bytes if arm.has_kvbm else 0)


def _memory(byte_count: int | None) -> str:
    return "memory unknown" if byte_count is None else f"{format_size(byte_count)} for the KV cache"


def _tokens(count: int | None) -> str:
    return "an unknown number of tokens" if count is None else f"{count:,} tokens"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "known after the preparation; `--duration` limits it"
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"
