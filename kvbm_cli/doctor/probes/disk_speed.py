"""SpeedTrial: measures sustained read and write rates of blocks in one file, with the I/O of the disk tier."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvbm.tiers.disk.io.threads import Buffer, IoRun, ThreadsIO

THREADS = 4
FLUSHES = 9

PhaseCallback = Callable[[str], None]
Move = Callable[[Sequence[IoRun]], None]


@dataclass(frozen=True, slots=True)
class Speed:
    """Payload bytes/s at one block size with the recommended settings, and the seconds of one fdatasync."""

    block_bytes: int
    file_bytes: int
    threads: int
    sequential_write: float
    sequential_read: float
    random_write: float
    random_read: float
    flush_s: float


class SpeedTrial:
    """Transfers blocks of `block_bytes` of the file `fd` by `io`. Each phase takes `seconds` and calls `on_phase`.

    With `is_cached`, the page cache holds the bytes, so no block is read or written twice.
    """

    def __init__(
        self, fd: int, io: ThreadsIO, block_bytes: int, seconds: float, on_phase: PhaseCallback, *, is_cached: bool
    ) -> None:
        self._fd = fd
        self._io = io
        self._block_bytes = block_bytes
        self._seconds = seconds
        self._on_phase = on_phase
        self._is_cached = is_cached

    def measure(self, blocks: int, *, may_write_bytes: int) -> Speed:
        """Measures in a file of `blocks` blocks. Raises OSError."""
        share = may_write_bytes // 2
        try:
            self._on_phase("sequential writes")
            sequential_write, written = self._write(range(blocks), share)
            blocks = min(blocks, written)  # unwritten blocks are not read
            self._on_phase("flushes")
            flush_s = self._flush(blocks)
            self._on_phase("sequential reads")
            sequential_read = self._read(range(blocks))
            self._on_phase("random reads")
            random_read = self._read(_shuffled(blocks))
            self._on_phase("random writes")
            random_write, _ = self._write(_shuffled(blocks), share - FLUSHES * self._block_bytes)
        finally:
            self._io.close()
        return Speed(
            self._block_bytes,
            blocks * self._block_bytes,
            THREADS,
            sequential_write,
            sequential_read,
            random_write,
            random_read,
            flush_s,
        )

    def _write(self, blocks: Sequence[int], limit: int) -> tuple[float, int]:
        """Return the rate, with the final fdatasync, and the number of blocks written."""
        most = max(len(blocks), 1) if self._is_cached else limit // self._block_bytes
        order = itertools.islice(itertools.cycle(blocks), max(1, min(most, limit // self._block_bytes)))
        started = time.monotonic()
        done = self._in_threads(order, self._io.write)
        os.fdatasync(self._fd)
        return done * self._block_bytes / (time.monotonic() - started), done

    def _read(self, blocks: Sequence[int]) -> float:
        """Read in a cycle until the time is over; only once if the page cache would serve the second read."""
        order: Iterable[int] = blocks if self._is_cached else itertools.cycle(blocks)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.monotonic()
        done = self._in_threads(iter(order), self._io.read)
        return done * self._block_bytes / (time.monotonic() - started)

    def _flush(self, blocks: int) -> float:
        """Median seconds of one fdatasync after writing one block."""
        taken = []
        (buffer,) = self._buffers(1)
        for block in _shuffled(blocks)[:FLUSHES]:
            self._io.write([self._run(block, buffer)])
            started = time.monotonic()
            os.fdatasync(self._fd)
            taken.append(time.monotonic() - started)
        return statistics.median(taken)

    def _run(self, block: int, buffer: Buffer) -> IoRun:
        return IoRun(block * self._block_bytes, [buffer])

    def _buffers(self, count: int) -> Buffer:
        """Return one row per block, filled with incompressible bytes."""
        rows = np.frombuffer(mmap.mmap(-1, count * self._block_bytes), np.uint8).reshape(count, self._block_bytes)
        rows[:] = np.frombuffer(os.urandom(self._block_bytes), np.uint8)
        return rows

    def _in_threads(self, order: Iterator[int], move: Move) -> int:
        """Transfers blocks in `order` until none is left or the time is over. Returns their number. Raises OSError."""
        deadline = time.monotonic() + self._seconds
        at_once = max(1, self._io.piece_bytes // self._block_bytes)

        def run(thread: int) -> int:
            count = 0
            buffers = self._buffers(at_once)
            while blocks := list(itertools.islice(order, at_once)):
                move([self._run(block, buffer) for block, buffer in zip(blocks, buffers, strict=False)])
                count += len(blocks)
                if time.monotonic() > deadline:
                    break
            return count

        with ThreadPoolExecutor(THREADS) as threads:
            return sum(threads.map(run, range(THREADS)))


def _shuffled(count: int) -> list[int]:
    return random.sample(range(count), count)
