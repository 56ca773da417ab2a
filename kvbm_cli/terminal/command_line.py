"""Command: the command of the parser, stricter about values.

An option with a value may be given once, because the parser would use the last one silently. A value must not be empty:
an empty path would mean the current directory. `~` is expanded in paths, because a shell leaves it in `--dir=~/cache`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from kvbm.errors import UsageError
from kvbm.text.outside import shortened, without_secrets


class Command(TyperCommand):
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        _check(self, ctx, args)
        rest = super().parse_args(ctx, args)
        ctx.params = {name: _expanded(value) for name, value in ctx.params.items()}
        return rest


class CommandGroup(TyperGroup):
    """A command that has subcommands, too: `kvbm bench --profile demo` and `kvbm bench report DIR`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        _check(self, ctx, args)
        rest = super().parse_args(ctx, args)
        ctx.params = {name: _expanded(value) for name, value in ctx.params.items()}
        return rest


def _check(command: TyperCommand | TyperGroup, ctx: typer.Context, args: list[str]) -> None:
    if not ctx.resilient_parsing:
        values, order = _parsed(command, ctx, args)
        for problem in _problems(values, order):
            raise UsageError(problem, hint=f"see `{ctx.command_path} --help`")
        for parameter in dict.fromkeys(order):
            given = values.get(parameter.name)
            for value in given if isinstance(given, list) else [given]:
                _require_no_url(parameter, value, command)


def _parsed(
    command: TyperCommand | TyperGroup, ctx: typer.Context, args: list[str]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the last value of each parameter by its name, and the parameters in their order."""
    try:
        values, _, order = command.make_parser(ctx).parse_args(args=list(args))
    except typer.TyperException as error:
        error.ctx = getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]  # for the hint
        raise
    return values, order


def _problems(values: dict[str, Any], order: list[Any]) -> Iterator[str]:
    for parameter in dict.fromkeys(order):
        name, value = _shown(parameter), values.get(parameter.name)
        if value == "" or (name == "`--profile`" and isinstance(value, list) and "" in value):
            yield f"{name} is empty"
        is_single = isinstance(parameter, TyperOption) and not parameter.multiple and not parameter.is_flag
        if is_single and order.count(parameter) > 1:
            yield f"{name} is given {order.count(parameter)} times, the last time as `{value}`"


def _require_no_url(parameter: Any, value: object, command: TyperCommand | TyperGroup) -> None:
    """UsageError for a URL in place of a path: as a path, it would name a directory such as `./s3:/bucket`."""
    words = set(re.split("[^A-Z]+", str(parameter.metavar)))
    if not isinstance(value, str) or not words & _PATHS or "URL" in words or (found := _URL.match(value)) is None:
        return
    from kvbm.config.values import SHARED_SCHEMES  # only here, because it imports pydantic

    scheme, rest = found["scheme"].lower(), value[found.end() :]
    kind = "a directory" if "DIR" in words else "a file"
    takes_url = any("--url" in other.opts for other in command.params)
    if scheme == "file":
        hint = f"write the path: `{shlex.quote('/' + rest.lstrip('/'))}`"
    elif takes_url and scheme in SHARED_SCHEMES:
        hint = f"for a store, use `--url {shlex.quote(without_secrets(shortened(value)))}`"
    else:
        hint = f"give the path of {kind} on this machine"
    raise UsageError(f"{_shown(parameter)} takes {kind}, not the URL `{without_secrets(shortened(value))}`", hint=hint)


_PATHS = {"DIR", "FILE", "PATH", "A", "B"}
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/{2}")


def _shown(parameter: Any) -> str:
    return f"`{parameter.opts[0] if isinstance(parameter, TyperOption) else parameter.metavar}`"


def _expanded(value: object) -> object:
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value
