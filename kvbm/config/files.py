"""Reads files that the user names, which may be anything: a FIFO, a device, a loop of symbolic links, a name too long.

`pathlib` raises for some of these (`exists`, `is_dir`, `resolve`); `os.path` does not. Use `os.path` on such names.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

from kvbm.errors import reason_of

FIFO_TIMEOUT_S = 1.0
MAX_CONFIG_BYTES = 16 << 20  # of a `config.json`
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_HINT = "`git lfs pull` in the repository, or a download of the file itself, gets its contents"
NO_WRITER = "no process writes to this pipe"


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


def read_at_most(path: Path, byte_count: int) -> bytes:
    """Return the contents of a file of at most `byte_count` bytes. Raises OSError, EFBIG for a larger one.

    A FIFO must be written within FIFO_TIMEOUT_S. A pipe of the shell (`<(...)`) may take longer.
    """
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:
        deadline = time.monotonic() + FIFO_TIMEOUT_S if _is_fifo(path) else None
        contents = b""
        while len(contents) <= byte_count:
            if deadline is not None and not _is_readable(file.fileno(), max(0.0, deadline - time.monotonic())):
                raise OSError(errno.EAGAIN, "the process that writes this pipe is too slow" if contents else NO_WRITER)
            part = file.read(byte_count + 1 - len(contents))
            if not part:
                return contents
            contents += part
    raise OSError(errno.EFBIG, f"it is larger than {byte_count >> 10} KiB")


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS left a pointer in place of this file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    """Whether there is something to read, or an end of file, within the timeout. `select` fails beyond 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; `open` alone would wait for the writer of a FIFO."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _is_fifo(path: Path) -> bool:
    """Whether this is a FIFO in the file system; a pipe of the shell has no name there."""
    try:
        return stat.S_ISFIFO(os.lstat(os.path.realpath(path)).st_mode)
    except OSError:
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
