"""`kvbm bench trace FILE`: what a trace consists of, and which capacity a cache needs for it. Starts no engine.

The result is JSON data, or a page of at most 80 columns.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from kvbm.config.sizes import MAX_BYTES, format_size, parse_size
from kvbm.core.shadow_caches import EVICTIONS
from kvbm.errors import UsageError
from kvbm.text.outside import one_line
from kvbm_cli.bench.trace.analysis import (
    NEARLY_ALL,
    EvictionCurves,
    TraceAnalysis,
    analyse,
    has_sessions,
    notes,
)
from kvbm_cli.bench.trace.request import TraceFormat, Turns, parse_columns
from kvbm_cli.profile.size import size_of
from kvbm_cli.size.request import SizeRequest
from kvbm_cli.terminal.console import WIDTH, print_data, print_json, table
from kvbm_cli.terminal.progress import ProgressDisplay

PROGRESS_AFTER_S = 2.0
SHARES = (0.5, 0.8, 0.9, 0.95, 1.0)
CURVE_POINTS = 64


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
        analysis = analyse(file, form, policies=policies, report=progress.report)
    if as_json:
        print_json(as_trace_data(analysis, file.name, bytes_per_token=per_token))
    else:
        print_data(shown_trace(analysis, file.name, bytes_per_token=per_token))
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


def as_trace_data(analysis: TraceAnalysis, name: str, *, bytes_per_token: int | None) -> dict[str, Any]:
    """All numbers, not rounded. Capacities are in tokens, blocks and, if the bytes of a token are known, bytes."""
    curve = analysis.curve
    return {
        "file": name,
        "requests": analysis.requests,
        "sessions": analysis.sessions,
        "largest_turn": analysis.largest_turn,
        "duration_s": analysis.duration_s,
        "requests_per_s": _rate(analysis),
        "prompt_tokens": asdict(analysis.prompt),
        "answer_tokens": analysis.answer and asdict(analysis.answer),
        "pauses_s": analysis.pauses and asdict(analysis.pauses),
        "block_tokens": analysis.form.block_tokens,
        "bytes_per_token": bytes_per_token,
        "unique_blocks": analysis.unique_blocks,
        "unique_tokens": analysis.unique_tokens,
        "block_uses": analysis.block_uses,
        "repeated_block_uses": analysis.repeated_block_uses,
        "shared_prefixes": [asdict(one) for one in analysis.shared],
        "ideal_hit_rate": curve.ideal,
        "capacity_for_share_of_ideal": [
            {"share": share, "hit_rate": rate, **_capacity(analysis, tokens, bytes_per_token)}
            for share, rate, tokens in _shares(analysis)
        ],
        "curve": [
            {"hit_rate": rate, **_capacity(analysis, tokens, bytes_per_token)} for rate, tokens in _points(analysis)
        ],
        "evictions": _evictions_data(analysis, bytes_per_token),
        "notes": notes(analysis),
    }


def shown_trace(analysis: TraceAnalysis, name: str, *, bytes_per_token: int | None) -> str:
    parts = [_facts(analysis, name), _lengths(analysis), _sharing(analysis)]
    if analysis.curve.ideal:
        parts.append(_capacities(analysis, bytes_per_token))
    if analysis.evictions is not None:
        parts.append(_evictions(analysis, analysis.evictions, bytes_per_token))
    if found := notes(analysis):
        lines = (f"note: {one_line(note)}" for note in found)
        parts.append([textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in lines])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _facts(analysis: TraceAnalysis, name: str) -> list[str]:
    line = f"{one_line(name)}: {analysis.requests:,} requests"
    if analysis.duration_s is not None:
        line += f" in {_duration(analysis.duration_s)}"
        if (rate := _rate(analysis)) is not None:
            line += f", {rate:.3g} per second"
    if not has_sessions(analysis):
        return [line]
    per_session = analysis.requests / analysis.sessions
    return [
        line,
        f"{analysis.sessions:,} sessions of {per_session:.1f} turns on average, {analysis.largest_turn:,} at most",
    ]


def _lengths(analysis: TraceAnalysis) -> list[str]:
    heads = ("mean", "p50", "p90", "p99", "max")
    tokens = (("prompt", analysis.prompt), ("answer", analysis.answer))
    rows = [(name, *(f"{one:,.0f}" for one in astuple(lengths))) for name, lengths in tokens if lengths is not None]
    found = [_table([("tokens per request", *heads), *rows])]
    if analysis.pauses is not None:
        pauses = (f"{one:,.1f}" for one in astuple(analysis.pauses))
        found += ["", _table([("seconds between turns", *heads), ("pause", *pauses)])]
    return found


def _sharing(analysis: TraceAnalysis) -> list[str]:
    lines = [
        f"{analysis.unique_blocks:,} different blocks of {analysis.form.block_tokens} tokens; "
        f"{analysis.repeated_block_uses / analysis.block_uses:.1%} of {analysis.block_uses:,} block uses are repeats"
    ]
    if analysis.shared:
        lines.append("most common prefixes:")
        lines += [f"  {one.tokens:,} tokens in {one.requests:,} requests" for one in analysis.shared]
    lines += ["", f"ideal hit rate: {analysis.curve.ideal:.1%} of the prompt tokens, with a cache of unlimited size"]
    return lines


def _capacities(analysis: TraceAnalysis, bytes_per_token: int | None) -> list[str]:
    rows = [("share of the ideal", "hit rate", "tokens", "blocks", *(["size"] if bytes_per_token else []))]
    for share, rate, tokens in _shares(analysis):
        sizes = [format_size(tokens * bytes_per_token)] if bytes_per_token else []
        rows.append((f"{share:.0%}", f"{rate:.1%}", f"{tokens:,}", f"{_blocks(analysis, tokens):,}", *sizes))
    return [_table(rows)]


def _evictions(analysis: TraceAnalysis, curves: EvictionCurves, bytes_per_token: int | None) -> list[str]:
    """Return the hit rates by eviction, and the capacity at which each has nearly all hits."""

    def sizes(blocks: int) -> list[str]:
        return [format_size(blocks * analysis.form.block_tokens * bytes_per_token)] if bytes_per_token else []

    rows = [("blocks", *(["size"] if bytes_per_token else []), *curves.rates)]
    for capacity, rates in zip(curves.capacities, zip(*curves.rates.values(), strict=True), strict=True):
        rows.append((f"{capacity:,}", *sizes(capacity), *(f"{rate:.1%}" for rate in rates)))
    return [
        *("Simulated hit rates of blocks, by eviction", "", _table(rows), ""),
        f"{NEARLY_ALL:.0%} of the hits of an unlimited cache require",
        *(
            f"  {blocks:,} blocks{''.join(f', {size},' for size in sizes(blocks))} with `{policy}`"
            for policy, blocks in curves.nearly_all.items()
        ),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    return table(rows, right=range(1, len(rows[0])))


def _evictions_data(analysis: TraceAnalysis, bytes_per_token: int | None) -> list[dict[str, Any]]:
    """Return one entry per simulated eviction; none for a trace in which nothing repeats."""
    curves = analysis.evictions
    if curves is None:
        return []

    def capacity(blocks: int) -> dict[str, int | None]:
        return _capacity(analysis, blocks * analysis.form.block_tokens, bytes_per_token)

    return [
        {
            "policy": policy,
            "share_of_hits": NEARLY_ALL,
            "capacity_for_share_of_hits": capacity(curves.nearly_all[policy]),
            "curve": [
                {"hit_rate": rate, **capacity(blocks)} for blocks, rate in zip(curves.capacities, rates, strict=True)
            ],
        }
        for policy, rates in curves.rates.items()
    ]


def _shares(analysis: TraceAnalysis) -> list[tuple[float, float, int]]:
    """Share of the ideal, hit rate and capacity in tokens; empty if nothing repeats."""
    curve = analysis.curve
    found = [(share, curve.capacity_for(share)) for share in SHARES]
    return [(share, curve.hit_rate(tokens), tokens) for share, tokens in found if tokens]


def _points(analysis: TraceAnalysis) -> list[tuple[float, int]]:
    """Hit rate and capacity in tokens, evenly spaced on a logarithmic axis from one block to all that a hit needs."""
    curve = analysis.curve
    if not curve.distances:
        return []
    last = curve.distances[-1]
    first = min(analysis.form.block_tokens, last)
    step = math.log(last / first) / (CURVE_POINTS - 1)
    capacities = sorted({*(round(first * math.exp(step * number)) for number in range(CURVE_POINTS - 1)), last})
    return [(curve.hit_rate(tokens), tokens) for tokens in capacities]


def _capacity(analysis: TraceAnalysis, tokens: int, bytes_per_token: int | None) -> dict[str, int | None]:
    size = tokens * bytes_per_token if bytes_per_token else None
    return {"tokens": tokens, "blocks": _blocks(analysis, tokens), "bytes": size}


def _blocks(analysis: TraceAnalysis, tokens: int) -> int:
    return math.ceil(tokens / analysis.form.block_tokens)


def _rate(analysis: TraceAnalysis) -> float | None:
    return analysis.requests / analysis.duration_s if analysis.duration_s else None


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.4g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 120 else f"{minutes} min"
