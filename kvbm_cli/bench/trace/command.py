"""`kvbm bench trace FILE`: what a trace consists of, and which capacity a cache needs for it. Starts no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbm.config.sizes import MAX_BYTES, parse_size
from kvbm.errors import UsageError
from kvbm_cli.bench.trace.analysis import analyse
from kvbm_cli.bench.trace.show_trace import WIDTH, as_trace_data, show_trace
from kvbm_cli.bench.trace.trace_request import DEFAULT_BLOCK_TOKENS, TraceFormat, Turns, parse_columns
from kvbm_cli.profile.size import size_of
from kvbm_cli.size.request import SizeRequest
from kvbm_cli.terminal.console import print_json
from kvbm_cli.terminal.progress import ProgressDisplay

PROGRESS_AFTER_S = 2.0


def trace(
    file: Path,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    bytes_per_token: str | None = None,
    model: str | None = None,
    time_scale: float = 1.0,
    columns: Sequence[str] = (),
    turns: str = Turns.ADDED,
    as_json: bool = False,
) -> int:
    """Print the analysis. `bytes_per_token` is a number or a size such as `128KiB`; `model` is as for `kvbm size`."""
    form = TraceFormat(block_tokens, time_scale, parse_columns(list(columns)), _turns(turns))
    token_bytes = _token_bytes(bytes_per_token, model)
    with ProgressDisplay("trace", delay_s=PROGRESS_AFTER_S) as progress:
        analysis = analyse(file, form, report=progress.report)
    if as_json:
        print_json(as_trace_data(analysis, file.name, bytes_per_token=token_bytes))
    else:
        from rich.console import Console

        console = Console(width=WIDTH, markup=False, emoji=False)
        show_trace(analysis, file.name, console, bytes_per_token=token_bytes)
    return 0


def _turns(text: str) -> Turns:
    try:
        return Turns(text)
    except ValueError:
        names = " or ".join(f"`{one}`" for one in Turns)
        raise UsageError(f"`--turns` must be {names}, not `{text}`") from None


def _token_bytes(given: str | None, model: str | None) -> int | None:
    """Return the bytes of a token's KV. SizeUnknown if only the engine of the model knows them."""
    if given is not None and model is not None:
        raise UsageError("use either `--bytes-per-token` or `--model`: a model sets the bytes of a token")
    if model is not None:
        request = SizeRequest(None, model, [], {})
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
