"""The command `kvbm`: assembles the commands, and is the one place that converts a failure to text and an exit code.

Each command is declared, with its options and its help, in `app.py` of its room, next to its body.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvbm.errors import KvbmError
from kvbm_cli.bench.app import bench_app
from kvbm_cli.cache.app import cache_app
from kvbm_cli.completion import COMPLETION_VARIABLE, completion
from kvbm_cli.doctor.app import doctor
from kvbm_cli.plan.app import plan
from kvbm_cli.profile.app import profile_app
from kvbm_cli.runs.app import logs, status, stop
from kvbm_cli.serve.app import serve
from kvbm_cli.size.app import size
from kvbm_cli.system.filesystem import problem_of
from kvbm_cli.terminal import streams
from kvbm_cli.terminal.command_line import Command
from kvbm_cli.terminal.options import flag, help_without_command
from kvbm_cli.terminal.show_error import show_kvbm_error
from kvbm_cli.terminal.usage_error import show_usage_error
from kvbm_cli.top.app import top
from kvbm_cli.try_.app import try_

INTERRUPTED = 130
OTHERS_WRITE = 0o022
WITHOUT_RUNS = frozenset({"completion", "--version", "--help", "-h"})
TIER_OPTION = "--dir"  # each command with it says what a tier that hangs means

app = typer.Typer(
    name="kvbm",
    help="Offload KV cache blocks of an LLM engine to host memory, disk and a shared store, and measure the effect.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (serve, status, top, stop, logs, size, plan, doctor, completion):
    app.command(cls=Command)(command)
# Everything from the first word of the engine's command on is its own.
app.command("try", cls=Command, context_settings={"allow_interspersed_args": False})(try_)
for name, group in (("profile", profile_app), ("cache", cache_app), ("bench", bench_app)):
    app.add_typer(group, name=name)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"kvbm {version('kvbm-cli')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `run` reads --debug itself."""
    help_without_command(context)


def main() -> None:
    os.umask(os.umask(OTHERS_WRITE) | OTHERS_WRITE)  # no file of kvbm or of its engines is writable by others
    streams.repair()
    sys.exit(run(sys.argv[1:]))


def _require_answers(arguments: Sequence[str]) -> None:
    """Raise EnvironmentProblem if a path of the command line, or the directory of runs, is on a file system that hangs:
    whatever a command does with it could not be interrupted. Directories of tiers are left to the commands."""
    from kvbm_cli.system.answering import require_all_answer
    from kvbm_cli.system.filesystem import state_directory

    paths, option = [], ""
    for text in arguments:
        is_option = text.startswith("-")
        name, _, value = text.partition("=") if is_option else (option, "", text)
        if value and name != TIER_OPTION and "://" not in value:
            paths.append(value)
        option = text if is_option else ""
    if WITHOUT_RUNS.isdisjoint(arguments[:1]):
        with contextlib.suppress(RuntimeError):  # without a home, which the command reports
            paths.append(str(state_directory()))
    require_all_answer(paths)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Prints failures; raises them only with --debug."""
    if COMPLETION_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        _require_answers(arguments)
        result = typer.main.get_command(app).main(args=list(arguments), prog_name="kvbm", standalone_mode=False)
        sys.stdout.flush()
    except KvbmError as error:
        if "--debug" in arguments:
            raise
        show_kvbm_error(error)
        return error.exit_code
    except typer.TyperException as error:
        return show_usage_error(error, arguments)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return streams.BROKEN_PIPE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the parser exits with 1 then
            return streams.BROKEN_PIPE
        raise
    except Exception as error:
        if "--debug" in arguments:
            raise
        problem = problem_of(error)
        if problem is None:
            from kvbm_cli.terminal.crash_report import show_bug

            return show_bug(error, arguments)
        show_kvbm_error(problem)
        return problem.exit_code
    return result if isinstance(result, int) else 0
