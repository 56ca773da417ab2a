"""Errors of the command line's parser, in the form of our own errors."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence

import typer

from kvbm.types import MAX_SECONDS
from kvbm_cli.terminal.show_error import show_error

NUMBERS = {  # by option, or else by metavar
    "SECONDS": f"a number of seconds from 0 to {MAX_SECONDS}, such as `30`",
    "--prefill-tokens-per-s": "a number of tokens per second above 0, such as `5000`",
    "--sample": "a whole number of objects of at least 1, such as `100`",
    "--lines": "a number of lines, such as `20`",
    "--rate": "a number of requests per second above 0, such as `2`",
    "--concurrency": "a whole number of sessions from 1 to 100000, such as `8`",
    "--duration": f"a number of seconds above 0, up to {MAX_SECONDS}, such as `30`",
    "--pairs": "a whole number from 1 to 100, such as `3`",
    "--time-scale": "a number from 0.000001 to 1000000, such as `0.5`",
    "--block-tokens": "a whole number from 1 to 65536, such as `512`",
}
INSTEAD = {"restart": "`kvbm stop`, then `kvbm serve`"}
NEAR = 0.7


def show_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> int:
    """Print an error and return its exit code. The parser gives the nearest name as a list or inside its text."""
    context = getattr(error, "ctx", None)
    possible = getattr(error, "possibilities", None)
    text = _number_error(error) or (error.message if possible else error.format_message())
    message, _, suggested = text.replace("'", "`").rstrip(".?").partition(". Did you mean ")
    nearest = f"`{possible[0]}`" if possible else _if_near(message, suggested)
    if message.startswith("Missing option `--profile`") and arguments[1:2] and arguments[1][:1] not in ("", "-"):
        nearest = f"`kvbm {arguments[0]} --profile {shlex.quote(arguments[1])}`"
    command = context.command_path if context is not None else "kvbm"
    show_error(
        message[0].lower() + message[1:], hint=f"did you mean {nearest}?" if nearest else f"see `{command} --help`"
    )
    return error.exit_code


def _number_error(error: typer.TyperException) -> str | None:
    """Names the value of a number option that the parser refuses; the parser's own text does not."""
    parameter, wrong = getattr(error, "param", None), error.__cause__
    if parameter is None or wrong is None:
        return None
    numbers = NUMBERS.get(parameter.opts[0]) or NUMBERS.get(parameter.metavar or "")
    if numbers is None:
        return None
    return f"`{parameter.opts[0]}` requires {numbers}, not `{wrong.errors()[0]['input']}`"  # type: ignore[attr-defined]


def _if_near(message: str, suggested: str) -> str:
    """Return the suggestion if it is close; the parser suggests `status` even for `restart`."""
    given = message.partition("`")[2].partition("`")[0]
    if given in INSTEAD:
        return INSTEAD[given]
    return suggested if difflib.SequenceMatcher(None, given, suggested.strip("`")).ratio() > NEAR else ""
