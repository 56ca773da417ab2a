"""Select the BlockIO of a disk tier: threads, NIXL, or with `auto` the faster one; and log the reason in one line.

NIXL is tested in a separate process before it is used: a plugin may hang or crash, and old versions report success
without moving bytes. The test is this module run as a program. It writes and reads a pattern through a file in the
directory of the cache, and reads past the end of the file, which must fail.

    python -m kvbm.tiers.disk.io.select DIRECTORY uring|aio|gds    exits with 0, or prints the problem and exits with 1
    python -m kvbm.tiers.disk.io.select DIRECTORY uring|aio BYTES  prints bytes per second of threads and of NIXL, with
                                                               blocks of BYTES

`auto` selects NIXL if a benchmark of one second shows that it is faster on this machine. It never selects GPUDirect
Storage, which must be configured: between a disk and host memory it helps only with some vendors' file systems. It is
tested only if its driver can be opened without hanging.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from kvbm.child.run import last_line, run
from kvbm.child.start import our_environment
from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.io.nixl import GDS, INSTALL, QUEUES, NixlIO
from kvbm.tiers.disk.io.threads import BlockIO, Buffer, EndOfArena, IoNotEnded, IoRun, ThreadsIO

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-P", "-m", "kvbm.tiers.disk.io.select")
TRIAL_TIMEOUT_S = 20.0
LONGEST_S = 40  # lifetime of a trial whose parent was killed
BENCHMARK_BYTES = 64 << 20
BENCHMARK_S = 1.0
BENCHMARK_THREADS = 4
FASTER = 1.05  # minimum speed of NIXL relative to threads
TRIAL_BLOCKS = 16
TRIAL_BLOCK_BYTES = 64 << 10
NOT_MOVED = "NIXL could not move the bytes"
GPU = Path("/dev/nvidiactl")
MODULES = Path("/proc/modules")  # without it, the GPUDirect Storage driver hangs in a search for its module

Rates = tuple[float, float]  # bytes per second of threads and of NIXL


@dataclass(frozen=True, slots=True)
class Choice:
    """`queue` of NIXL, None for threads. `reason` is for the log."""

    queue: str | None
    reason: str


def open_io(wanted: str, fd: int, *, path: Path, shards: Sequence[Buffer], is_direct: bool) -> BlockIO:
    """Return the BlockIO of the arena `path`, open as `fd`, for buffers in `shards`; log which one. `wanted` is not
    `threads`. Raises EnvironmentProblem."""
    choice = choose_io(wanted, path.parent, block_bytes=shards[0].shape[-1], o_direct=is_direct)
    queue = choice.queue
    io: BlockIO = ThreadsIO(fd, is_direct=is_direct) if queue is None else NixlIO(fd, shards, queue=queue)
    log.info("`tiers.disk.io: %s` uses %s: %s", wanted, io.name, choice.reason)
    return io


def choose_io(wanted: str, directory: Path, *, block_bytes: int, o_direct: bool) -> Choice:
    """Choose for blocks of `block_bytes` of one rank. Raises EnvironmentProblem if `nixl` or `gds` is set and fails."""
    if wanted == "auto" and not o_direct:
        return Choice(None, "without O_DIRECT, threads copy in parallel and NIXL does not")
    complaints: list[str] = []
    for queue in (GDS,) if wanted == GDS else QUEUES:
        complaint = (why_no_gds() if queue == GDS else None) or try_nixl(directory, queue)
        if complaint is None and wanted == "auto":
            return _faster(queue, benchmark_nixl(directory, queue, block_bytes))
        if complaint is None:
            return Choice(queue, "; ".join([f"the test of {queue} passed", *complaints]))
        complaints.append(f"{queue}: {complaint}")
    if wanted == "auto":
        return Choice(None, f"NIXL does not work on this machine ({'; '.join(complaints)})")
    raise EnvironmentProblem(
        f"`tiers.disk.io: {wanted}` does not work on this machine: {'; '.join(complaints)}",
        hint=f"{INSTALL}, or set `tiers.disk.io: auto`, which uses NIXL only if it works",
    )


def _faster(queue: str, rates: Rates | str) -> Choice:
    if isinstance(rates, str):
        return Choice(None, f"the benchmark of NIXL failed: {rates}")
    threads, nixl = rates
    shown = f"benchmark: {nixl / 1e9:.2f} GB/s by NIXL with {queue}, {threads / 1e9:.2f} GB/s by threads"
    return Choice(queue if nixl > FASTER * threads else None, shown)


def why_no_gds() -> str | None:
    """Return why GPUDirect Storage cannot be tested, or None."""
    if not GPU.exists():
        return f"no GPU ({GPU} does not exist)"
    if not MODULES.exists():
        return f"its driver hangs without {MODULES}"
    return None


def try_nixl(
    directory: Path, queue: str, *, timeout_s: float = TRIAL_TIMEOUT_S, program: Sequence[str] = ()
) -> str | None:
    """Run the test; return the problem, or None."""
    return _in_a_process(program or (*PROGRAM, str(directory), queue), timeout_s)[0]


def benchmark_nixl(
    directory: Path, queue: str, block_bytes: int, *, timeout_s: float = TRIAL_TIMEOUT_S, program: Sequence[str] = ()
) -> Rates | str:
    """Run the benchmark; return the rates, or the problem."""
    complaint, said = _in_a_process(program or (*PROGRAM, str(directory), queue, str(block_bytes)), timeout_s)
    if complaint is not None:
        return complaint
    try:
        threads, nixl = map(float, said.split())
    except ValueError:  # a plugin may print after the result
        return f"unexpected output `{said}`"
    return threads, nixl


def _in_a_process(command: Sequence[str], timeout_s: float) -> tuple[str | None, str]:
    """Return (problem or None, last line of output). A process that hangs is killed; if that fails, it is left."""
    try:
        ended = run(command, timeout_s=timeout_s, environment=our_environment(), merges=True)
    except TimeoutError:
        return f"no answer in {timeout_s:g} s", ""
    except OSError as error:
        return f"cannot run the test: {error.strerror}", ""
    said = last_line(ended.out, "no output")
    if ended.code == 0:
        return None, said
    return (said if ended.code > 0 else f"the test was ended by signal {-ended.code}"), said


def main() -> int:
    directory, queue, *sizes = Path(sys.argv[1]), *sys.argv[2:]
    try:
        if sizes:
            print(*_benchmark_here(directory, queue, int(sizes[0])))
            return 0
        complaint = _try_here(directory, queue)
    except EnvironmentProblem as error:
        complaint = error.message
    except IoNotEnded:
        complaint = NOT_MOVED
    except OSError as error:
        complaint = f"{directory}: {error.strerror}"
    if complaint:
        print(complaint)
    return 1 if complaint else 0


def _try_here(directory: Path, queue: str) -> str | None:
    """Return the problem, or None. Raises OSError and EnvironmentProblem."""
    size = TRIAL_BLOCKS * TRIAL_BLOCK_BYTES
    ours, theirs = (np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(TRIAL_BLOCKS, -1) for _ in range(2))
    ours[:] = np.random.default_rng().integers(0, 256, ours.shape, np.uint8)
    with _file_in(directory) as file:
        io = NixlIO(file.fileno(), [ours, theirs], queue=queue)
        try:
            io.write(_backwards(ours))
            io.read(_backwards(theirs))
        except IoNotEnded:
            return NOT_MOVED
        if io.redone_count:
            return NOT_MOVED
        if not np.array_equal(ours, theirs):
            return "NIXL reports success, but the bytes read differ from the bytes written"
        try:
            io.read([IoRun(size, [theirs[0]])])
        except (EndOfArena, IoNotEnded):
            return None
        return "NIXL reports success for a read past the end of a file, as versions before 1.5 do"


def _benchmark_here(directory: Path, queue: str, block_bytes: int) -> Rates:
    """Write and read a file by threads and NIXL alternately for BENCHMARK_S. Raises OSError, EnvironmentProblem."""
    count = max(2 * BENCHMARK_THREADS, BENCHMARK_BYTES // block_bytes)
    memory = mmap.mmap(-1, count * block_bytes)
    with suppress(OSError):  # as segments do, if the system allows it
        memory.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(memory, np.uint8).reshape(count, block_bytes)
    rows[:] = np.frombuffer(os.urandom(block_bytes), np.uint8)  # incompressible
    with _file_in(directory) as file:
        threads, nixl = ThreadsIO(file.fileno()), NixlIO(file.fileno(), [rows], queue=queue)
        _move_all(threads, rows)  # allocates the space
        taken_s: dict[BlockIO, list[float]] = {threads: [], nixl: []}
        end_s = time.monotonic() + BENCHMARK_S
        while not taken_s[nixl] or time.monotonic() < end_s:
            for io, times in taken_s.items():
                times.append(_move_all(io, rows))
        threads.close()
        nixl.close()
    threads_rate, nixl_rate = (2 * rows.nbytes / statistics.median(times) for times in taken_s.values())
    return threads_rate, nixl_rate


def _move_all(io: BlockIO, rows: Buffer) -> float:
    """Return the seconds to write all blocks and read them back, in random order."""
    runs = [IoRun(index * rows.shape[1], [row]) for index, row in enumerate(rows)]
    random.shuffle(runs)
    size = max(1, min(io.piece_bytes // rows.shape[1], len(runs) // BENCHMARK_THREADS))
    pieces = [runs[start : start + size] for start in range(0, len(runs), size)]
    started = time.monotonic()
    with ThreadPoolExecutor(BENCHMARK_THREADS) as pool:
        for move in (io.write, io.read):
            list(pool.map(move, pieces))
    return time.monotonic() - started


@contextmanager
def _file_in(directory: Path) -> Iterator[FileIO]:
    """Open a file without a name, so that it never remains. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        with suppress(OSError):  # if it is not supported, the arena does without it too
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
        yield file


def _backwards(rows: Buffer) -> list[IoRun]:
    """Return one run per row, last row first, so that no two runs can be merged."""
    return [IoRun(index * TRIAL_BLOCK_BYTES, [rows[index]]) for index in reversed(range(TRIAL_BLOCKS))]


if __name__ == "__main__":
    signal.alarm(LONGEST_S)
    sys.exit(main())
