"""EngineTmpdir: the temporary directory of one engine, which the guard removes with the engine's other leftovers.

If the launcher and the guard are killed at the same moment, the directory remains. The next start below the same parent
removes it if it is empty. The launcher holds a lock on its directory, so that a directory in use is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time

PREFIX = "kvbm-tmp-"
SETTLED_S = 60.0  # a younger directory may belong to a launcher that has not locked it yet


class EngineTmpdir:
    """A new directory with mode 0700 and its lock. Raises OSError."""

    def __init__(self, parent: str) -> None:
        sweep(parent)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """May be called twice. Does not remove the directory."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def sweep(parent: str) -> None:
    """Remove empty directories of this user whose launchers are gone. Ignores errors."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # not empty, in use, or of another user
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        is_ours = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
        if is_ours and time.time() - found.st_mtime > SETTLED_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rmdir(path)
    finally:
        os.close(descriptor)
