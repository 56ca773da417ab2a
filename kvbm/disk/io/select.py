"""Which BlockIO a disk tier gets: threads, NIXL, or with `auto` the one that fits; and one line that says why.

NIXL is tried before it is used, in a process of its own, because a plugin may hang or crash, and old versions report
success for bytes that never came. The trial is this module run as a program: it moves a pattern both ways through a
file in the cache's own directory, and reads past the file's end, which must fail.

    python -m kvbm.disk.io.select DIRECTORY uring|aio|gds      ends with 0, or says what is wrong and ends with 1
    python -m kvbm.disk.io.select DIRECTORY uring|aio BYTES    prints what threads and NIXL move in a second, in blocks
                                                               of so many bytes

`auto` takes NIXL where that is faster here and now, by a second of the one and the other. It never takes GPUDirect
Storage, which must be asked for: between a disk and host memory it has nothing to gain but what a vendor's file system
makes of it. A trial of it is made only where its driver can open without hanging.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

import numpy as np

from kvbm.disk.io.nixl import GDS, INSTALL, QUEUES, NixlIO
from kvbm.disk.io.threads import BlockIO, Buffer, EndOfArena, IoRun, ThreadsIO
from kvbm.errors import EnvironmentProblem

log = logging.getLogger(__name__)

HOME = str(Path(__file__).parents[3])  # where the trial finds this package
PROGRAM = (sys.executable, "-m", "kvbm.disk.io.select")
TRIAL_TIMEOUT_S = 20.0
LONGEST_S = 40  # that a trial lives whose parent was killed
BENCHMARK_BYTES = 64 << 20
BENCHMARK_S = 1.0
BENCHMARK_THREADS = 4
FASTER = 1.05  # as much as NIXL must be, to be taken for it
TRIAL_BLOCKS = 16
TRIAL_BLOCK_BYTES = 64 << 10
GPU = Path("/dev/nvidiactl")
MODULES = Path("/proc/modules")  # without it, the driver of GPUDirect Storage searches for its module for ever

Trial = Callable[[Path, str], str | None]  # what is wrong with a queue in a directory, None when nothing is
Rates = tuple[float, float]  # bytes that threads and NIXL move in a second
IoBenchmark = Callable[[Path, str, int], Rates | str]  # (directory, queue, block bytes); the text is what failed


@dataclass(frozen=True, slots=True)
class Choice:
    """`queue` is what NIXL hands blocks to; None for threads. `reason` is for people."""

    queue: str | None
    reason: str

    @property
    def name(self) -> str:
        return "threads" if self.queue is None else GDS if self.queue == GDS else "nixl"


def open_io(
    wanted: str,
    fd: int,
    *,
    path: Path,
    shards: Sequence[Buffer],
    is_direct: bool,
    trial: Trial | None = None,
    benchmark: IoBenchmark | None = None,
) -> BlockIO:
    """The BlockIO of the arena `path`, which is open as `fd`, for buffers in `shards`. Raises EnvironmentProblem."""
    block_bytes = shards[0].shape[-1]
    choice = choose_io(
        wanted, path.parent, block_bytes=block_bytes, o_direct=is_direct, trial=trial, benchmark=benchmark
    )
    return ThreadsIO(fd, is_direct=is_direct) if choice.queue is None else NixlIO(fd, shards, queue=choice.queue)


def choose_io(
    wanted: str,
    directory: Path,
    *,
    block_bytes: int,
    o_direct: bool,
    trial: Trial | None = None,
    benchmark: IoBenchmark | None = None,
) -> Choice:
    """`block_bytes` is what one rank has of a block. Raises EnvironmentProblem where `nixl` or `gds` is
    wanted and does not work."""
    choice = _choose(wanted, directory, block_bytes, o_direct, trial or try_nixl, benchmark or benchmark_nixl)
    if wanted != "threads":
        log.info("disk I/O of `tiers.disk.io: %s` is by %s: %s", wanted, choice.name, choice.reason)
    return choice


def _choose(
    wanted: str, directory: Path, block_bytes: int, o_direct: bool, trial: Trial, benchmark: IoBenchmark
) -> Choice:
    if wanted == "threads":
        return Choice(None, "it is what the profile says")
    if wanted == "auto" and not o_direct:
        return Choice(None, "threads copy from the page cache at the same time, NIXL one after the other")
    complaints: list[str] = []
    for queue in (GDS,) if wanted == GDS else QUEUES:
        complaint = (why_no_gds() if queue == GDS else None) or trial(directory, queue)
        if complaint is None and wanted == "auto":
            return _faster(queue, benchmark(directory, queue, block_bytes))
        if complaint is None:
            return Choice(queue, "; ".join([f"a trial of {queue} moved every byte", *complaints]))
        complaints.append(f"{queue}: {complaint}")
    if wanted == "auto":
        return Choice(None, f"NIXL does not work here ({'; '.join(complaints)})")
    raise EnvironmentProblem(
        f"`tiers.disk.io` is `{wanted}`, which does not work here: {'; '.join(complaints)}",
        hint=f"{INSTALL}, or `tiers.disk.io: auto`, which takes NIXL only where it works",
    )


def _faster(queue: str, rates: Rates | str) -> Choice:
    if isinstance(rates, str):
        return Choice(None, f"NIXL could not be timed: {rates}")
    threads, nixl = rates
    shown = f"{nixl / 1e9:.2f} GB/s by NIXL with {queue} and {threads / 1e9:.2f} by threads in a trial"
    return Choice(queue if nixl > FASTER * threads else None, shown)


def why_no_gds() -> str | None:
    """What keeps GPUDirect Storage from being tried at all."""
    if not GPU.exists():
        return f"there is no GPU ({GPU})"
    if not MODULES.exists():
        return f"its driver would hang for want of {MODULES}"
    return None


def try_nixl(
    directory: Path, queue: str, *, timeout_s: float = TRIAL_TIMEOUT_S, program: Sequence[str] = ()
) -> str | None:
    """Run the trial; what is wrong, or None."""
    return _in_a_process(program or (*PROGRAM, str(directory), queue), timeout_s)[0]


def benchmark_nixl(
    directory: Path, queue: str, block_bytes: int, *, timeout_s: float = TRIAL_TIMEOUT_S, program: Sequence[str] = ()
) -> Rates | str:
    """What threads and NIXL move in a second, or what is wrong."""
    complaint, said = _in_a_process(program or (*PROGRAM, str(directory), queue, str(block_bytes)), timeout_s)
    if complaint is not None:
        return complaint
    try:
        threads, nixl = map(float, said.split())
    except ValueError:  # plugins have the last word at times
        return f"it said `{said}`"
    return threads, nixl


def _in_a_process(command: Sequence[str], timeout_s: float) -> tuple[str | None, str]:
    """(what is wrong, the last line it said). A process that hangs is killed, and not waited for if that does not end
    it."""
    try:
        with open(os.memfd_create("kvbm-trial"), "r+b") as output:  # which needs no directory that can be written
            trial = _start(command, output)
            try:
                code = trial.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _kill(trial)
                return f"no answer in {timeout_s:g} s", ""
            except BaseException:  # a start that is interrupted leaves nobody behind
                _kill(trial)
                raise
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
    except OSError as error:
        return f"the trial cannot be run: {error.strerror}", ""
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    if code == 0:
        return None, said
    return (said if code > 0 else f"signal {-code} ended the trial"), said


def _start(command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Raises OSError."""
    paths = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )


