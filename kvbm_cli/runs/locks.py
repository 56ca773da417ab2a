"""Locks of run directories. On a filesystem without locks, nothing is locked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

RETRY_S = 0.02


@contextlib.contextmanager
def locked(directory: Path, *, limit_s: float = math.inf) -> Iterator[None]:
    """Locks a directory exclusively; after `limit_s`, continues without the lock. OSError if it does not exist."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    deadline_s = time.monotonic() + limit_s
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            while not _has_locked(descriptor) and time.monotonic() < deadline_s:
                time.sleep(RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _has_locked(descriptor: int) -> bool:
    """Raise OSError on a filesystem without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def locked_file(path: Path) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
    with contextlib.suppress(OSError):  # a filesystem without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def is_locked(path: Path) -> bool:
    """Whether a process, also in another container, holds the lock of `locked_file`. False if that is unknown."""
    return holder_state(path) is True


def holder_state(path: Path) -> bool | None:
    """Return whether a process holds the lock; None if the file cannot be opened, or on a filesystem without locks."""
    try:
        with open(open_regular(path), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def open_regular(path: Path) -> int:
    """Open a regular file only. Opening a FIFO would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor
