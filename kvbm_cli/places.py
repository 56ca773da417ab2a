"""Where things lie: a directory that may not exist yet, and what the command itself keeps."""

from __future__ import annotations

import os
from pathlib import Path

from kvbm.errors import EnvironmentProblem, UsageError


def nearest_existing(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def state_directory() -> Path:
    """Where runs and reports are kept. RuntimeError where the user has no home."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given and os.path.isabs(given) else Path("~/.local/state").expanduser()) / "kvbm"


def no_temporary_file(error: OSError) -> EnvironmentProblem:
    reason = (error.strerror or str(error)).lower()
    return EnvironmentProblem(
        f"cannot write a temporary file: {reason}",
        hint="`df -h /tmp` shows whether there is room; `TMPDIR` names another directory",
    )


def write_new(file: Path, text: str) -> None:
    """All of it or nothing. UsageError if there is such a file already, EnvironmentProblem if it cannot be written."""
    try:
        with open(file, "x", encoding="utf-8") as opened:
            try:
                opened.write(text)
                opened.flush()
            except BaseException:
                file.unlink()
                raise
    except FileExistsError:
        raise UsageError(f"`{file}` is there already", hint="give another name, or remove it first") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{file}`: {(error.strerror or str(error)).lower()}") from None
