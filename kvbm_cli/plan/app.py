"""`kvbm plan`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvbm_cli.bench.app import (
    BlockTokensOption,
    BytesPerTokenOption,
    ColumnsOption,
    ModelOption,
    TimeScaleOption,
    TurnsOption,
)
from kvbm_cli.terminal.options import JsonOption, flag, option, path_option


def plan(
    trace: Annotated[Path, path_option("--trace", "FILE", "Trace in Mooncake's format: .jsonl or .jsonl.gz.")],
    capacity_blocks: Annotated[
        str | None,
        option("--capacity-blocks", "N,N", "Capacities in blocks [default: shares of the trace's blocks]."),
    ] = None,
    policy: Annotated[str, option("--policy", "NAME,NAME", "Evictions: `lru`, `adaptive`.")] = "lru,adaptive",
    exact: Annotated[bool, flag("--exact", "Simulate every block, not a sample of 32,768.")] = False,
    model: ModelOption = None,
    bytes_per_token: BytesPerTokenOption = None,
    block_tokens: BlockTokensOption = 512,
    time_scale: TimeScaleOption = 1.0,
    column: ColumnsOption = None,
    turns: TurnsOption = "added",
    json: JsonOption = False,
) -> int:
    """Show the hit rates of a trace by capacity."""
    from kvbm_cli.bench.trace.command import token_bytes, trace_format
    from kvbm_cli.plan import command as body

    request = body.PlanRequest(
        file=trace,
        form=trace_format(block_tokens, time_scale, column or [], turns),
        capacities=body.parse_capacities(capacity_blocks),
        policies=body.parse_policies(policy),
        is_exact=exact,
        bytes_per_token=token_bytes(bytes_per_token, model),
    )
    return body.show_plan(request, as_json=json)
