"""Command: the command of the parser, stricter about values.

An option with a value may be given once, because the parser would use the last one silently. A value must not be empty:
an empty path would mean the current directory. `~` is expanded in paths, because a shell leaves it in `--dir=~/cache`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from kvbm.errors import UsageError


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


def _parsed(
    command: TyperCommand | TyperGroup, ctx: typer.Context, args: list[str]
) -> tuple[dict[str, Any], list[Any]]:
    """Returns the last value of each parameter by its name, and the parameters in their order."""
    try:
        values, _, order = command.make_parser(ctx).parse_args(args=list(args))
    except typer.TyperException as error:
        error.ctx = getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]  # for the hint
        raise
    return values, order


def _problems(values: dict[str, Any], order: list[Any]) -> Iterator[str]:
    for parameter in dict.fromkeys(order):
        name, value = _shown(parameter), values.get(parameter.name)
        if value == "":
            yield f"{name} is empty"
        is_single = isinstance(parameter, TyperOption) and not parameter.multiple and not parameter.is_flag
        if is_single and order.count(parameter) > 1:
            yield f"{name} is given {order.count(parameter)} times, the last time as `{value}`"


def _shown(parameter: Any) -> str:
    return f"`{parameter.opts[0] if isinstance(parameter, TyperOption) else parameter.metavar}`"


def _expanded(value: object) -> object:
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value
