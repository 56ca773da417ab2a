"""BlockIO: the bytes of blocks to and from the arena; and ThreadsIO, which does it with one system call a run.

Calls block, and come from several threads at once. A list of runs is one order: ThreadsIO does them one after the
other, another implementation may hand them to its device together. A call returns only when none of its I/O is running
any more, also when it raises. It has moved every byte, or it raises OSError; what it moved before that is not said.

Offsets and lengths keep to the arena's alignment, and buffers lie in memory that is aligned to pages.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_BUFFERS = 1024  # IOV_MAX of Linux

Buffer = NDArray[np.uint8]
SystemCall = Callable[[int, Any, int], int]  # preadv or pwritev


class Run(NamedTuple):
    """A contiguous piece of the arena, and the buffers that hold its bytes one after the other."""

    offset: int
    buffers: Sequence[Buffer]


class BlockIO(Protocol):
    """See the module's text."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def piece_bytes(self) -> int:
        """How much it should be given in one call, where one block is not more than that."""

    def read(self, runs: Sequence[Run]) -> None:
        """Fill the buffers. Raises EndOfArena where the file ends too early."""

    def write(self, runs: Sequence[Run]) -> None:
        """Write the buffers. They are not safe from a power cut before `Arena.sync`."""

    def close(self) -> None:
        """No call is running, and none comes any more. The file descriptor stays the arena's."""


class EndOfArena(OSError):
    """The arena ends before the run does: somebody has cut it."""

    def __init__(self, offset: int) -> None:
        super().__init__(errno.ENODATA, f"the arena ends at byte {offset}")


class ThreadsIO:
    """`preadv` and `pwritev` in the caller's thread. What the kernel does only in part is continued.

    Without direct I/O what was read does not stay in the page cache; what was written leaves it at `Arena.sync`.
    """

    name = "threads"
    piece_bytes = 1 << 20  # of more, the first block has left the processor's cache when its checksum is computed

    def __init__(self, fd: int, *, is_direct: bool = True) -> None:
        self._fd = fd
        self._is_direct = is_direct

    def read(self, runs: Sequence[Run]) -> None:
        for run in runs:
            end = self._move(os.preadv, run)
            if not self._is_direct:
                os.posix_fadvise(self._fd, run.offset, end - run.offset, os.POSIX_FADV_DONTNEED)

    def write(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._move(os.pwritev, run)

    def close(self) -> None:
        pass

    def _move(self, call: SystemCall, run: Run) -> int:
        """Returns where it ended."""
        offset, buffers = run
        for start in range(0, len(buffers), MAX_BUFFERS):
            offset = self._move_some(call, offset, buffers[start : start + MAX_BUFFERS])
        return offset

    def _move_some(self, call: SystemCall, offset: int, buffers: Sequence[Buffer]) -> int:
        while buffers:
            count = call(self._fd, buffers, offset)
            if count == 0:
                raise EndOfArena(offset)
            offset += count
            buffers = _rest(buffers, count)
        return offset


def _rest(buffers: Sequence[Buffer], count: int) -> Sequence[Buffer]:
    """The buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return ()
