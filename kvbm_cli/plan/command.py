"""`kvbm plan`: what it prints, and `--trace FILE`: the hit rate of a trace by capacity and eviction.

Starts no engine. See `bench/trace/hit_rates.py` for what is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kvbm.config.sizes import format_size
from kvbm.core.shadow_caches import TRACKED_BLOCKS
from kvbm.errors import UsageError
from kvbm.text.outside import one_line
from kvbm_cli.bench.show.page import write_page
from kvbm_cli.bench.trace.analysis import Report, collect
from kvbm_cli.bench.trace.hit_rates import Simulation
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.plan.advice import CapacityPlan, Curve, Prices, Prompts
from kvbm_cli.plan.page import page
from kvbm_cli.terminal.console import print_data, print_json
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
    prefill_tokens_per_s: float | None


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


def require_one_source(*sources: object) -> None:
    if sum(source is not None for source in sources) > 1:
        raise UsageError("`RUN`, `--url` and `--trace` exclude each other", hint="give one of them")


def show_plans(
    plans: Sequence[CapacityPlan], prices: Prices | None, *, html: Path | None, as_json: bool, is_trace: bool
) -> int:
    """Print a table with sentences, or JSON: an object for a trace, a list for engines."""
    if html is not None:
        write_page(html, page(plans, prices))
    if as_json:
        found = [plan.as_data(prices) for plan in plans]
        print_json(found[0] if is_trace else found)
    else:
        print_data("\n\n".join(plan.text(prices) for plan in plans))
    return 0


def plan_of_trace(request: PlanRequest) -> CapacityPlan:
    with ProgressDisplay("plan", delay_s=PROGRESS_AFTER_S) as progress:
        return _plan_of(request, progress.report)


def _plan_of(request: PlanRequest, report: Report) -> CapacityPlan:
    trace = collect(TraceReader(request.file, request.form), report=report)
    uses, tree, block_tokens = trace.timed_uses(), trace.tree, trace.form.block_tokens
    unique = len(tree) - 1
    simulation = Simulation(tree, uses, tracked=unique if request.is_exact else TRACKED_BLOCKS, report=report)
    capacities = request.capacities or simulation.capacities()
    block_bytes = None if request.bytes_per_token is None else block_tokens * request.bytes_per_token
    curve = curve_of(capacities, simulation.rates(request.policies, capacities), block_bytes)
    simulated = simulation.simulated_blocks
    about = "" if simulated == unique else f", {simulated:,} of them simulated"
    return CapacityPlan(
        f"{one_line(request.file.name)}: {len(uses):,} requests, {unique:,} different blocks of "
        f"{block_tokens} tokens{about}",
        curve,
        Prompts(fmean(tree.depth_tokens[one.use.prompt] for one in uses), request.prefill_tokens_per_s),
        {
            "blocks": [f"{capacity:,}" for capacity in capacities],
            **({"size": curve.names} if curve.sizes is not None else {}),
        },
        {
            "file": request.file.name,
            "requests": len(uses),
            "unique_blocks": unique,
            "simulated_blocks": simulated,
            "block_tokens": block_tokens,
            "curve": curve.as_data("capacity_blocks", capacities),
        },
    )


def curve_of(capacities: Sequence[int], rates: dict[str, list[float]], block_bytes: int | None) -> Curve:
    """Return the curve over capacities in blocks, named by their bytes if the bytes of a block are known."""
    if block_bytes is None:
        return Curve(tuple(f"{capacity:,} blocks" for capacity in capacities), None, rates)
    sizes = tuple(capacity * block_bytes for capacity in capacities)
    return Curve(tuple(map(format_size, sizes)), sizes, rates)
