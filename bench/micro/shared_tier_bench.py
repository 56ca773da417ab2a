"""What the benchmarks of the shared tier have in common: SharedStorage over slots of host memory, and their results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from kvbm.tiers.shared.extent_format import ExtentFormat
from kvbm.tiers.shared.geometry import ExtentGeometry
from kvbm.tiers.shared.keys import KeySpace, extent_blocks
from kvbm.tiers.shared.object_store import ObjectStore
from kvbm.tiers.shared.orders import Get, Outcome, Put
from kvbm.tiers.shared.protection import NoProtection
from kvbm.tiers.shared.settings import SharedSettings
from kvbm.tiers.shared.storage import SharedStorage

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NAMESPACE = b"bench of kvbm..."
LIMIT_S = 60.0
BLOCK_TOKENS = 16


class TierUnderTest:
    """SharedStorage over slots of one segment. Name i is the block in slot i."""

    def __init__(self, store: ObjectStore, size: int, count: int) -> None:
        self.slots = np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)
        self.blocks_in_object = extent_blocks(size, BLOCK_TOKENS)
        form = ExtentFormat(NAMESPACE, self.blocks_in_object, size, 16)
        geometry = ExtentGeometry([self.slots], [size], form, NoProtection())
        self.storage = SharedStorage(store, KeySpace(NAMESPACE), geometry, lambda *_: True, SharedSettings(""))
        self._has_result = threading.Event()
        self.storage.on_result = self._has_result.set
        self._tickets = 0

    def write(self, names: list[bytes]) -> None:
        generations = [1] * self.blocks_in_object
        self._run([Put(self._next(), run, slots, generations) for run, slots in self._runs(names)])

    def read(self, names: list[bytes]) -> None:
        self._run([Get(self._next(), run, slots) for run, slots in self._runs(names)])

    def _runs(self, names: list[bytes]) -> list[tuple[list[bytes], list[int]]]:
        step = self.blocks_in_object
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


def about_this_run(name: str) -> dict[str, object]:
    """Return what a result says about the machine and the commit."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return {
        "benchmark": name,
        "command": f"python bench/micro/{name}.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{len(os.sched_getaffinity(0))}cpu-{platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1_min": round(os.getloadavg()[0], 1),
        "commit": subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip(),
    }


def write_result(path: Path | None, result: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
