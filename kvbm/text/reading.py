"""Reads files from outside, of limited size, which may be anything: a FIFO, a device, a pipe of the shell.

Also what a JSON text costs to parse, before and while it is parsed: no other thread of the process runs meanwhile.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import stat
import time
from pathlib import Path
from typing import Any

FIFO_TIMEOUT_S = 1.0
MAX_CONFIG_BYTES = 16 << 20  # of a `config.json`
MAX_LEVELS = 100  # of lists and objects within each other: more than any of our own code follows without an overflow
LARGEST_NUMBER = 1e30  # so that sums and products of a few numbers are finite
_UNUSUAL = re.compile(r"[0-9]{31}|[0-9][eE]\+?[0-9]{2}|Infinity|NaN")
NO_WRITER = "no process writes to this pipe"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_HINT = "`git lfs pull` in the repository, or a download of the file itself, gets its contents"


def read_at_most(path: Path, byte_count: int) -> bytes:
    """Return the contents of a file of at most `byte_count` bytes. Raises OSError, EFBIG for a larger one.

    A FIFO must be written within FIFO_TIMEOUT_S. A pipe of the shell (`<(...)`) may take longer.
    """
    with open(path, "rb", buffering=0, opener=opened_without_waiting) as file:
        return _contents(file, byte_count, time.monotonic() + FIFO_TIMEOUT_S if _is_fifo(path) else None)


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS left a pointer in place of this file."""
    try:
        with open(path, "rb", opener=opened_without_waiting) as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def read_stdin(byte_count: int) -> bytes:
    """Read the standard input to its end, also if another process has made it non-blocking."""
    with open(0, "rb", buffering=0, closefd=False) as file:
        return _contents(file, byte_count, None)


def _contents(file: io.FileIO, byte_count: int, deadline_s: float | None) -> bytes:
    contents = b""
    while len(contents) <= byte_count:
        if not _is_readable(file.fileno(), deadline_s):
            raise OSError(errno.EAGAIN, "the process that writes this pipe is too slow" if contents else NO_WRITER)
        part = file.read(byte_count + 1 - len(contents))
        if part == b"":
            return contents
        contents += part or b""
    raise OSError(errno.EFBIG, f"it is larger than {byte_count >> 10} KiB")


def opened_without_waiting(path: str, flags: int) -> int:
    """Open a file; `open` alone would wait for the writer of a FIFO."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _is_readable(descriptor: int, deadline_s: float | None) -> bool:
    """Whether there is something to read, or an end of file, until the deadline. `select` fails beyond 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if deadline_s is None else 1000 * max(0.0, deadline_s - time.monotonic())))


def _is_fifo(path: Path) -> bool:
    """Whether this is a FIFO in the file system; a pipe of the shell has no name there."""
    try:
        return stat.S_ISFIFO(os.lstat(os.path.realpath(path)).st_mode)
    except OSError:
        return False


def parse_json(content: str | bytes) -> Any:
    """Parse JSON from outside: a file, or what another process says. ValueError, with the reason, for what is not JSON,
    for more than MAX_LEVELS levels, and for a number beyond LARGEST_NUMBER."""
    text = content if isinstance(content, str) else content.decode(json.detect_encoding(content))
    hooks: dict[str, Any] = {}
    if _UNUSUAL.search(text) is not None:  # hooks take longer
        hooks = {"parse_int": _bounded, "parse_float": _bounded, "parse_constant": _bounded}
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError(f"it has more than {MAX_LEVELS} levels") from None
    if text.count("[") + text.count("{") > MAX_LEVELS and _is_deep(value):
        raise ValueError(f"it has more than {MAX_LEVELS} levels")
    return value


def _bounded(text: str) -> float | int:
    if not abs(float(text)) <= LARGEST_NUMBER:  # NaN too
        raise ValueError(f"the number {text[:20]}{'...' if len(text) > 20 else ''} is too large")
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _is_deep(value: object) -> bool:
    inside = [value]
    for _ in range(MAX_LEVELS):
        parts = [one.values() if isinstance(one, dict) else one for one in inside if isinstance(one, dict | list)]
        inside = [two for part in parts for two in part]
    return any(isinstance(one, dict | list) for one in inside)


def has_more_values(content: bytes, limit: int) -> bool:
    """Return True if the text may hold more than `limit` values. Text within strings counts as well."""
    left = limit
    for mark in (b",", b"[", b"{"):
        left -= content.count(mark)
        if left < 0:
            return True
    return False
