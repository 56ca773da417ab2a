"""`kvbm plan --trace FILE`: the hit rate of a trace by capacity and eviction, as a table with sentences or as JSON.

Starts no engine. See `bench/trace/hit_rates.py` for what is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbm.config.sizes import format_size
from kvbm.core.shadow_caches import TRACKED_BLOCKS
from kvbm.errors import UsageError
from kvbm.text.outside import one_line
from kvbm_cli.bench.trace.analysis import Report, collect
from kvbm_cli.bench.trace.hit_rates import Simulation
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.plan import advice
from kvbm_cli.plan.advice import Curve, Prices, Prompts
from kvbm_cli.terminal.console import print_data, print_json, table
from kvbm_cli.terminal.progress import ProgressDisplay

PROGRESS_AFTER_S = 2.0
MAX_CAPACITIES, MAX_CAPACITY = 100, 2**31


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is simulated. Without `capacities`, they are shares of the blocks of the trace."""

    file: Path
    form: TraceFormat
    capacities: tuple[int, ...]
    policies: tuple[str, ...]
    is_exact: bool
    bytes_per_token: int | None
    prefill_tokens_per_s: float | None = None
    prices: Prices | None = None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`rates[policy][i]` is the hit rate with `capacities[i]`. `prompt_tokens` is the mean length of a prompt."""

    capacities: tuple[int, ...]
    rates: dict[str, list[float]]
    requests: int
    unique_blocks: int
    simulated_blocks: int
    prompt_tokens: float = 0.0

    def curve(self, request: PlanRequest) -> Curve:
        if request.bytes_per_token is None:
            return Curve(tuple(f"{capacity:,} blocks" for capacity in self.capacities), None, self.rates)
        sizes = tuple(_bytes(capacity, request) for capacity in self.capacities)
        return Curve(tuple(map(format_size, sizes)), sizes, self.rates)

    def prompts(self, request: PlanRequest) -> Prompts:
        return Prompts(self.prompt_tokens, request.prefill_tokens_per_s)


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


def prices_of(memory_gb_month: float | None, engine_hour: float | None) -> Prices | None:
    if memory_gb_month is None and engine_hour is None:
        return None
    if memory_gb_month is None or engine_hour is None:
        raise UsageError("`--memory-price` and `--engine-price` are needed together", hint="give both, or none")
    return Prices(memory_gb_month, engine_hour)


def require_trace_for(options: Mapping[str, object]) -> None:
    """Raise UsageError if one of these options is given: a running engine has measured what it measures."""
    for name, value in options.items():
        if value:
            raise UsageError(f"`--{name}` is for a trace", hint="add `--trace FILE`, or remove it")


def one_source() -> UsageError:
    return UsageError("`RUN`, `--url` and `--trace` exclude each other", hint="give one of them")


def show_plan(request: PlanRequest, *, html: Path | None, as_json: bool) -> int:
    request = replace(request, form=TraceReader(request.file, request.form).form)  # as the file is written
    with ProgressDisplay("plan", delay_s=PROGRESS_AFTER_S) as progress:
        plan = make_plan(request, progress.report)
    curve = plan.curve(request)
    lines = advice.sentences(curve, plan.prompts(request), request.prices)
    if html is not None:
        from kvbm_cli.plan.page import PlanSection, write_page

        write_page(html, [PlanSection(_facts(plan, request)[0], curve, lines)])
    if as_json:
        print_json(as_data(plan, request))
    else:
        print_data("\n".join([*_facts(plan, request), "", _table(plan, request), "", *lines]))
    return 0


def make_plan(request: PlanRequest, report: Report = lambda phase: None) -> CapacityPlan:
    trace = collect(TraceReader(request.file, request.form), report=report)
    uses = trace.timed_uses()
    tree = trace.tree
    unique = len(tree) - 1
    tracked = unique if request.is_exact else TRACKED_BLOCKS
    simulation = Simulation(tree, uses, tracked=tracked, report=report)
    capacities = request.capacities or simulation.capacities()
    rates = simulation.rates(request.policies, capacities)
    prompt_tokens = fmean(tree.depth_tokens[one.use.prompt] for one in uses)
    return CapacityPlan(capacities, rates, len(uses), unique, simulation.simulated_blocks, prompt_tokens)


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
        **advice.as_data(plan.curve(request), plan.prompts(request), request.prices),
    }


def _facts(plan: CapacityPlan, request: PlanRequest) -> list[str]:
    simulated = "" if plan.simulated_blocks == plan.unique_blocks else f", {plan.simulated_blocks:,} of them simulated"
    return [
        f"{one_line(request.file.name)}: {plan.requests:,} requests, {plan.unique_blocks:,} different blocks of "
        f"{request.form.block_tokens} tokens{simulated}",
    ]


def _table(plan: CapacityPlan, request: PlanRequest) -> str:
    rows = [("blocks", *(["size"] if request.bytes_per_token else []), *plan.rates)]
    for capacity, rates in zip(plan.capacities, plan.curve(request).shown_rates(), strict=True):
        size = [format_size(_bytes(capacity, request))] if request.bytes_per_token else []
        rows.append((f"{capacity:,}", *size, *rates))
    return table(rows, right=tuple(range(len(rows[0]))))


def _bytes(capacity: int, request: PlanRequest) -> int:
    return capacity * request.form.block_tokens * (request.bytes_per_token or 0)
