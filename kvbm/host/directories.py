"""Directories that only their user can change, whatever the umask is."""

from __future__ import annotations

import os
from pathlib import Path


def make_private_directories(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700. Raises OSError.

    `Path.mkdir` creates parents with the mode that the umask leaves, which may let every user replace the directory.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            os.stat(path)  # raises the cause for a link that forms a loop or that leads nowhere
            if not path.is_dir():
                raise
