"""A leader with millions of blocks on disk: start time, memory per block, and the length of its steps.

    python bench/disk/large_index.py --output bench/results/<machine>-disk-large-index.json

The script makes a directory with an index of `--blocks` blocks of 4 KiB, without their content, which is not read. Then
a leader opens it in its own process, as in an engine. `ready_s` is the time until it knows all blocks. Memory is the
growth of the leader's process per block, after its host memory of 4096 blocks was prefaulted: `bytes_per_block` at
rest, `peak_bytes_per_block` while it opens.

A step of the leader looks up a conversation that is on disk, allocates the 16 blocks of one that is not, orders,
settles and finishes. Its length has three values: `step_ms` is the wall time; `own_ms` excludes the time in which the
thread was runnable but had no core, which the kernel counts; `cpu_ms` is the CPU time. Between two steps an idle loop
runs for as long as a step: `empty_ms` shows the delays that this machine adds. The limit applies to `own_ms`; steps
that exceed it only by `step_ms` are reported. Everything is offloaded to disk (`to_disk: always`), which is full, so
each step evicts. Garbage collection is on, as in an engine, after a `gc.freeze()`, which vLLM also calls after its
start.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "vllm"), str(HERE)]

from facts import facts, stolen_s  # noqa: E402

from kvbm.host.layout import BlockLayout  # noqa: E402
from kvbm.host.region import Region  # noqa: E402
from kvbm.host.segment import Segment  # noqa: E402
from kvbm.leader.leader import Leader  # noqa: E402
from kvbm.tiers.disk.directory import INDEX  # noqa: E402
from kvbm.tiers.disk.index import BlockIndex, IndexRow  # noqa: E402
from kvbm.tiers.disk.service.client import DiskSupervisor  # noqa: E402
from kvbm.tiers.disk.settings import DiskSettings, Namespace  # noqa: E402
from kvbm.tiers.disk.tier import DiskTier  # noqa: E402
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks, LeaderSettings, TierPolicy  # noqa: E402
from kvbm.types import SlotState  # noqa: E402

BLOCK_BYTES = 4096
HASH_BYTES = 16
HOST_SLOTS = 4096
CONVERSATION = 16
ROWS_PER_COMMIT = 100_000
NAMESPACE = Namespace(b"large index of k", {"model": "bench"})
MOST_BYTES_PER_BLOCK = 200
LONGEST_STEP_MS = 5.0
LONGEST_START_S = {1_000_000: 3.0}


def hash_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=HASH_BYTES).digest()


def conversation(number: int) -> list[bytes]:
    return [hash_of(number * CONVERSATION + position) for position in range(CONVERSATION)]


class StepTimes(NamedTuple):
    step_ms: float
    own_ms: float
    cpu_ms: float
    empty_ms: float


class EngineMemory:
    """One rank's segment; every order completes at once."""

    def __init__(self) -> None:
        layout = BlockLayout.block_contiguous(block_count=1, block_bytes=BLOCK_BYTES)
        self.segment = Segment.create(rank=0, layout=layout, slot_count=HOST_SLOTS)
        self.region = Region.map([self.segment.info])

    def open_disk(self, directory: Path, block_count: int) -> DiskSupervisor:
        named: Future[tuple[DiskSettings, Namespace]] = Future()
        named.set_result((DiskSettings(directory, block_count=block_count), NAMESPACE))
        disk = DiskSupervisor(named, [self.segment.info], hash_bytes=HASH_BYTES)
        disk.await_opening()
        return disk

    def close(self) -> None:
        self.region.close()
        self.segment.close()


def make_directory(directory: Path, block_count: int) -> None:
    memory = EngineMemory()
    memory.open_disk(directory, block_count).close(60)
    memory.close()
    (path,) = directory.glob(f"*/*/{INDEX}")
    index = BlockIndex.open(path)
    for start in range(0, block_count, ROWS_PER_COMMIT):
        numbers = range(start, min(start + ROWS_PER_COMMIT, block_count))
        index.change([IndexRow(n, hash_of(n), n, BLOCK_BYTES, n, b"", 1.0) for n in numbers], ())
    index.close()


def measure(directory: Path, block_count: int, steps: int) -> dict[str, object]:
    memory = EngineMemory()
    before = resident_bytes()
    started = time.perf_counter()
    disk = memory.open_disk(directory, block_count)
    settings = LeaderSettings(
        EngineTraits(block_tokens=16, hash_bytes=HASH_BYTES),
        block_bytes=BLOCK_BYTES,
        max_in_flight_blocks=1024,
        reads_always=True,
        disk=TierPolicy("always"),
    )
    engine = LeaderCallbacks(hold=lambda blocks: None, release=lambda blocks: None)
    leader = Leader(memory.region, settings, engine, [partial(DiskTier, disk)])
    ready_s = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - shared_bytes()
    gc.collect()
    gc.freeze()
    at_rest = resident_bytes()
    times = list(step_times(leader, memory, block_count, steps))
    written = disk.counters.blocks_written
    leader.close()
    memory.close()
    return {
        "blocks": block_count,
        "ready_s": round(ready_s, 2),
        "bytes_per_block": round((at_rest - before) / block_count, 1),
        "peak_bytes_per_block": round((peak - before) / block_count, 1),
        "steps": steps,
        "blocks_written_and_evicted": written,
        **{name: spread([getattr(step, name) for step in times]) for name in StepTimes._fields},
    }


