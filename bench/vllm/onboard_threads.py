"""Time to copy all blocks of one prompt into G1, with one thread or several.

    python bench/vllm/onboard_threads.py --output bench/results/NAME-vllm-onboard-threads.json

It requires torch, numpy and this repository, and no engine. It takes about a minute.

A prompt of 4000 tokens of the model `vllm-81m` in bfloat16 has 31 blocks, each of 12 pieces of 128 KiB, one
per layer, from consecutive slots to scattered blocks. With n threads each copies a run of 31 / n blocks, through
the copier that a worker uses; times end with the last byte. The thread counts alternate. "One layer" is the time of
one layer's pieces alone, the least that a request would wait for if layers were onboarded one by one. Together with
the compute time of the rest of the prompt this limits the gain of other ways of onboarding; see
`docs/adr/0008-blocks-are-onboarded-whole.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from facts import facts

from kvbm.device.copier import DeviceCopier
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.segment import Segment

BLOCKS, LAYERS, PIECE_BYTES = 31, 12, 128 << 10
G1_BLOCKS, SLOTS = 66, 680
THREADS = (1, 2, 4)


class Rig:
    """G1, a segment and a copier between them that moves `blocks` at a time."""

    def __init__(self, layers: int, threads: int) -> None:
        starts = range(0, layers * G1_BLOCKS * PIECE_BYTES, G1_BLOCKS * PIECE_BYTES)
        layout = BlockLayout(tuple(Piece(0, start, PIECE_BYTES, PIECE_BYTES) for start in starts), G1_BLOCKS)
        self._storage = torch.zeros(layout.storage_bytes(0), dtype=torch.uint8)
        self._segment = Segment.create(rank=0, layout=layout, slot_count=SLOTS, pin=False)
        self._copier = DeviceCopier(layout, [self._storage], self._segment)
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads

    def onboard(self, choice: random.Random) -> float:
        """Seconds from submission until the last byte is copied."""
        blocks = choice.sample(range(1, G1_BLOCKS), BLOCKS)
        first = choice.randrange(SLOTS - BLOCKS)
        slots = list(range(first, first + BLOCKS))
        cuts = [BLOCKS * number // self._threads for number in range(self._threads + 1)]
        started = time.perf_counter()
        futures = [
            self._pool.submit(self._copier.onboard, slots[begin:end], blocks[begin:end], None)
            for begin, end in pairwise(cuts)
        ]
        for future in futures:
            future.result()
        return time.perf_counter() - started

    def close(self) -> None:
        self._pool.shutdown()
        self._segment.close()


def measure(rounds: int) -> dict[str, dict[str, float]]:
    rigs = {f"whole, {count} threads": Rig(LAYERS, count) for count in THREADS} | {"one layer, 1 thread": Rig(1, 1)}
    choice = random.Random(1)
    samples: dict[str, list[float]] = {name: [] for name in rigs}
    for number in range(rounds + 3):
        for name in choice.sample(list(rigs), len(rigs)):
            seconds = rigs[name].onboard(choice)
            if number >= 3:
                samples[name].append(seconds * 1000)
    for rig in rigs.values():
        rig.close()
    return {
        name: {
            "p50_ms": round(statistics.median(values), 2),
            "p10_ms": round(statistics.quantiles(values, n=10)[0], 2),
            "p90_ms": round(statistics.quantiles(values, n=10)[-1], 2),
        }
        for name, values in samples.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    result = {
        "benchmark": "vllm_onboard_threads",
        **facts(("torch", "kvbm-cli")),
        "command": [Path(sys.executable).name, *sys.argv],
        "bytes": BLOCKS * LAYERS * PIECE_BYTES,
        "copies": measure(options.rounds),
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
