"""Where things lie: a directory that may not exist yet, and what the command itself keeps."""

from __future__ import annotations

import os
from pathlib import Path


def nearest_existing(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def state_directory() -> Path:
    """Where runs and reports are kept. RuntimeError where the user has no home."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given and os.path.isabs(given) else Path("~/.local/state").expanduser()) / "kvbm"
