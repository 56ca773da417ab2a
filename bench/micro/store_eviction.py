"""The block store with `lru` and with `adaptive` eviction: the same work, in turns, in one run.

    python bench/micro/store_eviction.py --output bench/results/NAME-store-eviction.json

With `--before DIRECTORY`, a checkout of another commit, the store of that commit takes part, and ratios compare with
it. The commit before adaptive eviction is 2dad2617.

Per operation on 1000 blocks of a full store, without events: `match`, `pin` with release, `touch`, and `register`: to
allocate (which evicts 1000 blocks), stage, register and release. Eight conversations grow in turn, 125 blocks at a
time, until the store has been filled twice. Rows that end in "scattered" take their blocks from the whole store. Times
are medians of CPU time of the thread; the contenders take turns in another order each round.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "vllm")]

from facts import facts  # noqa: E402

from kvbm.core.store import BlockStore  # noqa: E402
from kvbm.types import Tier  # noqa: E402

BEFORE, LRU, ADAPTIVE = "before", "lru", "adaptive"
BATCH, STEP, CONVERSATIONS = 1000, 125, 8


def names(numbers: range | list[int]) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest()[:16] for number in numbers]


def store_of(checkout: Path, capacity: int) -> Any:
    """Return a store of another commit, whose modules live beside those of this one."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "kvbm"}
    sys.path.insert(0, str(checkout))
    try:
        module, tiers = importlib.import_module("kvbm.core.store"), importlib.import_module("kvbm.types")
    finally:
        sys.path.remove(str(checkout))
    assert module.__file__ is not None, module
    assert Path(module.__file__).is_relative_to(checkout), module.__file__
    sys.modules.update(ours)
    return module.BlockStore(capacity, tier=tiers.Tier.HOST, events=False)


class Contender:
    def __init__(self, store: Any) -> None:
        self.store = store
        capacity = store.capacity_blocks
        self.samples: dict[str, list[float]] = {}
        self.next_number = 0
        self.chains: list[range] = []
        while self.next_number < 2 * capacity:
            starts = [self.next_number + at * BATCH for at in range(CONVERSATIONS)]
            for offset in range(0, BATCH, STEP):
                for start in starts:
                    self.register(names(range(start + offset, start + offset + STEP)))
            self.chains += [range(start, start + BATCH) for start in starts]
            self.next_number += CONVERSATIONS * BATCH
        self.chains = self.chains[-(capacity // BATCH - 2 * CONVERSATIONS) :]

    def register(self, keys: list[bytes]) -> None:
        self.store.allocate(len(keys)).register(keys).release()

    def pin(self, keys: list[bytes]) -> None:
        self.store.pin(keys).release()

    def round(self, choice: random.Random) -> None:
        living = self.chains[len(self.chains) // 2 :]
        scattered = list(dict.fromkeys(choice.choice(living)[choice.randrange(BATCH)] for _ in range(BATCH)))
        self.timed("match", self.store.match, names(choice.choice(living)))
        self.timed("match scattered", self.store.match, names(scattered))
        self.timed("pin", self.pin, names(choice.choice(living)))
        self.timed("pin scattered", self.pin, names(scattered))
        self.timed("touch", self.store.touch, names(choice.choice(living)))
        new = range(self.next_number, self.next_number + BATCH)
        self.next_number += BATCH
        self.timed("register", self.register, names(new))
        self.chains = [*self.chains[1:], new]

    def timed(self, row: str, call: Callable[[list[bytes]], Any], keys: list[bytes]) -> None:
        began = time.thread_time_ns()
        call(keys)
        self.samples.setdefault(row, []).append((time.thread_time_ns() - began) / 1000)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--before", type=Path, help="checkout of another commit that takes part")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    stores: dict[str, Any] = {}
    if options.before:
        stores[BEFORE] = store_of(options.before.resolve(), options.blocks)
    for name in (LRU, ADAPTIVE):
        stores[name] = BlockStore(options.blocks, tier=Tier.HOST, events=False, eviction=name)
    contenders = {name: Contender(store) for name, store in stores.items()}
    order, choices = random.Random(1), {name: random.Random(2) for name in contenders}
    gc.collect()
    gc.disable()
    for _ in range(options.rounds):
        for name in order.sample(list(contenders), len(contenders)):
            contenders[name].round(choices[name])
    medians = {
        name: {row: round(statistics.median(taken), 1) for row, taken in one.samples.items()}
        for name, one in contenders.items()
    }
    base, *others = medians
    ratios = {
        name: {row: round(medians[name][row] / taken, 3) for row, taken in medians[base].items()} for name in others
    }
    print(" " * 16 + "".join(f"{name:>10}" for name in medians) + "".join(f"{f'{name}/{base}':>17}" for name in others))
    for row in medians[base]:
        times = "".join(f"{taken[row]:>10.0f}" for taken in medians.values())
        print(f"{row:<16}{times}" + "".join(f"{taken[row]:>17.3f}" for taken in ratios.values()))
    if options.output:
        found = {"blocks": options.blocks, "rounds": options.rounds, "median_us": medians, "compared_with": base}
        found["ratio"] = ratios
        options.output.write_text(json.dumps({**facts(()), **found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
