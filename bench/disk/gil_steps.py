"""What disk threads at full rate cost an engine's steps.

A step is 5 ms of Python on one core, which never gives up the interpreter's lock by itself. After each step the engine
does what its leader does, polls and submits (timed apart), and then either goes on at once ("busy"), so that disk
threads get the lock only where the interpreter takes it from the step, or waits for a millisecond as for a device
("waits"). The disk's threads are on the other core, at the full rate of memory: the arena lies on tmpfs, where each
copies its own bytes and the kernel does nothing elsewhere. Rounds with and without the disk take turns; what is
compared is the 99th percentile of a step over all rounds.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvbm.disk.tier import DiskSettings, DiskTier, Namespace
from kvbm.host_memory import THIS_MACHINE
from kvbm.shared_memory import SharedMemory

STEP_S = 0.005
WAIT_S = 0.001
STEPS_PER_ROUND = 200
ROUNDS = 9
AIM_MS = 0.3
ENGINE_CORE, DISK_CORE = 0, 1
BLOCK_COUNT = 256
BLOCKS_PER_TICKET = 32
TICKETS_IN_FLIGHT = 3
KINDS = ("busy", "waits")
IMPLEMENTATIONS = ("threads", "nixl")
BLOCK_SIZES = (256 << 10, 1 << 20)


class Load:
    """A tier that is kept at work: half reads and half writes, polled and fed once a step."""

    def __init__(self, directory: Path, block_bytes: int, io: str) -> None:
        self._memory = SharedMemory.allocate(
            "bench", BLOCK_COUNT * block_bytes, who="bench", node=None, memory=THIS_MACHINE, progress=None
        )
        shards = [np.frombuffer(self._memory.mapping, np.uint8).reshape(BLOCK_COUNT, block_bytes)]
        settings = DiskSettings(directory, block_count=2 * BLOCK_COUNT, io=io)
        before = set(threading.enumerate())
        self.tier = DiskTier.open(settings, Namespace(os.urandom(16), {}), shards, hash_bytes=16)
        assert self.tier.io_name == io, self.tier.io_name
        self._threads = [thread for thread in threading.enumerate() if thread not in before]
        self._hashes = [os.urandom(16) for _ in range(2 * BLOCK_COUNT)]
        self._next = self._in_flight = 0
        self._is_fed = True
        for _ in range(2 * BLOCK_COUNT // BLOCKS_PER_TICKET):  # so that everything can be read
            self._begin_write()
        self.drain()
        for thread in self._threads:
            os.sched_setaffinity(thread.native_id, {DISK_CORE})

    def tick(self) -> None:
        """What a leader does in a step."""
        for result in self.tier.poll():
            assert all(result.is_good), result
            self._in_flight -= 1
        while self._is_fed and self._in_flight < TICKETS_IN_FLIGHT:
            (self._begin_read if self._next % 2 else self._begin_write)()

    def feed(self) -> None:
        self._is_fed = True

    def drain(self) -> None:
        self._is_fed = False
        while self._in_flight:
            self.tick()
            time.sleep(WAIT_S)

    def moved_bytes(self) -> int:
        return self.tier.counters.bytes_read + self.tier.counters.bytes_written

    def close(self) -> None:
        self.tier.close(30)
        self._memory.close()

    def _begin_read(self) -> None:
        slots, host_slots, hashes = self._ticket()
        self.tier.read(self._next, hashes, slots, host_slots)

    def _begin_write(self) -> None:
        slots, host_slots, hashes = self._ticket()
        self.tier.write(self._next, hashes, host_slots, slots, [b""] * len(slots))

    def _ticket(self) -> tuple[list[int], list[int], list[bytes]]:
        """Tickets in flight have neither disk nor host slots in common, except for reads of what is not written."""
        self._next += 1
        self._in_flight += 1
        first = self._next * BLOCKS_PER_TICKET
        slots = [(first + position) % (2 * BLOCK_COUNT) for position in range(BLOCKS_PER_TICKET)]
        return slots, [slot % BLOCK_COUNT for slot in slots], [self._hashes[slot] for slot in slots]


def measure_steps(*, is_quick: bool = False) -> list[dict[str, object]]:
    """A row per kind of step, implementation and block size."""
    rounds = 1 if is_quick else ROUNDS
    results = []
    with on_core(ENGINE_CORE):
        turns = turns_of(STEP_S)
        for block_bytes in BLOCK_SIZES:
            for io in IMPLEMENTATIONS:
                with tempfile.TemporaryDirectory(prefix="kvbm-steps-", dir="/dev/shm") as directory:
                    load = Load(Path(directory), block_bytes, io)
                    try:
                        results += [measure(load, io, block_bytes, kind, turns, rounds) for kind in KINDS]
                    finally:
                        load.close()
    return results


def measure(load: Load, io: str, block_bytes: int, kind: str, turns: int, rounds: int) -> dict[str, object]:
    alone: list[float] = []
    beside: list[float] = []
    ticks: list[float] = []
    moved, seconds = 0, 0.0
    for _ in range(rounds):
        load.drain()
        alone += run_steps(load, kind, turns)[0]
        load.feed()
        run_steps(load, kind, turns, count=10)
        before, started = load.moved_bytes(), time.perf_counter()
        steps, some = run_steps(load, kind, turns)
        moved, seconds = moved + load.moved_bytes() - before, seconds + time.perf_counter() - started
        beside += steps
        ticks += some
    added = {
        name: round((at(beside, share) - at(alone, share)) * 1e3, 3) for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    result: dict[str, object] = {
        "steps": kind,
        "io": io,
        "block_bytes": block_bytes,
        "step_ms_alone": {"p50": round(at(alone, 0.5) * 1e3, 3), "p99": round(at(alone, 0.99) * 1e3, 3)},
        "step_ms_beside_the_disk": {"p50": round(at(beside, 0.5) * 1e3, 3), "p99": round(at(beside, 0.99) * 1e3, 3)},
        "added_ms": added,
        "poll_and_submit_ms": {"p50": round(at(ticks, 0.5) * 1e3, 3), "p99": round(at(ticks, 0.99) * 1e3, 3)},
        "disk_megabytes_per_s": round(moved / seconds / 1e6),
        "aim_ms": AIM_MS,
        "missed": None,
    }
    if added["p99"] > AIM_MS:
        result["missed"] = f"steps ({kind}) beside {io} with {block_bytes >> 10} KiB: p99 + {added['p99']} ms"
    print(
        f"{kind:<6} {io:<8} {block_bytes >> 10:>5} KiB  alone {result['step_ms_alone']}  added {added}  "
        f"tick {result['poll_and_submit_ms']}  disk {result['disk_megabytes_per_s']} MB/s",
        flush=True,
    )
    return result


def run_steps(load: Load, kind: str, turns: int, count: int = STEPS_PER_ROUND) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of what the leader does after it."""
    steps, ticks = [], []
    gc.disable()
    for _ in range(count):
        started = time.perf_counter()
        hold(turns)
        ended = time.perf_counter()
        load.tick()
        steps.append(ended - started)
        ticks.append(time.perf_counter() - ended)
        if kind == "waits":
            time.sleep(WAIT_S)
    gc.enable()
    return steps, ticks


def hold(turns: int) -> int:
    total = 0
    for number in range(turns):
        total += number
    return total


def turns_of(seconds: float) -> int:
    """How many turns of the loop take so long here."""
    turns = 100_000
    took = min(timed(turns) for _ in range(50))
    return int(turns * seconds / took)


def timed(turns: int) -> float:
    started = time.perf_counter()
    hold(turns)
    return time.perf_counter() - started


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
