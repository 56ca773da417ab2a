"""`kvbm completion`: its option and help, and the shells. completion_shells.py connects the completers to them."""

from __future__ import annotations

from typing import Annotated

from kvbm.errors import UsageError
from kvbm_cli.terminal.console import print_data
from kvbm_cli.terminal.options import argument, matching

COMPLETION_VARIABLE = "_KVBM_COMPLETE"
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
    from kvbm_cli.terminal.completion_shells import script

    print_data(script(shell, COMPLETION_VARIABLE))
