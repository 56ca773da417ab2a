"""Completion for bash, zsh and fish: answers with whole words, or lets the shell complete file names.

A shell passes the line up to the cursor. A word that starts with an option name and `=` is completed after the `=`.
Bash treats `=` and `:` as ends of words and replaces only the text after them.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer._click.shell_completion import CompletionItem, add_completion_class
from typer._completion_classes import ZshComplete
from typer._completion_shared import get_completion_script

from kvbm_cli.terminal.options import ANY_FILE

PROGRAM = "kvbm"
BASH_ENDS = ("=", ":")


def bash_script(variable: str) -> str:
    return f"""\
_kvbm_completion() {{
    local IFS=$'\\n'
    COMPREPLY=( $( env _TYPER_COMPLETE_ARGS="${{COMP_LINE:0:COMP_POINT}}" _KVBM_WORD="${{COMP_WORDS[COMP_CWORD]}}" \\
                   {variable}=complete_bash "$1" ) )
    case "${{COMPREPLY[*]-}}" in
        :{ANY_FILE}) COMPREPLY=(); compopt -o default 2>/dev/null ;;
        *=) compopt -o nospace 2>/dev/null ;;
    esac
    return 0
}}

complete -F _kvbm_completion {PROGRAM}"""


def script(shell: str, variable: str) -> str:
    """Return the script that the shell evaluates once. On Tab it then runs `kvbm` with `variable` set."""
    if shell == "bash":
        return bash_script(variable)
    return get_completion_script(prog_name=PROGRAM, complete_var=variable, shell=shell)


def answer_shells() -> None:
    """Register the completion classes with the parser."""
    add_completion_class(_Bash, "bash")
    add_completion_class(_Zsh, "zsh")
    add_completion_class(_Fish, "fish")


@dataclass(frozen=True, slots=True)
class _Found:
    """`word` is the text before the cursor, `option` its start if that is an option name with `=`."""

    word: str
    option: str
    items: Sequence[CompletionItem]
    wants_files: bool


class _Shell(ZshComplete):
    """Parses the line as the scripts for zsh and fish pass it."""

    def found(self) -> _Found:
        arguments, word = self.get_completion_args()
        items = self.get_completions(arguments, word)
        option = f"{word.partition('=')[0]}=" if word.startswith("-") and "=" in word else ""
        named = [item for item in items if item.help != ANY_FILE]
        return _Found(word, option, named, wants_files=len(named) < len(items))


class _Bash(_Shell):
    def complete(self) -> str:
        found = self.found()
        if found.wants_files:
            return f":{ANY_FILE}"
        typed = os.environ.get("_KVBM_WORD", "")
        kept = len(found.word) - (0 if typed in BASH_ENDS else len(typed))
        return "\n".join(f"{found.option}{item.value}"[max(0, kept) :] for item in found.items)


class _Zsh(_Shell):
    def complete(self) -> str:
        found = self.found()
        behind = f"compset -P {shlex.quote(found.option)}; " if found.option else ""
        if found.wants_files:
            return f"{behind}_files"
        if found.items and all(item.help for item in found.items):
            described = "\n".join(map(self.format_completion, found.items))
            return f"_arguments '*: :(({described}))'"
        space = "-S ''" if all(item.value.endswith("=") for item in found.items) else ""
        return f"{behind}compadd {space} -- {shlex.join(item.value for item in found.items)}"


class _Fish(_Shell):
    def complete(self) -> str:
        found = self.found()
        if os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
            sys.exit(1 if found.wants_files else 0)
        return "\n".join(f"{found.option}{item.value}{_help_column(item)}" for item in found.items)


def _help_column(item: Any) -> str:
    return f"\t{' '.join(item.help.split())}" if item.help else ""
