"""How commands declare options and arguments. Each room declares its commands in `app.py`, next to their bodies.

A declared command imports its body when it runs, so that `kvbm --help` is fast and needs no torch. At each Tab a shell
runs `kvbm`, so completers are fast too. They fail silently: a message would appear in the middle of the command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer


def matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def names_in(directory: Path, incomplete: str) -> list[str]:
    """Complete the name of a YAML file of the directory."""
    return matching(sorted(path.stem for path in directory.glob("*.yaml")), incomplete)


def option(names: str, metavar: str, help_: str, completer: Any = None, **limits: Any) -> Any:
    """Declare an option with a value. `names` are separated by a space; `completer` offers values."""
    return typer.Option(*names.split(), metavar=metavar, help=help_, autocompletion=completer, **limits)


def path_option(names: str, metavar: str, help_: str) -> Any:
    """Declare an option with a path. The parser does not touch the file, whose file system may hang: each command
    reports what is wrong with it."""
    return option(names, metavar, help_, parser=Path)


def flag(names: str, help_: str) -> Any:
    return typer.Option(*names.split(), help=help_)


def argument(metavar: str, help_: str, completer: Any = None, **how: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help_, autocompletion=completer, **how)


def path_argument(metavar: str, help_: str) -> Any:
    """Declare an argument with a path, as `_path_option`."""
    return argument(metavar, help_, parser=Path)


Text = str | None
JsonOption = Annotated[bool, flag("--json", "Print JSON to stdout.")]


def command_group(help_: str) -> typer.Typer:
    """Return a command that has subcommands only, and shows its help without one."""
    group = typer.Typer(help=help_, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(help_without_command)
    return group


def help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
