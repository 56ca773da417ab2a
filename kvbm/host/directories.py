"""Directories that only their user can change, whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
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


def unsafe_parents(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield each existing directory of the path in which another user can replace entries, with the reason.

    Follows symbolic links: the parents of a link and of its target count.
    """
    ends = directory.absolute(), directory.resolve()
    for parent in dict.fromkeys(path for end in ends for path in (end, *end.parents)):
        try:
            found = parent.stat()
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (0, os.geteuid()):
            yield parent, f"belongs to user {found.st_uid}"
        elif mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield parent, f"is writable by everyone (mode {mode:04o})"
        elif mode & stat.S_IWGRP and not mode & stat.S_ISVTX:
            yield parent, f"is writable by group {found.st_gid} (mode {mode:04o})"
