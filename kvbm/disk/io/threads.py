"""BlockIO: the bytes of blocks to and from the arena; and ThreadsIO, which does it with the kernel's means alone.

Calls block, and come from several threads at once. A list of runs is one order, handed to the device together. A call
returns only when none of its I/O is running any more, also when it raises. It has moved every byte, or it raises
OSError; what it moved before that is not said.

Offsets and lengths keep to the arena's alignment, and buffers lie in memory that is aligned to pages.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvbm.disk.io.kernel_aio import MAX_REQUESTS, READ, WRITE, KernelAio

MAX_BUFFERS = 1024  # IOV_MAX of Linux

logger = logging.getLogger(__name__)

Buffer = NDArray[np.uint8]
SystemCall = Callable[[int, Any, int], int]  # preadv or pwritev


class IoRun(NamedTuple):
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

    def read(self, runs: Sequence[IoRun]) -> None:
        """Fill the buffers. Raises EndOfArena where the file ends too early."""

    def write(self, runs: Sequence[IoRun]) -> None:
        """Write the buffers. They are not safe from a power cut before `Arena.sync`."""

    def close(self) -> None:
        """No call is running, and none comes any more. The file descriptor stays the arena's."""


class EndOfArena(OSError):
    """The arena ends before the run does: somebody has cut it."""

    def __init__(self, offset: int) -> None:
        super().__init__(errno.ENODATA, f"the arena ends at byte {offset}")


class ThreadsIO:
    """System calls in the caller's thread: `io_submit` for what is several pieces, `preadv` and `pwritev` otherwise.

    They also end what the kernel did only in part, and say what is wrong with what it did not do. Without direct I/O
    what was read does not stay in the page cache; what was written leaves it at `Arena.sync`.
    """

    name = "threads"
    piece_bytes = 4 << 20  # of less, a disk in memory waits for us; of more, checksums find the processor's cache cold

    def __init__(self, fd: int, *, is_direct: bool = True) -> None:
        self._fd = fd
        self._is_direct = is_direct
        self._has_aio = is_direct
        self._idle: list[KernelAio] = []  # any thread's: pop and append of a list are whole

    def read(self, runs: Sequence[IoRun]) -> None:
        for run in self._not_moved(READ, runs):
            end = self._move(os.preadv, run)
            if not self._is_direct:
                os.posix_fadvise(self._fd, run.offset, end - run.offset, os.POSIX_FADV_DONTNEED)

    def write(self, runs: Sequence[IoRun]) -> None:
        for run in self._not_moved(WRITE, runs):
            self._move(os.pwritev, run)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _not_moved(self, operation: int, runs: Sequence[IoRun]) -> Sequence[IoRun]:
        """Move the runs at once if that is possible; returns those that are not, or not wholly, moved."""
        offsets, addresses, byte_counts, owners = [], [], [], []
        for number, offset, buffer in pieces(runs):
            offsets.append(offset)
            addresses.append(address_of(buffer))
            byte_counts.append(buffer.nbytes)
            owners.append(number)
        aio = self._take_aio() if len(offsets) > 1 else None
        if aio is None:
            return runs
        left: set[int] = set()
        for start in range(0, len(offsets), MAX_REQUESTS):
            some = slice(start, start + MAX_REQUESTS)
            moved = aio.move(operation, offsets[some], addresses[some], byte_counts[some])
            left.update(
                owner
                for owner, count, wanted in zip(owners[some], moved, byte_counts[some], strict=True)
                if count != wanted
            )
        self._idle.append(aio)
        return [runs[number] for number in sorted(left)]

    def _take_aio(self) -> KernelAio | None:
        """None where there is none to be had: then it is one system call after the other."""
        with suppress(IndexError):
            return self._idle.pop()
        if not self._has_aio:
            return None
        try:
            return KernelAio(self._fd)
        except OSError as error:
            logger.info("io_submit cannot be used (%s): blocks are moved one by one", error)
            self._has_aio = False
            return None

    def _move(self, call: SystemCall, run: IoRun) -> int:
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


def pieces(runs: Sequence[IoRun]) -> Iterator[tuple[int, int, Buffer]]:
    """Each buffer of each run: the run's number, and where in the arena the buffer's bytes lie."""
    for number, (offset, buffers) in enumerate(runs):
        for buffer in buffers:
            yield number, offset, buffer
            offset += buffer.nbytes


def address_of(buffer: Buffer) -> int:
    return int(buffer.__array_interface__["data"][0])
