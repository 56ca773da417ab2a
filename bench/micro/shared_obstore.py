"""Throughput and processor time of the shared tier on an object store, and of a loop around obstore's own calls.

    python bench/micro/shared_obstore.py        # prints rows; --output bench/results/<machine>-shared-obstore.json

Both sides take turns in one run and keep 16 requests for objects of 4 MiB in flight with 16 threads. The loop calls
obstore.put with the bytes, and obstore.get, whose result it holds as bytes. The tier runs the same as orders of
SharedStorage: it also asks whether an object exists before it writes it, computes and checks a checksum of each block,
and brings the bytes to their slots in host memory. The stores are a directory in memory (tmpfs) and one on disk, and
Ceph's S3 server if it is installed. Exits with 1 if the tier reaches less than 0.85 of the throughput of the loop, or
needs more than 1.3 times its processor time, in the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import obstore
from shared_tier_bench import NAMESPACE, REPOSITORY, TierUnderTest, about_this_run, write_result

sys.path.insert(0, str(REPOSITORY / "tests" / "shared"))

from servers import NotInstalled, running

from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.stores.obstore import connection
from kvbm.tiers.shared.stores.open import open_store

SIZE, COUNT, IN_FLIGHT = 4 << 20, 32, 16
THROUGHPUT, CPU, ROUNDS = 0.85, 1.3, 15


class Loop:
    """obstore's own calls."""

    def __init__(self, url: str, slots: np.ndarray) -> None:
        self._store = connection(url)(60.0)
        self._slots = slots
        self._threads = ThreadPoolExecutor(IN_FLIGHT)

    def write(self, names: list[bytes]) -> None:
        def put(index: int) -> None:
            obstore.put(self._store, f"loop/{names[index].hex()}", memoryview(self._slots[index]), use_multipart=False)

        list(self._threads.map(put, range(len(names))))

    def read(self, names: list[bytes]) -> None:
        def get(name: bytes) -> int:
            return len(memoryview(obstore.get(self._store, f"loop/{name.hex()}").bytes()))

        assert list(self._threads.map(get, names)) == [SIZE] * len(names)

    def delete(self, names: list[bytes]) -> None:
        obstore.delete(self._store, [f"loop/{name.hex()}" for name in names])
        keys = KeySpace(NAMESPACE)
        obstore.delete(self._store, [keys.key(name) for name in names])


def measure(name: str, url: str, rounds: int) -> dict[str, object]:
    store = open_store(url, IN_FLIGHT, KeySpace(NAMESPACE), {}, writes=True)
    tier = TierUnderTest(store, SIZE, COUNT)
    loop = Loop(url, tier.slots)
    sides: dict[str, TierUnderTest | Loop] = {"tier": tier, "loop": loop}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):  # the first one is not counted
        names = [os.urandom(16) for _ in range(COUNT)]
        for side in sorted(sides, reverse=bool(turn % 2)):
            for what in ("write", "read"):
                taken = timed(getattr(sides[side], what), names)
                if turn:
                    found.setdefault((what, side), []).append(taken)
        loop.delete(names)
    tier.storage.close(1.0)
    row: dict[str, object] = {"store": name, "object_bytes": SIZE, "in_flight": IN_FLIGHT}
    for what in ("write", "read"):
        wall, cpu = ({side: median(found[what, side], part) for side in sides} for part in (0, 1))
        row |= {f"{what}_{side}_mb_s": round(SIZE * COUNT / wall[side] / 1e6) for side in sides}
        row[f"{what}_ratio"] = round(wall["loop"] / wall["tier"], 3)
        row[f"{what}_cpu_ratio"] = round(cpu["tier"] / cpu["loop"], 3)
    return row


def timed(run: Callable[[list[bytes]], None], names: list[bytes]) -> tuple[float, float]:
    """Return seconds and processor seconds, those of all threads of this process."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    run(names)
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s


def median(taken: list[tuple[float, float]], part: int) -> float:
    return statistics.median(one[part] for one in taken)


@contextmanager
def stores(names: list[str]) -> Iterator[Iterator[tuple[str, str]]]:
    """Yield names and URLs of stores."""

    def each() -> Iterator[tuple[str, str]]:
        for name in names:
            if name in ("memory", "disk"):
                with tempfile.TemporaryDirectory(dir="/dev/shm" if name == "memory" else None) as directory:
                    yield f"directory in {name}", f"file://{directory}"
                continue
            with tempfile.TemporaryDirectory() as directory, running(name, Path(directory)) as server:
                os.environ.update(server.environment)
                yield name, server.url

    yield each()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--stores", nargs="+", default=["memory", "disk", "ceph"])
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    left_out = {}
    for name in arguments.stores:
        try:
            with stores([name]) as found:
                for store, url in found:
                    rows.append(measure(store, url, arguments.rounds))
                    print(json.dumps(rows[-1]), flush=True)
        except NotInstalled as error:
            left_out[name] = str(error)
    result = {
        **about_this_run("shared_obstore"),
        "obstore": version("obstore"),
        "rounds": arguments.rounds,
        "target": f"{THROUGHPUT} of the throughput of the loop, {CPU} of its processor time",
        "left_out": left_out,
        "rows": rows,
    }
    write_result(arguments.output, result)
    ratios = [(row[f"{what}_ratio"], row[f"{what}_cpu_ratio"]) for row in rows for what in ("write", "read")]
    return 0 if all(float(str(a)) >= THROUGHPUT and float(str(b)) <= CPU for a, b in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
