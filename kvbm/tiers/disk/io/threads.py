"""BlockIO: moves bytes of blocks to and from the arena. ThreadsIO implements it with system calls.

Calls block, and several threads call at the same time. The runs of one call are submitted to the device together. After
a call returns or raises, none of its I/O is running, unless it raises IoNotEnded. A call moves every byte or raises
OSError; how much it moved before the error is undefined.

Offsets and lengths are multiples of the arena's alignment, and buffers are page-aligned.
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

from kvbm.tiers.disk.io.kernel_aio import MAX_REQUESTS, READ, WRITE, KernelAio

MAX_BUFFERS = 1024  # IOV_MAX of Linux

logger = logging.getLogger(__name__)

Buffer = NDArray[np.uint8]
SystemCall = Callable[[int, Any, int], int]  # preadv or pwritev


class IoRun(NamedTuple):
    """A contiguous range of the arena, and the buffers that hold its bytes in order."""

    offset: int
    buffers: Sequence[Buffer]


class BlockIO(Protocol):
    @property
    def name(self) -> str:
        """The value of `tiers.disk.io`, for logs and reports."""

    @property
    def piece_bytes(self) -> int:
        """The best size of one call; a larger block is still one call."""

    def read(self, runs: Sequence[IoRun]) -> None:
        """Fill the buffers. Raises EndOfArena if the file ends too early."""

    def write(self, runs: Sequence[IoRun]) -> None:
        """Write the buffers. They are durable only after `Arena.sync`."""

    def close(self) -> None:
        """Free resources, when no call is running. The file descriptor remains open; it belongs to the arena."""


class EndOfArena(OSError):
    """The arena ends before the run: the file was truncated."""

    def __init__(self, offset: int) -> None:
        super().__init__(errno.ENODATA, f"the arena ends at byte {offset}")


class IoNotEnded(Exception):
    """I/O of a call may still be running, and only the end of this process ends it. Its buffers must not be reused."""


class ThreadsIO:
    """System calls in the caller's thread: `io_submit` for several buffers, `preadv` and `pwritev` otherwise.

    `preadv` and `pwritev` also finish partial transfers of `io_submit` and raise its errors. Without direct I/O, pages
    that were read are dropped from the page cache at once, and pages that were written at `Arena.sync`.
    """

    name = "threads"
    piece_bytes = 4 << 20  # less: calls dominate on a fast disk; more: checksums miss the CPU cache

    def __init__(self, fd: int, *, is_direct: bool = True) -> None:
        self._fd = fd
        self._is_direct = is_direct
        self._has_aio = is_direct
        self._idle: list[KernelAio] = []  # shared by all threads: pop and append of a list are atomic

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
        """Move the runs by `io_submit` if possible; return those that were not completely moved."""
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
        """Return None if AIO is not available; the caller then uses one system call per run."""
        with suppress(IndexError):
            return self._idle.pop()
        if not self._has_aio:
            return None
        try:
            return KernelAio(self._fd)
        except OSError as error:
            logger.info("io_submit is not available (%s): using one system call per block", error)
            self._has_aio = False
            return None

    def _move(self, call: SystemCall, run: IoRun) -> int:
        """Return the offset after the run."""
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
    """Return the buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return ()


def pieces(runs: Sequence[IoRun]) -> Iterator[tuple[int, int, Buffer]]:
    """Yield (index of the run, offset in the arena, buffer) for each buffer."""
    for number, (offset, buffers) in enumerate(runs):
        for buffer in buffers:
            yield number, offset, buffer
            offset += buffer.nbytes


def address_of(buffer: Buffer) -> int:
    return int(buffer.__array_interface__["data"][0])
