"""Throughput of the shared tier on Mooncake Store, and of Mooncake's own batch calls, in turns in one run.

    python bench/micro/shared_mooncake.py       # prints a table; --output bench/results/<machine>-shared-mooncake.json

Starts a master and an owner with 512 MB on free ports of 127.0.0.1, TCP. Both sides move the same bytes between one
process and that owner: 16 blocks of 4 MiB and 64 blocks of 1 MiB. The calls move one object per block. The tier moves
runs of blocks as orders of SharedStorage, with headers and checksums; a run has 4 MiB. Objects are new
in each round. Exits with 1 if the tier reaches less than
0.85 of the throughput of the calls, in the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from shared_tier_bench import NAMESPACE, REPOSITORY, TierUnderTest, about_this_run, write_result

sys.path.insert(0, str(REPOSITORY / "tests" / "shared"))

from mooncake_pool import mooncake_pool, wait_until

from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.object_store import Outgoing
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.stores.mooncake import MooncakeStore
from kvbm.tiers.shared.stores.open import open_store

SHAPES = ((4 << 20, 16), (1 << 20, 64))  # bytes and number of blocks
TARGET, ROUNDS = 0.85, 40


class Calls:
    """Mooncake's own calls, with as many objects in each as the tier's."""

    def __init__(self, store: MooncakeStore, slots: np.ndarray) -> None:
        self._pool, self._batch = store._pool, store.batch_objects
        self._size = slots.shape[1]
        self._addresses = [slots[index].ctypes.data for index in range(len(slots))]

    def write(self, names: list[bytes]) -> None:
        self._run(self._pool.batch_put_from_multi_buffers, names, 0)

    def read(self, names: list[bytes]) -> None:
        self._run(self._pool.batch_get_into_multi_buffers, names, self._size)

    def _run(self, call: Callable[..., list[int]], names: list[bytes], good: int) -> None:
        for at in range(0, len(names), self._batch):
            part = names[at : at + self._batch]
            addresses = [[address] for address in self._addresses[at : at + self._batch]]
            codes = call([f"calls/{name.hex()}" for name in part], addresses, [[self._size]] * len(part))
            assert codes == [good] * len(part), codes


def measure(url: str, size: int, count: int) -> dict[str, object]:
    store = open_store(url, 16, KeySpace(NAMESPACE), {}, writes=False)
    assert isinstance(store, MooncakeStore)
    wait_until(lambda: store.put([Outgoing("first", [b"x"])])[0].outcome is Outcome.GOOD, "an owner is there")
    tier = TierUnderTest(store, size, count)
    sides = {"tier": tier, "calls": Calls(store, tier.slots)}
    speeds: dict[str, dict[str, list[float]]] = {"write": {}, "read": {}}
    for turn in range(ROUNDS + 1):  # the first one is not counted
        names = [os.urandom(16) for _ in range(count)]
        for side in sorted(sides, reverse=bool(turn % 2)):
            for what in ("write", "read"):
                began_s = time.perf_counter()
                getattr(sides[side], what)(names)
                if turn:
                    mb_s = size * count / (time.perf_counter() - began_s) / 1e6
                    speeds[what].setdefault(side, []).append(mb_s)
        store._pool.remove_by_regex(".*", True)
    tier.storage.close(1.0)
    row: dict[str, object] = {"block_bytes": size, "blocks": count, "blocks_in_object": tier.blocks_in_object}
    for what, sides_of in speeds.items():
        medians = {side: statistics.median(values) for side, values in sides_of.items()}
        row |= {f"{what}_{side}_mb_s": round(value) for side, value in medians.items()}
        row[f"{what}_ratio"] = round(medians["tier"] / medians["calls"], 3)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, mooncake_pool(Path(directory)) as pool:
        rows = [measure(pool.url, size, count) for size, count in SHAPES]
    for row in rows:
        print(json.dumps(row))
    result = {
        **about_this_run("shared_mooncake"),
        "mooncake": version("mooncake-transfer-engine-non-cuda"),
        "rounds": ROUNDS,
        "target": f"{TARGET} of the throughput of Mooncake's own calls",
        "rows": rows,
    }
    write_result(arguments.output, result)
    ratios = [float(str(row[f"{what}_ratio"])) for row in rows for what in ("write", "read")]
    return 0 if min(ratios) >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
