"""The result of `kvbm bench trace`: as JSON data, and as a page of at most 80 columns."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvbm.config.sizes import format_size
from kvbm.text.outside import one_line
from kvbm_cli.bench.trace.analysis import Lengths, TraceAnalysis, has_sessions, notes
from kvbm_cli.bench.trace.plot import plot_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 80
SHARES = (0.5, 0.8, 0.9, 0.95, 1.0)
CURVE_POINTS = 64


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
        "prompt_tokens": _lengths_data(analysis.prompt),
        "answer_tokens": _lengths_data(analysis.answer),
        "block_tokens": analysis.form.block_tokens,
        "bytes_per_token": bytes_per_token,
        "unique_blocks": analysis.unique_blocks,
        "unique_tokens": analysis.unique_tokens,
        "block_uses": analysis.block_uses,
        "repeated_block_uses": analysis.repeated_block_uses,
        "shared_prefixes": [asdict(one) for one in analysis.shared],
        "ideal_hit_rate": None if curve is None else curve.ideal,
        "capacity_for_share_of_ideal": [
            {"share": share, "hit_rate": rate, **_capacity(analysis, tokens, bytes_per_token)}
            for share, rate, tokens in _shares(analysis)
        ],
        "curve": [
            {"hit_rate": rate, **_capacity(analysis, tokens, bytes_per_token)} for rate, tokens in _points(analysis)
        ],
        "notes": notes(analysis),
    }


def show_trace(analysis: TraceAnalysis, name: str, console: Console, *, bytes_per_token: int | None) -> None:
    for line in _facts(analysis, name):
        console.print(line, highlight=False)
    console.print(_lengths_table(analysis))
    for line in _sharing(analysis):
        console.print(line, highlight=False)
    if analysis.curve is not None and analysis.curve.ideal:
        console.print(_capacity_table(analysis, bytes_per_token))
        console.print("Hit rate of an LRU cache, by its capacity", highlight=False)
        for line in plot_lines(analysis.curve, bytes_per_token=bytes_per_token):
            console.print(line, highlight=False, no_wrap=True)
    for note in notes(analysis):
        console.print(f"note: {one_line(note)}", highlight=False)


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


def _lengths_table(analysis: TraceAnalysis) -> Table:
    table = _table("tokens per request", "mean", "p50", "p90", "p99", "max")
    for label, lengths in (("prompt", analysis.prompt), ("answer", analysis.answer)):
        if lengths is not None:
            numbers = (lengths.mean, lengths.p50, lengths.p90, lengths.p99, lengths.max)
            table.add_row(label, *(f"{number:,.0f}" for number in numbers))
    return table


def _sharing(analysis: TraceAnalysis) -> list[str]:
    if analysis.curve is None:
        return ["no request has a known length, so there are no hit rates"]
    lines = [
        f"{analysis.unique_blocks:,} different blocks of {analysis.form.block_tokens} tokens; "
        f"{analysis.repeated_block_uses / analysis.block_uses:.1%} of {analysis.block_uses:,} block uses are repeats"
    ]
    if analysis.shared:
        lines.append("most common prefixes:")
        lines += [f"  {one.tokens:,} tokens in {one.requests:,} requests" for one in analysis.shared]
    lines += ["", f"ideal hit rate: {analysis.curve.ideal:.1%} of the prompt tokens, with a cache of unlimited size"]
    return lines


def _capacity_table(analysis: TraceAnalysis, bytes_per_token: int | None) -> Table:
    table = _table("share of the ideal", "hit rate", "tokens", "blocks", *(["size"] if bytes_per_token else []))
    for share, rate, tokens in _shares(analysis):
        sizes = [format_size(tokens * bytes_per_token)] if bytes_per_token else []
        table.add_row(f"{share:.0%}", f"{rate:.1%}", f"{tokens:,}", f"{_blocks(analysis, tokens):,}", *sizes)
    return table


def _table(label: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column(label, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _shares(analysis: TraceAnalysis) -> list[tuple[float, float, int]]:
    """Share of the ideal, hit rate and capacity in tokens; empty if nothing repeats."""
    curve = analysis.curve
    found = [] if curve is None else [(share, curve.capacity_for(share)) for share in SHARES]
    return [(share, curve.hit_rate(tokens), tokens) for share, tokens in found if curve is not None and tokens]


def _points(analysis: TraceAnalysis) -> list[tuple[float, int]]:
    """Hit rate and capacity in tokens, evenly spaced on a logarithmic axis from one block to all that a hit needs."""
    curve = analysis.curve
    if curve is None or not curve.distances:
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


def _lengths_data(lengths: Lengths | None) -> dict[str, Any] | None:
    return None if lengths is None else asdict(lengths)


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.4g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 120 else f"{minutes} min"
