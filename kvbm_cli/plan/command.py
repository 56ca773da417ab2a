"""`kvbm plan --trace FILE`: the hit rate of a trace by capacity and eviction, as a table with sentences or as JSON.

Starts no engine. See simulator.py for what is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.config.sizes import format_size
from kvbm.errors import ProfileError, UsageError
from kvbm.text.outside import one_line
from kvbm_cli.bench.trace.analysis import Report, collect
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.plan.simulator import ADAPTIVE, LRU, POLICIES, TRACKED_BLOCKS, Sample, TimedUse, hit_rate
from kvbm_cli.terminal.console import print_data, print_json, table
from kvbm_cli.terminal.progress import ProgressDisplay

PROGRESS_AFTER_S = 2.0
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the blocks of the trace
MAX_CAPACITIES, MAX_CAPACITY = 100, 2**31
NOTABLE_GAIN = 0.005  # of the hit rate


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is simulated. Without `capacities`, they are shares of the blocks of the trace."""

    file: Path
    form: TraceFormat
    capacities: tuple[int, ...]
    policies: tuple[str, ...]
    is_exact: bool
    bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`rates[policy][i]` is the hit rate with `capacities[i]`."""

    capacities: tuple[int, ...]
    rates: dict[str, list[float]]
    requests: int
    unique_blocks: int
    simulated_blocks: int


def parse_capacities(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    for part in parts:
        if not (part.isascii() and part.isdigit() and 0 < len(part) < 12 and 0 < int(part) <= MAX_CAPACITY):
            raise UsageError(
                f"`--capacity-blocks` must be numbers of blocks from 1 to {MAX_CAPACITY}, not `{one_line(part[:40])}`",
                hint="for example `--capacity-blocks 10000,50000`",
            )
    if len(parts) > MAX_CAPACITIES:
        raise UsageError(f"`--capacity-blocks` has {len(parts)} capacities, and the limit is {MAX_CAPACITIES}")
    return tuple(sorted({int(part) for part in parts}))


def parse_policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in POLICIES:
            known = " or ".join(f"`{one}`" for one in POLICIES)
            raise UsageError(f"`--policy` must be {known}, not `{one_line(name[:40])}`")
    return names


def show_plan(request: PlanRequest, *, as_json: bool) -> int:
    with ProgressDisplay("plan", delay_s=PROGRESS_AFTER_S) as progress:
        plan = make_plan(request, progress.report)
    if as_json:
        print_json(as_data(plan, request))
    else:
        print_data("\n".join([*_facts(plan, request), "", _table(plan, request), "", *sentences(plan, request)]))
    return 0


def make_plan(request: PlanRequest, report: Report = lambda phase: None) -> CapacityPlan:
    trace = collect(TraceReader(request.file, request.form), report=report)
    uses = [TimedUse(launch_ms / 1000, use) for launch_ms, use in trace.in_order()]
    if not uses:
        raise ProfileError(
            f"{request.file}: no request has `hash_ids`", hint="`kvbm plan` needs to know which blocks requests share"
        )
    tree = trace.tree
    unique = len(tree) - 1
    sample = Sample(tree, unique if request.is_exact else TRACKED_BLOCKS)
    capacities = request.capacities or tuple(sorted({max(1, round(share * unique)) for share in SHARES}))

    def rate(policy: str, capacity: int) -> float:
        def report_requests(done: int) -> None:
            report(f"simulating {policy} with {capacity:,} blocks, {done} of {len(uses)} requests")

        return hit_rate(tree, uses, sample, capacity, policy, report=report_requests)

    rates = {policy: [rate(policy, capacity) for capacity in capacities] for policy in request.policies}
    return CapacityPlan(capacities, rates, len(uses), unique, sum(sample.is_in))


def as_data(plan: CapacityPlan, request: PlanRequest) -> dict[str, Any]:
    return {
        "file": request.file.name,
        "requests": plan.requests,
        "unique_blocks": plan.unique_blocks,
        "simulated_blocks": plan.simulated_blocks,
        "block_tokens": request.form.block_tokens,
        "curve": [
            {"policy": policy, "capacity_blocks": capacity, "hit_rate": rate}
            for policy, rates in plan.rates.items()
            for capacity, rate in zip(plan.capacities, rates, strict=True)
        ],
    }


def _facts(plan: CapacityPlan, request: PlanRequest) -> list[str]:
    simulated = "" if plan.simulated_blocks == plan.unique_blocks else f", {plan.simulated_blocks:,} of them simulated"
    return [
        f"{one_line(request.file.name)}: {plan.requests:,} requests, {plan.unique_blocks:,} different blocks of "
        f"{request.form.block_tokens} tokens{simulated}",
    ]


def _table(plan: CapacityPlan, request: PlanRequest) -> str:
    rows = [("blocks", *(["size"] if request.bytes_per_token else []), *plan.rates)]
    for index, capacity in enumerate(plan.capacities):
        size = [_size(capacity, request)] if request.bytes_per_token else []
        rows.append((f"{capacity:,}", *size, *(f"{rates[index]:.1%}" for rates in plan.rates.values())))
    return table(rows, right=tuple(range(len(rows[0]))))


def _size(capacity: int, request: PlanRequest) -> str:
    return format_size(capacity * request.form.block_tokens * (request.bytes_per_token or 0))


def sentences(plan: CapacityPlan, request: PlanRequest) -> list[str]:
    """Say what more memory gains, and what `adaptive` gains."""
    policy, rates = max(plan.rates.items(), key=lambda item: sum(item[1]))
    lines = []
    for index in range(1, len(plan.capacities)):
        less, more = rates[index - 1], rates[index]
        if more - less > NOTABLE_GAIN:
            lines.append(
                f"With {_named(plan.capacities[index], request)} instead of "
                f"{_named(plan.capacities[index - 1], request)}, {more:.0%} instead of {less:.0%} of the prompt blocks "
                f"come from the cache ({policy})."
            )
    if LRU in plan.rates and ADAPTIVE in plan.rates:
        gains = [new - old for new, old in zip(plan.rates[ADAPTIVE], plan.rates[LRU], strict=True)]
        best = gains.index(max(gains))
        if gains[best] > NOTABLE_GAIN:
            lines.append(
                f"`adaptive` gains most with {_named(plan.capacities[best], request)}: "
                f"{plan.rates[ADAPTIVE][best]:.1%} instead of {plan.rates[LRU][best]:.1%}."
            )
        else:
            lines.append("`adaptive` gains nothing here, compared with `lru`.")
    return lines or ["The hit rate does not depend on these capacities."]


def _named(capacity: int, request: PlanRequest) -> str:
    return _size(capacity, request) if request.bytes_per_token else f"{capacity:,} blocks"
