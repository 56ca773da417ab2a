"""Confirmation: asks before something is removed."""

from __future__ import annotations

import sys

from kvbm.errors import UsageError
from kvbm_cli.terminal.console import print_question


def is_confirmed(question: str) -> bool:
    """Asks on the terminal. UsageError if there is none."""
    if not sys.stdin.isatty():
        raise UsageError("cannot ask for confirmation: stdin is not a terminal", hint="add `--yes`")
    print_question(f"{question} [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
