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
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "shared")]

from mooncake_pool import mooncake_pool, wait_until  # noqa: E402

from kvbm.shared.geometry import RunGeometry  # noqa: E402
from kvbm.shared.keys import KeySpace, run_blocks  # noqa: E402
from kvbm.shared.mooncake_engine import MooncakeEngine  # noqa: E402
from kvbm.shared.object_engine import Outgoing  # noqa: E402
from kvbm.shared.orders import Get, Outcome, Put  # noqa: E402
from kvbm.shared.protection import NoProtection  # noqa: E402
from kvbm.shared.run_format import RunFormat  # noqa: E402
from kvbm.shared.service.server import open_engine  # noqa: E402
from kvbm.shared.storage import SharedStorage  # noqa: E402

SHAPES = ((4 << 20, 16), (1 << 20, 64))  # bytes and number of blocks
TARGET, ROUNDS = 0.85, 40
NAMESPACE = b"bench of kvbm..."
LIMIT_S = 60.0
BLOCK_TOKENS = 16


class Tier:
    """SharedStorage over slots of one segment. Name i is the block in slot i."""

    def __init__(self, engine: MooncakeEngine, size: int, count: int) -> None:
        self.slots = np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)
        self._per_object = run_blocks(size, BLOCK_TOKENS, min_bytes=engine.min_run_bytes)
        form = RunFormat(NAMESPACE, self._per_object, size, 16)
        geometry = RunGeometry([self.slots], [size], form, NoProtection())
        self.storage = SharedStorage(engine, KeySpace(NAMESPACE), geometry, lambda *_: True)
        self._has_result = threading.Event()
        self.storage.on_result = self._has_result.set
        self._tickets = 0

    def write(self, names: list[bytes]) -> None:
        generations = [1] * self._per_object
        self._run([Put(self._next(), run, slots, generations) for run, slots in self._runs(names)])

    def read(self, names: list[bytes]) -> None:
        self._run([Get(self._next(), run, slots) for run, slots in self._runs(names)])

    def _runs(self, names: list[bytes]) -> list[tuple[list[bytes], list[int]]]:
        step = self._per_object
        return [(names[at : at + step], list(range(at, at + step))) for at in range(0, len(names), step)]

    def _next(self) -> int:
        self._tickets += 1
        return self._tickets

    def _run(self, orders: list[Get | Put]) -> None:
        for order in orders:
            self.storage.submit(order)
        left, deadline_s = len(orders), time.monotonic() + LIMIT_S
        while left:
            for result in self.storage.poll():
                assert getattr(result, "outcome", None) is Outcome.GOOD, result
                left -= 1
            assert time.monotonic() < deadline_s
            if left:
                self._has_result.wait(0.1)
                self._has_result.clear()


class Calls:
    """Mooncake's own calls, with as many objects in each as the tier's."""

    def __init__(self, engine: MooncakeEngine, slots: np.ndarray) -> None:
        self._store, self._batch = engine._store, engine.batch_objects
        self._size = slots.shape[1]
        self._addresses = [slots[index].ctypes.data for index in range(len(slots))]

    def write(self, names: list[bytes]) -> None:
        self._run(self._store.batch_put_from_multi_buffers, names, 0)

    def read(self, names: list[bytes]) -> None:
        self._run(self._store.batch_get_into_multi_buffers, names, self._size)

    def _run(self, call: Callable[..., list[int]], names: list[bytes], good: int) -> None:
        for at in range(0, len(names), self._batch):
            part = names[at : at + self._batch]
            addresses = [[address] for address in self._addresses[at : at + self._batch]]
            codes = call([f"calls/{name.hex()}" for name in part], addresses, [[self._size]] * len(part))
            assert codes == [good] * len(part), codes


def measure(url: str, size: int, count: int) -> dict[str, object]:
    engine = open_engine(url, 16, KeySpace(NAMESPACE), {}, writes=False)
    assert isinstance(engine, MooncakeEngine)
    wait_until(lambda: engine.put([Outgoing("first", [b"x"], 1)])[0].outcome is Outcome.GOOD, "an owner is there")
    tier = Tier(engine, size, count)
    sides = {"tier": tier, "calls": Calls(engine, tier.slots)}
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
        engine._store.remove_by_regex(".*", True)
    tier.storage.close(1.0)
    row: dict[str, object] = {"block_bytes": size, "blocks": count, "blocks_in_object": tier._per_object}
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
    commit = ["git", "rev-parse", "--short=12", "HEAD"]
    result = {
        "benchmark": "shared_mooncake",
        "command": "python bench/micro/shared_mooncake.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{len(os.sched_getaffinity(0))}cpu-{platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "mooncake": version("mooncake-transfer-engine-non-cuda"),
        "load_1_min": round(os.getloadavg()[0], 1),
        "commit": subprocess.run(commit, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip(),
        "rounds": ROUNDS,
        "target": f"{TARGET} of the throughput of Mooncake's own calls",
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    ratios = [float(str(row[f"{what}_ratio"])) for row in rows for what in ("write", "read")]
    return 0 if min(ratios) >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
