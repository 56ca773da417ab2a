"""Which processes have a file open for writing: a mark that files cannot forge, and that a process keeps until it ends.

The environment is no such mark: vLLM overwrites it with the title of its processes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_DELETED = " (deleted)"


def written_files(pid: int) -> Iterator[Path]:
    """Yield the files that a process has open for writing, none if it has ended or belongs to another user."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:
                    yield Path(os.readlink(entry.path).removesuffix(_DELETED))


def writes(pid: int, path: Path) -> bool:
    """Whether a process has a file open for writing, also if it was removed meanwhile."""
    return path.resolve() in written_files(pid)


def files_by_writer() -> Iterator[tuple[int, Path]]:
    """Yield every process of this user with each file that it has open for writing."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        for path in written_files(pid):
            yield pid, path
