"""`kvbm completion`: its option and help, and the shells."""

from __future__ import annotations

from typing import Annotated

from kvbm.errors import UsageError
from kvbm_cli.terminal.console import print_data
from kvbm_cli.terminal.options import argument, matching

COMPLETION_VARIABLE, PROGRAM = "_KVBM_COMPLETE", "kvbm"
SHELLS = ("bash", "zsh", "fish")


def shells(incomplete: str) -> list[str]:
    return matching(SHELLS, incomplete)


def completion(
    shell: Annotated[str, argument("bash|zsh|fish", "Shell to generate the script for.", shells)],
) -> None:
    """Print a shell completion script. Use it with eval "$(kvbm completion bash)"."""
    if shell not in SHELLS:
        known = ", ".join(f"`{one}`" for one in SHELLS)
        raise UsageError(f"completion is not available for `{shell}`", hint=f"supported shells: {known}")
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print_data(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETION_VARIABLE, shell=shell))
