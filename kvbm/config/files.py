"""Reads files that the user names, which may be anything: a FIFO, a device, a loop of symbolic links, a name too long.

`pathlib` raises for some of these (`exists`, `is_dir`, `resolve`); `os.path` does not. Use `os.path` on such names.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvbm.errors import UsageError, reason_of


def real_path(path: Path) -> Path:
    """Return the path without symbolic links, as far as that is possible."""
    return Path(os.path.realpath(path))


def is_missing(path: Path) -> bool:
    """Whether there is certainly nothing at this path, not even a broken link or something that may not be read."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def reason_not_readable(path: Path) -> str | None:
    """Return why this is not a regular file that can be read, None if it is."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return reason_of(error)
    if stat.S_ISDIR(mode):
        return "is a directory"
    if not stat.S_ISREG(mode):
        return "is not a regular file"
    return None if os.access(path, os.R_OK) else "permission denied"


def require_file(path: Path, noun: str, *, hint: str | None = None) -> None:
    """Raise UsageError unless this is a regular file that can be read. `noun` says what it holds."""
    if is_missing(path):
        raise UsageError(f"the {noun} `{path}` does not exist", hint=hint)
    if (reason := reason_not_readable(path)) is not None:
        raise UsageError(f"cannot read the {noun} `{path}`: {reason}", hint=hint)
