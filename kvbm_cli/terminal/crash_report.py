"""Crash reports: the traceback of an unexpected exception goes to a file in the state directory."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from kvbm.host.directories import make_private_directories
from kvbm.text.outside import without_secrets
from kvbm_cli.terminal.show_error import show_error

A_BUG = 70  # exit code EX_SOFTWARE of sysexits.h
KEPT_REPORTS = 20
LONGEST_REPORT = 200_000


def show_bug(error: Exception, arguments: Sequence[str]) -> int:
    """Print an unexpected exception, save its report, and return the exit code."""
    saved = save_report(error, arguments)
    hint = (
        f"report it with the traceback in {saved}"
        if saved
        else "run the command again with `kvbm --debug` to see the traceback"
    )
    show_error(f"a bug in kvbm: {type(error).__name__}: {error}", cause=error.__cause__, hint=hint)
    return A_BUG


def save_report(error: BaseException, arguments: Sequence[str]) -> Path | None:
    """Write a report that only the user can read and remove the oldest ones. None if it cannot write."""
    from importlib.metadata import version

    head = f"kvbm {version('kvbm-cli')}, Python {sys.version}\n$ {shlex.join(['kvbm', *arguments])}\n\n"
    text = head + "".join(traceback.format_exception(error))
    name = time.strftime("%Y%m%d-%H%M%S-") + f"{os.getpid()}.txt"
    for find in (_usual_directory, _temporary_directory):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home directory
            directory = find()
            make_private_directories(directory)
            path = directory / name
            path.touch(mode=0o600)
            path.write_text(without_secrets(text[:LONGEST_REPORT]), encoding="utf-8", errors="replace")
            _prune(directory)
            return path
    return None


def _usual_directory() -> Path:
    from kvbm_cli.system.filesystem import state_directory

    return state_directory() / "crashes"


def _temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvbm-"))


def _prune(directory: Path) -> None:
    for old in sorted(directory.glob("*.txt"))[:-KEPT_REPORTS]:
        old.unlink(missing_ok=True)