def spread(times_ms: list[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    p50, p99, longest = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]
    over = sum(time_ms > LONGEST_STEP_MS for time_ms in ordered)
    return {"p50": round(p50, 3), "p99": round(p99, 3), "longest": round(longest, 3), "over_5_ms": over}


class Stopwatch:
    """Milliseconds of this thread: wall time, time waiting for a core, CPU time."""

    def __init__(self) -> None:
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read(self) -> tuple[float, float, float]:
        waited_ms = int(os.pread(self._schedule, 64, 0).split()[1]) / 1e6
        return time.perf_counter() * 1e3, waited_ms, time.thread_time() * 1e3


def step_times(leader: Leader, memory: EngineMemory, block_count: int, steps: int) -> Iterator[StepTimes]:
    """Time of the leader, without the engine's own part of a step, one millisecond."""
    watch = Stopwatch()
    choice = random.Random(1)
    known, new = block_count // CONVERSATION, block_count // CONVERSATION
    blocks = list(range(CONVERSATION))
    for step in range(steps):
        asked, computed = conversation(choice.randrange(known)), conversation(new + step)
        request = f"request {step}"
        first = watch.read()
        leader.match("asked " + request, asked, 0)
        leader.finish("asked " + request, asked)
        leader.offload(request, computed, blocks, computed_blocks=CONVERSATION, prompt_blocks=CONVERSATION)
        plan = leader.step()
        second = watch.read()
        for order in plan.offloads:
            memory.segment.write_slots(order.slots, order.generation, SlotState.READY)
        time.sleep(0.001)
        third = watch.read()
        leader.settle()
        leader.finish(request, computed)
        fourth = watch.read()
        wall, waited, cpu = (b - a + d - c for a, b, c, d in zip(first, second, third, fourth, strict=True))
        yield StepTimes(wall, wall - waited, cpu, longest_gap_ms(wall))


def longest_gap_ms(length_ms: float) -> float:
    """Delay with which an idle loop ends."""
    end = time.perf_counter() + length_ms / 1e3
    while (now := time.perf_counter()) < end:
        pass
    return (now - end) * 1e3


def resident_bytes() -> int:
    """Resident memory without shared memory, which is the segment."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") - shared_bytes()


def shared_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")


def misses(row: dict[str, object]) -> Iterator[str]:
    name = f"{row['blocks']:,} blocks"
    if row["bytes_per_block"] >= MOST_BYTES_PER_BLOCK:
        yield f"{name}: {row['bytes_per_block']} bytes a block"
    if row["peak_bytes_per_block"] >= MOST_BYTES_PER_BLOCK:
        yield f"{name}: {row['peak_bytes_per_block']} bytes a block while it opened"
    if row["own_ms"]["longest"] > LONGEST_STEP_MS:
        yield f"{name}: a step took {row['own_ms']['longest']} ms of its own"
    if row["ready_s"] > LONGEST_START_S.get(row["blocks"], float("inf")):
        yield f"{name}: ready after {row['ready_s']} s"


def main() -> int:
    stolen_before_s = stolen_s()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--dir", type=Path, help="directory with 4 KiB free per block; default: the temporary one")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # the process in which it is measured
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.blocks[0], arguments.steps)))
        return 0
    rows = []
    for block_count in arguments.blocks:
        with tempfile.TemporaryDirectory(prefix="kvbm-large-", dir=arguments.dir) as directory:
            make_directory(Path(directory), block_count)
            options = ["--measure", directory, "--blocks", str(block_count), "--steps", str(arguments.steps)]
            done = subprocess.run([sys.executable, __file__, *options], check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout))
            print(rows[-1], flush=True)
            if (count := rows[-1]["step_ms"]["over_5_ms"] - rows[-1]["own_ms"]["over_5_ms"]) > 0:
                print(f"{count} steps were over {LONGEST_STEP_MS:g} ms because they waited for a core")
    failures = [miss for row in rows for miss in misses(row)]
    report = {
        "benchmark": "disk_large_index",
        "command": f"python bench/disk/{Path(__file__).name} " + " ".join(sys.argv[1:]),
        **facts(("numpy", "xxhash")),
        "load_at_the_end": os.getloadavg()[0],
        "cpu_s_stolen_by_the_host": round(stolen_s() - stolen_before_s, 2),
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    for failure in failures:
        print(f"missed target: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
