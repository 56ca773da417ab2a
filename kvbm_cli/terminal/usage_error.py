"""Errors of the command line's parser, in the form of our own errors."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence

import typer

from kvbm_cli.terminal.show_error import show_error

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
    parameter, errors = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if parameter is None or errors is None:
        return None
    from kvbm.config.mistakes import expectation_of  # only here, because it imports pydantic

    detail = errors()[0]
    if (expected := expectation_of(detail)) is None:
        return None
    return f"`{parameter.opts[0]}` {expected}, not `{detail['input']}`"


def _if_near(message: str, suggested: str) -> str:
    """Return the suggestion if it is close; the parser suggests `status` even for `restart`."""
    given = message.partition("`")[2].partition("`")[0]
    if given in INSTEAD:
        return INSTEAD[given]
    return suggested if difflib.SequenceMatcher(None, given, suggested.strip("`")).ratio() > NEAR else ""
