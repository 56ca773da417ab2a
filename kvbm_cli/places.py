"""Where a directory that may not exist yet would lie."""

from __future__ import annotations

from pathlib import Path


def nearest_existing(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())