def _kill(trial: subprocess.Popen[bytes]) -> None:
    os.killpg(trial.pid, signal.SIGKILL)
    try:
        trial.wait(1.0)
    except subprocess.TimeoutExpired:  # in the kernel, where no signal reaches it
        log.warning("the trial of NIXL, process %d, cannot be ended", trial.pid)


def main() -> int:
    directory, queue, *sizes = Path(sys.argv[1]), *sys.argv[2:]
    try:
        if sizes:
            print(*_benchmark_here(directory, queue, int(sizes[0])))
            return 0
        complaint = _try_here(directory, queue)
    except EnvironmentProblem as error:
        complaint = error.message
    except OSError as error:
        complaint = f"{directory}: {error.strerror}"
    if complaint:
        print(complaint)
    return 1 if complaint else 0


def _try_here(directory: Path, queue: str) -> str | None:
    """What is wrong. Raises OSError and EnvironmentProblem."""
    size = TRIAL_BLOCKS * TRIAL_BLOCK_BYTES
    ours, theirs = (np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(TRIAL_BLOCKS, -1) for _ in range(2))
    ours[:] = np.random.default_rng().integers(0, 256, ours.shape, np.uint8)
    with _file_in(directory) as file:
        io = NixlIO(file.fileno(), [ours, theirs], queue=queue)
        io.write(_backwards(ours))
        io.read(_backwards(theirs))
        if io.redone_count:
            return "it could not move the bytes"
        if not np.array_equal(ours, theirs):
            return "it reports success, and the bytes are not those that were written"
        try:
            io.read([IoRun(size, [theirs[0]])])
        except EndOfArena:
            io.close()
            return None
        return "it reports success for a read past the end of a file, as versions before 1.5 do"


def _benchmark_here(directory: Path, queue: str, block_bytes: int) -> Rates:
    """Both write and read all blocks of a file, in turn until the time is over. Raises OSError, EnvironmentProblem."""
    count = max(2 * BENCHMARK_THREADS, BENCHMARK_BYTES // block_bytes)
    memory = mmap.mmap(-1, count * block_bytes)
    with suppress(OSError):  # as segments do, where the system lets them
        memory.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(memory, np.uint8).reshape(count, block_bytes)
    rows[:] = np.frombuffer(os.urandom(block_bytes), np.uint8)  # that no drive can compress
    with _file_in(directory) as file:
        threads, nixl = ThreadsIO(file.fileno()), NixlIO(file.fileno(), [rows], queue=queue)
        _move_all(threads, rows)  # takes the space
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
    """Seconds to write all blocks and read them back, in an order that no disk foresees."""
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
    """A file without a name, so that nothing remains of it. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        with suppress(OSError):  # where it is not supported, the arena does without it too
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
        yield file


def _backwards(rows: Buffer) -> list[IoRun]:
    """Row after row, the last one first, so that no two are one piece of the file."""
    return [IoRun(index * TRIAL_BLOCK_BYTES, [rows[index]]) for index in reversed(range(TRIAL_BLOCKS))]


if __name__ == "__main__":
    signal.alarm(LONGEST_S)
    sys.exit(main())
