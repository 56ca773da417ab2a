"""Compares the disk tier's I/O with fio, and measures how its threads slow the engine: software only, no drive.

    python bench/disk/disk_io.py --output bench/results/<machine>-disk-io.json        # as root, with fio and NIXL

Throughput: ext4 on a loop device on tmpfs; every block of the arena once, in random order. The time covers the disk
tier as a leader uses it, from the first ticket to the last result: messages to its process and back, splitting, I/O and
checksums, and for writes also flushes and the index. fio moves as many bytes with io_uring and with libaio at a depth
of 32, without checksums or flushes. The faster of the two, by its own clock, is 1.00. Contenders alternate, in another
order each round; the result has medians. Host slots are a memfd, as in an engine. Huge pages for it change the cost of
moving a block, so the result records them. `kvbm doctor` recommends `echo advise >
/sys/kernel/mm/transparent_hugepage/shmem_enabled`; most systems start with `never`.

Steps: see gil_steps.py.

Exits with 1 if a result misses its target. `--quick` checks that the script works; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "vllm"), str(HERE)]

import gil_steps  # noqa: E402
from engine_side import EngineSide  # noqa: E402
from facts import facts, stolen_s  # noqa: E402
from loop_mount import loop_mount  # noqa: E402

FIO_ENGINES = ("io_uring", "libaio")
FIO_DEPTH = 32
IMPLEMENTATIONS = ("threads", "nixl")
ARENA_BYTES = 1 << 30
HOST_BYTES = 256 << 20
BLOCKS_PER_TICKET_BYTES = 32 << 20
TICKETS_IN_FLIGHT = 4
WAIT_S = 0.005
AIMS = {(1 << 20, "threads"): 0.80, (256 << 10, "threads"): 0.65, (256 << 10, "nixl"): 0.72}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)


@dataclass(frozen=True, slots=True)
class Sample:
    megabytes_per_s: float
    cpu_s_per_gib: float


class Tier:
    """A disk tier with all blocks written, and random tickets for it."""

    def __init__(self, directory: Path, block_bytes: int, io: str) -> None:
        self.block_bytes = block_bytes
        self.count = ARENA_BYTES // block_bytes
        self._host_count = HOST_BYTES // block_bytes
        self._engine = EngineSide(
            directory, block_bytes=block_bytes, host_slots=self._host_count, disk_slots=self.count, io=io
        )
        self.move("write", list(range(self.count)))

    def move_all(self, operation: str, order: random.Random) -> Sample:
        """Tickets for all blocks in random order."""
        return self.move(operation, order.sample(range(self.count), self.count))

    def move(self, operation: str, slots: list[int]) -> Sample:
        """Move every slot once, a few tickets at a time; every block must be intact."""
        size = max(1, BLOCKS_PER_TICKET_BYTES // self.block_bytes)
        parts = [slots[start : start + size] for start in range(0, len(slots), size)]
        started, cpu = time.perf_counter(), self._engine.cpu_s()
        begun = ended = 0
        while ended < len(parts):
            while begun < len(parts) and begun - ended < TICKETS_IN_FLIGHT:
                self._begin(operation, begun, parts[begun])
                begun += 1
            results = self._engine.disk.poll()
            for result in results:
                assert all(result.is_good), result
            ended += len(results)
            if not results:
                self._engine.wait(WAIT_S)
        took, cpu = time.perf_counter() - started, self._engine.cpu_s() - cpu
        moved = len(slots) * self.block_bytes
        return Sample(moved / took / 1e6, cpu / (moved / (1 << 30)))

    def _begin(self, operation: str, number: int, slots: list[int]) -> None:
        first = number % TICKETS_IN_FLIGHT * len(slots)
        host_slots = [(first + position) % self._host_count for position in range(len(slots))]
        if operation == "read":
            self._engine.read(number, slots, host_slots)
        else:
            self._engine.write(number, host_slots, slots)

    def close(self) -> None:
        self._engine.close()


def fio(path: Path, operation: str, block_bytes: int, engine: str) -> Sample:
    command = [
        *("fio", "--name=bench", f"--filename={path}", f"--size={ARENA_BYTES}", f"--bs={block_bytes}", "--direct=1"),
        *(
            f"--rw=rand{operation}",
            f"--ioengine={engine}",
            f"--iodepth={FIO_DEPTH}",
            "--thread",
            "--output-format=json",
        ),
    ]
    job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Sample(job[operation]["bw_bytes"] / 1e6, cpu_s / (ARENA_BYTES / (1 << 30)))


def measure_throughput(block_bytes: int, rounds: int, order: random.Random) -> list[dict[str, object]]:
    """One row per operation: medians of each contender, and ratios to the faster fio."""
    with loop_mount(ARENA_BYTES * len(IMPLEMENTATIONS) + ARENA_BYTES + (512 << 20)) as mounted:
        fio_path = mounted / "fio"
        with opened(mounted, block_bytes) as tiers:
            fio(fio_path, "write", block_bytes, FIO_ENGINES[0])
            rows = []
            for operation in ("read", "write"):
                contenders: dict[str, Callable[[], Sample]] = {
                    f"fio {engine}": partial(fio, fio_path, operation, block_bytes, engine) for engine in FIO_ENGINES
                }
                for name, tier in tiers.items():
                    contenders[name] = partial(tier.move_all, operation, order)
                rows.append(row(block_bytes, operation, take_turns(contenders, rounds, order)))
                print_row(rows[-1])
    return rows


@contextmanager
def opened(mounted: Path, block_bytes: int) -> Iterator[dict[str, Tier]]:
    tiers: dict[str, Tier] = {}
    try:
        for name in IMPLEMENTATIONS:
            tiers[name] = Tier(mounted / name, block_bytes, name)
        yield tiers
    finally:
        for tier in tiers.values():
            tier.close()


def take_turns(
    contenders: dict[str, Callable[[], Sample]], rounds: int, order: random.Random
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            samples[name].append(contenders[name]())
    return samples


def row(block_bytes: int, operation: str, samples: dict[str, list[Sample]]) -> dict[str, object]:
    rates = {name: [round(one.megabytes_per_s) for one in taken] for name, taken in samples.items()}
    medians = {name: statistics.median(taken) for name, taken in rates.items()}
    best = max(medians[f"fio {engine}"] for engine in FIO_ENGINES)
    return {
        "block_bytes": block_bytes,
        "operation": f"random {operation}",
        "megabytes_per_s": medians,
        "cpu_s_per_gib": {
            name: round(statistics.median(one.cpu_s_per_gib for one in taken), 3) for name, taken in samples.items()
        },
        "ratio_to_best_fio": {name: round(medians[name] / best, 3) for name in IMPLEMENTATIONS},
        "aims": {name: AIMS[block_bytes, name] for name in IMPLEMENTATIONS if (block_bytes, name) in AIMS},
        "samples": rates,
    }


def print_row(result: dict[str, object]) -> None:
    ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in result["ratio_to_best_fio"].items())
    rates = "  ".join(f"{name} {rate:.0f}" for name, rate in result["megabytes_per_s"].items())
    cpu = "  ".join(f"{name} {used:.2f}" for name, used in result["cpu_s_per_gib"].items())
    print(f"{result['block_bytes'] >> 10:>5} KiB {result['operation']:<12} {ratios}   MB/s: {rates}   CPU-s/GiB: {cpu}")
    sys.stdout.flush()


def missed(rows: list[dict[str, object]]) -> list[str]:
    return [
        f"{one['block_bytes'] >> 10} KiB {one['operation']} with {name}: {one['ratio_to_best_fio'][name]} < {aim}"
        for one in rows
        for name, aim in one["aims"].items()
        if one["ratio_to_best_fio"][name] < aim
    ]


def main() -> int:
    stolen_before_s = stolen_s()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, to check that the script works")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(BLOCK_SIZES), help="block sizes in bytes")
    parser.add_argument("--only", choices=("throughput", "steps"), help="run one of the two measurements")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    order = random.Random(1)
    rows: list[dict[str, object]] = []
    if arguments.only != "steps":
        for block_bytes in arguments.sizes:
            rows += measure_throughput(block_bytes, rounds, order)
    steps = [] if arguments.only == "throughput" else gil_steps.measure_steps(is_quick=arguments.quick)
    report = {
        "benchmark": "disk_io",
        "command": f"python bench/disk/{Path(__file__).name} " + " ".join(sys.argv[1:]),
        **facts(("numpy", "xxhash", "nixl-cu13")),
        "huge_pages_of_host_memory": HUGE_PAGES.read_text().strip(),
        "fio": subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True).stdout.strip(),
        "load_at_the_end": os.getloadavg()[0],
        "cpu_s_stolen_by_the_host": round(stolen_s() - stolen_before_s, 2),
        "throughput": rows,
        "steps": steps,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    failures = missed(rows) + gil_steps.missed(steps)
    for failure in failures:
        print(f"missed target: {failure}")
    return 0 if arguments.quick or not failures else 1


if __name__ == "__main__":
    sys.exit(main())
