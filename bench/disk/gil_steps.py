"""Measures how disk threads at full rate slow an engine's steps.

A step is 5 ms of Python on one core that never releases the GIL by itself. After each step the engine polls and submits
as its leader does; this is timed separately. Then it either continues at once ("busy"), so that disk threads get the
GIL only by the interpreter's switch interval, or waits one millisecond as for a device ("waits"). The disk's threads
run on the other core at the full rate of memory: the arena is on tmpfs, where each thread copies its own bytes. Rounds
with and without the disk alternate, and their 99th percentiles are compared.

`not_running_ms` is the part of a step in which its thread does not run, because it waits for the GIL or for the core.
The target limits the increase of that part. `added_p99_ms` is the increase of the whole step. It includes the cost of
shared memory bandwidth and of other work on the machine: if the p99 of `step_ms_alone` is far above 5 ms, it means
little.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from engine_side import EngineSide

STEP_S = 0.005
WAIT_S = 0.001
STEPS_PER_ROUND = 150
ROUNDS = 7
AIM_MS = 0.3
ENGINE_CORE, DISK_CORE = 0, 1
BLOCK_COUNT = 256
BLOCKS_PER_TICKET = 32
TICKETS_IN_FLIGHT = 3
PLACES = ("own process", "engine's process")  # the first is where engines have it
KINDS = ("busy", "waits")
IMPLEMENTATIONS = ("threads", "nixl")
BLOCK_SIZES = (256 << 10, 1 << 20)


class Load:
    """A tier under constant load: half reads and half writes, polled and refilled once per step."""

    def __init__(self, directory: Path, block_bytes: int, io: str, place: str) -> None:
        self._engine = EngineSide(
            directory,
            block_bytes=block_bytes,
            host_slots=BLOCK_COUNT,
            disk_slots=2 * BLOCK_COUNT,
            io=io,
            is_own_process=place == PLACES[0],
        )
        self._next = self._in_flight = self._moved_blocks = 0
        self._block_bytes = block_bytes
        self._is_fed = True
        for _ in range(2 * BLOCK_COUNT // BLOCKS_PER_TICKET):  # so that everything can be read
            self._begin(is_write=True)
        self.drain()
        for thread in self._engine.threads():
            os.sched_setaffinity(thread, {DISK_CORE})

    def tick(self) -> None:
        """Poll and submit, as a leader does in a step."""
        for result in self._engine.disk.poll():
            assert all(result.is_good), result
            self._in_flight -= 1
            self._moved_blocks += len(result.is_good)
        while self._is_fed and self._in_flight < TICKETS_IN_FLIGHT:
            self._begin(is_write=self._next % 2 == 0)

    def feed(self) -> None:
        self._is_fed = True

    def drain(self) -> None:
        self._is_fed = False
        while self._in_flight:
            self.tick()
            time.sleep(WAIT_S)

    def moved_bytes(self) -> int:
        return self._moved_blocks * self._block_bytes

    def close(self) -> None:
        self._engine.close()

    def _begin(self, *, is_write: bool) -> None:
        """A ticket whose slots no ticket in flight uses."""
        self._next += 1
        self._in_flight += 1
        first = self._next * BLOCKS_PER_TICKET
        slots = [(first + position) % (2 * BLOCK_COUNT) for position in range(BLOCKS_PER_TICKET)]
        host_slots = [slot % BLOCK_COUNT for slot in slots]
        if is_write:
            self._engine.write(self._next, host_slots, slots)
        else:
            self._engine.read(self._next, slots, host_slots)


def measure_steps(*, is_quick: bool = False) -> list[dict[str, object]]:
    """One row per place, implementation, block size and kind of step; the target is for the place of engines."""
    results = []
    with on_core(ENGINE_CORE):
        turns = turns_of(STEP_S)
        for place, io, block_bytes in product(PLACES, IMPLEMENTATIONS, BLOCK_SIZES):
            with tempfile.TemporaryDirectory(prefix="kvbm-steps-", dir="/dev/shm") as directory:
                load = Load(Path(directory), block_bytes, io, place)
                try:
                    for kind in KINDS:
                        case = {"place": place, "io": io, "block_bytes": block_bytes, "steps": kind}
                        results.append({**case, **measure(load, kind, turns, 1 if is_quick else ROUNDS)})
                        print_row(results[-1])
                finally:
                    load.close()
    return results


def measure(load: Load, kind: str, turns: int, rounds: int) -> dict[str, object]:
    alone, beside = Times(), Times()
    moved, seconds = 0, 0.0
    for _ in range(rounds):
        load.drain()
        run_steps(load, kind, turns, STEPS_PER_ROUND, alone)
        load.feed()
        run_steps(load, kind, turns, 10, Times())
        before, started = load.moved_bytes(), time.perf_counter()
        run_steps(load, kind, turns, STEPS_PER_ROUND, beside)
        moved, seconds = moved + load.moved_bytes() - before, seconds + time.perf_counter() - started
    return {
        "step_ms_alone": percentiles(alone.steps),
        "step_ms_beside_the_disk": percentiles(beside.steps),
        "not_running_ms_alone": percentiles(alone.waits),
        "not_running_ms_beside_the_disk": percentiles(beside.waits),
        "poll_and_submit_ms": percentiles(beside.ticks),
        "added_not_running_p99_ms": round(percentiles(beside.waits)["p99"] - percentiles(alone.waits)["p99"], 3),
        "added_p99_ms": round(percentiles(beside.steps)["p99"] - percentiles(alone.steps)["p99"], 3),
        "disk_megabytes_per_s": round(moved / seconds / 1e6),
    }


def missed(rows: list[dict[str, object]]) -> list[str]:
    return [
        f"{case(row)}: a step waits for {row['added_not_running_p99_ms']} ms more at its p99 > {AIM_MS}"
        for row in rows
        if row["place"] == PLACES[0] and row["added_not_running_p99_ms"] > AIM_MS
    ]


def case(row: dict[str, object]) -> str:
    return f"{row['place']}, {row['io']}, {row['block_bytes'] >> 10} KiB, {row['steps']}"


def print_row(row: dict[str, object]) -> None:
    step, alone = row["step_ms_beside_the_disk"], row["step_ms_alone"]
    print(
        f"{case(row):<40} step p99 {alone['p99']} -> {step['p99']} ms ({row['added_p99_ms']:+}), "
        f"not running p99 {row['not_running_ms_alone']['p99']} -> {row['not_running_ms_beside_the_disk']['p99']}, "
        f"poll and submit p99 {row['poll_and_submit_ms']['p99']}, disk {row['disk_megabytes_per_s']} MB/s",
        flush=True,
    )


@dataclass(slots=True)
class Times:
    """Seconds of each step, of the time in which it did not run, and of the leader's work after it."""

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)


def run_steps(load: Load, kind: str, turns: int, count: int, times: Times) -> None:
    gc.disable()
    for _ in range(count):
        started, ran = time.perf_counter(), time.thread_time()
        hold(turns)
        ran, ended = time.thread_time() - ran, time.perf_counter()
        load.tick()
        times.ticks.append(time.perf_counter() - ended)
        times.steps.append(ended - started)
        times.waits.append(ended - started - ran)
        if kind == "waits":
            time.sleep(WAIT_S)
    gc.enable()


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 3)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def hold(turns: int) -> int:
    total = 0
    for number in range(turns):
        total += number
    return total


def turns_of(seconds: float) -> int:
    """Number of loop iterations that take this long on this machine."""
    turns = 100_000
    took = min(timed(turns) for _ in range(50))
    return int(turns * seconds / took)


def timed(turns: int) -> float:
    started = time.perf_counter()
    hold(turns)
    return time.perf_counter() - started


@contextmanager
def on_core(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
