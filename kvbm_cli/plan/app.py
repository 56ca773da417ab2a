"""`kvbm plan`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvbm_cli.bench.app import (
    BOTH_EVICTIONS,
    BlockTokensOption,
    BytesPerTokenOption,
    ColumnsOption,
    LimitOption,
    ModelOption,
    PolicyOption,
    SessionsOption,
    TimeScaleOption,
    TurnsOption,
)
from kvbm_cli.runs.app import LivingRunArgument
from kvbm_cli.terminal.options import JsonOption, flag, option, path_option


def plan(
    run: LivingRunArgument = None,
    url: Annotated[
        str | None, option("--url", "URL", "Address of an engine or of its metrics, instead of a run.")
    ] = None,
    trace: Annotated[
        Path | None, path_option("--trace", "FILE", "Trace in Mooncake's format: .jsonl or .jsonl.gz.")
    ] = None,
    capacity_blocks: Annotated[
        str | None,
        option("--capacity-blocks", "N,N", "Capacities in blocks [default: shares of the trace's blocks]."),
    ] = None,
    policy: PolicyOption = BOTH_EVICTIONS,
    exact: Annotated[bool, flag("--exact", "Simulate every block, not a sample of 32,768.")] = False,
    model: ModelOption = None,
    bytes_per_token: BytesPerTokenOption = None,
    block_tokens: BlockTokensOption = 512,
    time_scale: TimeScaleOption = 1.0,
    column: ColumnsOption = None,
    turns: TurnsOption = "added",
    limit: LimitOption = None,
    sessions: SessionsOption = None,
    prefill_rate: Annotated[
        float | None,
        option("--prefill-rate", "TOKENS", "Prompt tokens that the engine computes per second.", min=1e-3, max=1e9),
    ] = None,
    memory_price: Annotated[
        float | None,
        option("--memory-price", "PRICE", "Price of a gigabyte of memory per month.", min=0.0, max=1e9),
    ] = None,
    engine_price: Annotated[
        float | None,
        option("--engine-price", "PRICE", "Price of an engine's accelerators per hour.", min=1e-9, max=1e9),
    ] = None,
    html: Annotated[
        Path | None, path_option("--html", "FILE", "Also write a page with the curves to this file.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Show the hit rates of other capacities.

    For a running engine with `metrics.capacities`, or for a trace.
    """
    from kvbm_cli.bench.trace.command import parse_policies, token_bytes, trace_format
    from kvbm_cli.plan import command as body

    body.require_one_source(run, url, trace)
    prices = body.prices_of(memory_price, engine_price)
    if trace is None:
        of_traces = {"capacity-blocks": capacity_blocks, "exact": exact, "model": model, "prefill-rate": prefill_rate}
        of_files = {"bytes-per-token": bytes_per_token, "column": column, "limit": limit, "sessions": sessions}
        body.require_trace_for({**of_traces, **of_files})
        from kvbm_cli.plan.live import live_plans
        from kvbm_cli.top.watched import of_runs, of_url

        plans = live_plans(of_runs(run) if url is None else of_url(url))
        return body.show_plans(plans, prices, html=html, as_json=json, is_trace=False)
    request = body.PlanRequest(
        file=trace,
        form=trace_format(block_tokens, time_scale, column or [], turns, limit, sessions),
        capacities=body.parse_capacities(capacity_blocks),
        policies=parse_policies(policy),
        is_exact=exact,
        bytes_per_token=token_bytes(bytes_per_token, model),
        prefill_tokens_per_s=prefill_rate,
    )
    return body.show_plans([body.plan_of_trace(request)], prices, html=html, as_json=json, is_trace=True)
