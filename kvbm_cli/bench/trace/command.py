"""`kvbm bench trace FILE`: what a trace consists of, and which capacity a cache needs for it. Starts no engine.

The result is JSON data, or a page of it of at most 80 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbm.config.sizes import MAX_BYTES, format_size, parse_size
from kvbm.core.shadow_caches import EVICTIONS
from kvbm.errors import UsageError
from kvbm.text.outside import one_line
from kvbm_cli.bench.trace.analysis import analyse
from kvbm_cli.bench.trace.request import TraceFormat, Turns, parse_columns
from kvbm_cli.profile.size import size_of
from kvbm_cli.size.request import SizeRequest
from kvbm_cli.terminal.console import WIDTH, print_data, print_json, table
from kvbm_cli.terminal.progress import ProgressDisplay

PROGRESS_AFTER_S = 2.0


def trace(
    file: Path,
    form: TraceFormat,
    *,
    bytes_per_token: str | None = None,
    model: str | None = None,
    policies: Sequence[str] = EVICTIONS,
    as_json: bool = False,
) -> int:
    """Print the analysis, with simulations of `policies`.

    `bytes_per_token` is a number or a size such as `128KiB`; `model` is as for `kvbm size`."""
    per_token = token_bytes(bytes_per_token, model)
    with ProgressDisplay("trace", delay_s=PROGRESS_AFTER_S) as progress:
        data = analyse(file, form, policies=policies, bytes_per_token=per_token, report=progress.report)
    if as_json:
        print_json(data)
    else:
        print_data(shown_trace(data))
    return 0


def trace_format(
    block_tokens: int,
    time_scale: float,
    columns: Sequence[str],
    turns: str,
    request_limit: int | None,
    session_limit: int | None,
) -> TraceFormat:
    """Return the format from the options of the command line."""
    columns_by_field = parse_columns(list(columns))
    return TraceFormat(block_tokens, time_scale, columns_by_field, _turns(turns), request_limit, session_limit)


def _turns(text: str) -> Turns:
    try:
        return Turns(text)
    except ValueError:
        names = " or ".join(f"`{one}`" for one in Turns)
        raise UsageError(f"`--turns` must be {names}, not `{text}`") from None


def parse_policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in EVICTIONS:
            known = " or ".join(f"`{one}`" for one in EVICTIONS)
            raise UsageError(f"`--policy` must be {known}, not `{one_line(name[:40])}`")
    return names


def token_bytes(given: str | None, model: str | None) -> int | None:
    """Return the bytes of a token's KV. SizeUnknown if only the engine of the model knows them."""
    if given is not None and model is not None:
        raise UsageError("use either `--bytes-per-token` or `--model`: a model sets the bytes of a token")
    if model is not None:
        request = SizeRequest((), model, [], {})
        return size_of(request.resolve(), facts=request.facts()).token_bytes
    if given is None:
        return None
    if given.isascii() and given.isdigit():
        if 0 < len(given) < 20 and 0 < int(given) <= MAX_BYTES:
            return int(given)
        raise UsageError(f"`--bytes-per-token` must be from 1 to {MAX_BYTES}, not `{given[:40]}`")
    try:
        return parse_size(given)
    except ValueError as error:
        raise UsageError(f"`--bytes-per-token` {error}", hint="for example `131072` or `128KiB`") from None


def shown_trace(data: Mapping[str, Any]) -> str:
    """Return the page of an analysis."""
    parts = [_facts(data), _lengths(data), _sharing(data)]
    if data["capacity_for_share_of_ideal"]:
        parts.append(_capacities(data))
    if data["evictions"]:
        parts.append(_evictions(data))
    if data["notes"]:
        lines = (f"note: {one_line(note)}" for note in data["notes"])
        parts.append([textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in lines])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _facts(data: Mapping[str, Any]) -> list[str]:
    line = f"{one_line(data['file'])}: {data['requests']:,} requests"
    if data["duration_s"] is not None:
        line += f" in {_duration(data['duration_s'])}"
        if (rate := data["requests_per_s"]) is not None:
            line += f", {rate:.3g} per second"
    if data["largest_turn"] == 1:
        return [line]
    per_session = data["requests"] / data["sessions"]
    return [
        line,
        f"{data['sessions']:,} sessions of {per_session:.1f} turns on average, {data['largest_turn']:,} at most",
    ]


def _lengths(data: Mapping[str, Any]) -> list[str]:
    heads = tuple(data["prompt_tokens"])
    tokens = (("prompt", data["prompt_tokens"]), ("answer", data["answer_tokens"]))
    rows = [(name, *(f"{one:,.0f}" for one in lengths.values())) for name, lengths in tokens if lengths is not None]
    found = [_table([("tokens per request", *heads), *rows])]
    if data["pauses_s"] is not None:
        pauses = (f"{one:,.1f}" for one in data["pauses_s"].values())
        found += ["", _table([("seconds between turns", *heads), ("pause", *pauses)])]
    return found


def _sharing(data: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{data['unique_blocks']:,} different blocks of {data['block_tokens']} tokens; "
        f"{data['repeated_block_uses'] / data['block_uses']:.1%} of {data['block_uses']:,} block uses are repeats"
    ]
    if data["shared_prefixes"]:
        lines.append("most common prefixes:")
        lines += [f"  {one['tokens']:,} tokens in {one['requests']:,} requests" for one in data["shared_prefixes"]]
    lines += ["", f"ideal hit rate: {data['ideal_hit_rate']:.1%} of the prompt tokens, with a cache of unlimited size"]
    return lines


def _capacities(data: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"{one['share']:.0%}", f"{one['hit_rate']:.1%}", f"{one['tokens']:,}", f"{one['blocks']:,}", *_size(one))
        for one in data["capacity_for_share_of_ideal"]
    ]
    size = ["size"] if data["bytes_per_token"] else []
    return [_table([("share of the ideal", "hit rate", "tokens", "blocks", *size), *rows])]


def _evictions(data: Mapping[str, Any]) -> list[str]:
    """Return the hit rates by eviction, and the capacity at which each has nearly all hits."""
    evictions = data["evictions"]
    heads = ["size"] if data["bytes_per_token"] else []
    rows = [("blocks", *heads, *(one["policy"] for one in evictions))]
    for points in zip(*(one["curve"] for one in evictions), strict=True):
        rates = (f"{one['hit_rate']:.1%}" for one in points)
        rows.append((f"{points[0]['blocks']:,}", *_size(points[0]), *rates))
    lines = ["Simulated hit rates of blocks, by eviction", "", _table(rows), ""]
    lines.append(f"{evictions[0]['share_of_hits']:.0%} of the hits of an unlimited cache require")
    for one in evictions:
        least = one["capacity_for_share_of_hits"]
        size = "".join(f", {size}," for size in _size(least))
        lines.append(f"  {least['blocks']:,} blocks{size} with `{one['policy']}`")
    return lines


def _size(capacity: Mapping[str, Any]) -> list[str]:
    """Nothing if the bytes of a token are not known."""
    return [] if capacity["bytes"] is None else [format_size(capacity["bytes"])]


def _table(rows: Sequence[Sequence[str]]) -> str:
    return table(rows, right=range(1, len(rows[0])))


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.4g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 120 else f"{minutes} min"
