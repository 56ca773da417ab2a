"""Check and measure the copies between G1 and host memory on a CUDA device, or on the CPU without one.

    python bench/gpu/check_and_measure.py            # prints a table; --output bench/results/<machine>-gpu-script.json
    python bench/gpu/check_and_measure.py --quick    # seconds; checks that it works

It requires torch, numpy and this repository. For every shape of cache it first checks the bytes: it fills G1 with a
pattern of each block's number, offloads blocks to scattered slots, zeroes G1, onboards the slots into other blocks and
compares every byte. Then it measures both directions, up to `BATCH_BLOCKS` blocks per call, as a worker calls the
copier. The comparison is one plain copy of the same number of bytes (on CUDA: cudaMemcpy from page-locked memory; on
the CPU: memcpy). The two alternate in the same run, at other addresses each time. `ratio` is the median over the rounds
of the copier's bandwidth over the plain copy's; the target is 0.9 on CUDA and 0.8 on the CPU. On CUDA times are wall
clock times. On the CPU they are CPU times of the thread, because other work on the machine affects wall clock times.

On the CPU a call moves at most `CPU_CALL_BYTES`. Above a threshold, libc's memcpy bypasses the cache and moves up to
twice the bytes per second, which no copy of pieces of 2 MiB or less does. `memcpy_streaming_gb_s` in the result is that
speed.

On CUDA, short pieces are measured in four ways: through the staging buffer or directly, each with the driver's call
for many copies or one by one. `way` names it; `kvbm` is the one that kvbm chooses, by `MIN_DIRECT_BYTES` in
`kvbm/device/cuda.py`. `device_effects.py` then measures what copies cost others.

`device: cpu` in the result means that no CUDA code ran.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY))

import device_effects  # noqa: E402

from kvbm.device import cuda  # noqa: E402
from kvbm.device.copier import DeviceCopier  # noqa: E402
from kvbm.host.layout import BlockLayout  # noqa: E402
from kvbm.host.segment import Segment  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
BATCH_BLOCKS = 16
CPU_CALL_BYTES = 64 * MIB
STREAMING_BYTES = 512 * MIB
AIM = {"cuda": 0.9, "cpu": 0.8}


@dataclass(frozen=True, slots=True)
class Shape:
    """A cache: `layers` pieces of `piece_bytes` per block, or one piece (block-contiguous) when `layers` is 1."""

    piece_bytes: int
    layers: int

    @property
    def name(self) -> str:
        return "block-contiguous" if self.layers == 1 else f"layer-separate x{self.layers}"

    def layout(self, block_count: int) -> BlockLayout:
        if self.layers == 1:
            return BlockLayout.block_contiguous(block_count=block_count, block_bytes=self.piece_bytes)
        return device_effects.layer_separate(
            layer_count=self.layers, block_count=block_count, piece_bytes=self.piece_bytes
        )


SHAPES = {
    "cuda": (
        *(Shape(size, 1) for size in (64 * KIB, 256 * KIB, MIB, 2 * MIB, 2304 * KIB)),
        *(Shape(size, 16) for size in (64 * KIB, 256 * KIB, MIB, 2 * MIB)),
        Shape(32 * KIB, 72),  # an 8B model of 36 layers, 16 tokens per block, keys and values apart
    ),
    "cpu": tuple(Shape(size, layers) for layers in (1, 16) for size in (64 * KIB, 256 * KIB, MIB, 2 * MIB)),
}


WAY_SHAPES = tuple(Shape(size, 16) for size in (4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, MIB))
WAYS = {  # (whether the driver copies many ranges in one call, shortest piece that is copied directly)
    "staged, batch": (True, 1 << 60),
    "staged, one by one": (False, 1 << 60),
    "direct, batch": (True, 1),
    "direct, one by one": (False, 1),
}
CHOSEN = "kvbm"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `slots` is the order of the slots in a call; blocks of G1 are always scattered."""

    layout: str
    way: str
    piece_bytes: int
    direction: str
    slots: str
    copier_gb_s: float
    memcpy_gb_s: float
    ratio: float


class Rig:
    """A cache on `device`, a segment of as many slots, and the copier between them."""

    def __init__(self, shape: Shape, device: str, arena_bytes: int, way: str = CHOSEN) -> None:
        block_bytes = shape.piece_bytes * shape.layers
        self.batch = BATCH_BLOCKS if device == "cuda" else max(1, min(BATCH_BLOCKS, CPU_CALL_BYTES // block_bytes))
        self.block_count = max(2 * self.batch, arena_bytes // block_bytes)
        self.layout = shape.layout(self.block_count)
        self.storage = torch.zeros(self.layout.storage_bytes(0), dtype=torch.uint8, device=device)
        self.segment = Segment.create(rank=0, layout=self.layout, slot_count=self.block_count, pin=self.storage.is_cuda)
        self.copier = copier_of(way, self.layout, self.storage, self.segment)
        self.payload = torch.from_numpy(self.segment.payload).view(-1)
        self.random = np.random.default_rng(0)

    def close(self) -> None:
        self.segment.close()

    def scattered(self) -> list[int]:
        return self.random.permutation(self.block_count)[: self.batch].tolist()

    def consecutive(self) -> list[int]:
        first = int(self.random.integers(self.block_count - self.batch + 1))
        return list(range(first, first + self.batch))

    def block(self, number: int) -> torch.Tensor:
        """The bytes of a block of G1, on the CPU."""
        parts = (self.storage[p.offset + number * p.block_stride :][: p.length] for p in self.layout.pieces)
        return torch.cat([part.cpu() for part in parts])

    def fill(self, number: int) -> torch.Tensor:
        """Write the pattern of a block, and return it."""
        generator = torch.Generator().manual_seed(number)
        content = torch.randint(256, (self.layout.block_bytes,), dtype=torch.uint8, generator=generator)
        for piece, at in zip(self.layout.pieces, self.layout.slot_offsets, strict=True):
            start = piece.offset + number * piece.block_stride
            self.storage[start : start + piece.length] = content[at : at + piece.length].to(self.storage.device)
        return content

    def places(self, count_bytes: int) -> tuple[int, int]:
        """Start addresses of a plain copy of that many bytes, in G1 and in the segment."""
        room = (self.storage.numel() - count_bytes) // 4096
        first, second = self.random.integers(room + 1, size=2) * 4096
        return int(first), int(second)

    def plain_copy(self, direction: str, place: tuple[int, int], count_bytes: int) -> None:
        """Copy consecutive bytes and wait until the copy ends."""
        g1 = self.storage[place[0] : place[0] + count_bytes]
        g2 = self.payload[place[1] : place[1] + count_bytes]
        to, at = (g2, g1) if direction == "offload" else (g1, g2)
        if self.storage.is_cuda:
            to.copy_(at, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(to.data_ptr(), at.data_ptr(), count_bytes)

    def copy(self, direction: str, blocks: list[int], slots: list[int]) -> None:
        if direction == "offload":
            self.copier.offload(blocks, slots, self.copier.fence())
        else:
            self.copier.onboard(slots, blocks, self.copier.fence())


def copier_of(way: str, layout: BlockLayout, storage: torch.Tensor, segment: Segment) -> DeviceCopier:
    """Return a copier that copies this way. The direct ways require a driver that copies many ranges in one call."""
    if way == CHOSEN:
        return DeviceCopier(layout, [storage], segment)
    uses_batch_copy, shortest = WAYS[way]
    chosen, cuda.MIN_DIRECT_BYTES = cuda.MIN_DIRECT_BYTES, shortest
    try:
        copier = DeviceCopier(layout, [storage], segment)
    finally:
        cuda.MIN_DIRECT_BYTES = chosen
    copier._path._uses_batch_copy &= uses_batch_copy
    return copier


def check(shape: Shape, device: str, way: str = CHOSEN) -> None:
    """Offload, onboard into other blocks and compare every byte; AssertionError names the wrong block."""
    rig = Rig(shape, device, 0, way)
    for slots in (rig.scattered(), rig.consecutive()):
        blocks, others = rig.scattered(), rig.scattered()
        contents = [rig.fill(block) for block in blocks]
        rig.copy("offload", blocks, slots)
        rig.storage.fill_(0xCD)
        rig.copy("onboard", others, slots)
        for block, content in zip(others, contents, strict=True):
            assert torch.equal(rig.block(block), content), f"{shape.name} {shape.piece_bytes}: block {block} is wrong"
    rig.close()


def measure(
    shape: Shape, device: str, way: str = CHOSEN, *, arena_bytes: int, sample_bytes: int, rounds: int
) -> list[Row]:
    rig = Rig(shape, device, arena_bytes, way)
    call_bytes = rig.batch * rig.layout.block_bytes
    calls = max(1, sample_bytes // call_bytes)
    total_gb = calls * call_bytes / 1e9
    now_s = time.perf_counter if device == "cuda" else time.thread_time
    rows = []
    for slots_are, direction in itertools.product(("scattered", "consecutive"), ("offload", "onboard")):
        copier_rates, memcpy_rates = [], []
        for _ in range(rounds + 1):  # the first one warms up
            orders = [(rig.scattered(), getattr(rig, slots_are)()) for _ in range(calls)]
            places = [rig.places(call_bytes) for _ in range(calls)]
            begin = now_s()
            for blocks, slots in orders:
                rig.copy(direction, blocks, slots)
            middle = now_s()
            for place in places:
                rig.plain_copy(direction, place, call_bytes)
            copier_rates.append(total_gb / (middle - begin))
            memcpy_rates.append(total_gb / (now_s() - middle))
        rows.append(
            Row(
                layout=shape.name,
                way=way,
                piece_bytes=shape.piece_bytes,
                direction=direction,
                slots=slots_are,
                copier_gb_s=round(statistics.median(copier_rates[1:]), 2),
                memcpy_gb_s=round(statistics.median(memcpy_rates[1:]), 2),
                ratio=round(
                    statistics.median(o / t for o, t in zip(copier_rates[1:], memcpy_rates[1:], strict=True)), 3
                ),
            )
        )
    rig.close()
    return rows


def streaming_gb_s() -> float:
    """Bandwidth of memcpy of one large range, where libc bypasses the cache."""
    source, target = (torch.ones(STREAMING_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(5):
        begin = time.thread_time()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), STREAMING_BYTES)
        seconds.append(time.thread_time() - begin)
    return round(STREAMING_BYTES / 1e9 / statistics.median(seconds), 2)


def machine() -> str:
    """Name of the machine in result files: its processors and devices."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no-gpu"
    return "-".join(f"{os.cpu_count()}cpu {platform.machine()} {accelerator}".lower().split()).replace("_", "-")


def machine_facts(device: str) -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "cpu": names[0] if names else platform.machine(),
        "cpu_count": len(names),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "gpu_at_hand": torch.cuda.is_available(),
    }


def print_rows(rows: Sequence[Row], aim: float) -> None:
    titles = f"{'layout':<20} {'way':<18} {'piece':>8} {'direction':<9} {'slots':<12}"
    print(f"{titles} {'copier':>8} {'memcpy':>8} {'ratio':>6}")
    for row in rows:
        print(
            f"{row.layout:<20} {row.way:<18} {row.piece_bytes // KIB:>4} KiB {row.direction:<9} {row.slots:<12} "
            f"{row.copier_gb_s:>8.2f} {row.memcpy_gb_s:>8.2f} {row.ratio:>6.2f}{'' if row.ratio >= aim else '  < aim'}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few bytes and rounds, to check that the script works")
    parser.add_argument("--use-gpu-1-only", action="store_true", help="only say whether copies of GPU 1 use GPU 0")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    return parser.parse_args()


def run(device: str, *, quick: bool) -> dict[str, object]:
    """Check and measure the copies of every shape and print each result; returns the content of the result file."""
    torch.set_num_threads(1)
    facts, aim = machine_facts(device), AIM[device]
    print(f"device: {facts['device']}")
    if device == "cpu":
        print("no GPU was used: the checks and numbers below are of copies from memory to memory")
        facts["memcpy_streaming_gb_s"] = None if quick else streaming_gb_s()
    size = {"arena_bytes": 32 * MIB, "sample_bytes": 4 * MIB, "rounds": 1}
    if not quick:
        size = {"arena_bytes": (4 << 30) if device == "cuda" else 512 * MIB, "sample_bytes": 256 * MIB, "rounds": 9}
    shapes = SHAPES[device][:: 3 if quick else 1]
    rows: list[Row] = []
    for shape in shapes:
        check(shape, device)
        rows += measure(shape, device, **size)
    way_rows: list[Row] = []
    for shape, way in itertools.product(WAY_SHAPES[:: 3 if quick else 1], WAYS) if device == "cuda" else ():
        check(shape, device, way)
        way_rows += measure(shape, device, way, **size)
    print(f"every byte was right: both directions, {len(shapes)} shapes of cache, {len(way_rows) // 4} in another way")
    print_rows(rows + way_rows, aim)
    return facts | {
        "is_quick": quick,
        "batch_blocks": BATCH_BLOCKS,
        "aim": aim,
        "rows": [asdict(row) for row in rows],
        "ways": [asdict(row) for row in way_rows],
    }


def main() -> int:
    arguments = parse()
    if arguments.use_gpu_1_only:
        print(device_effects.use_gpu_1_only())
        return 0
    result = run(arguments.device, quick=arguments.quick)
    result["effects"] = device_effects.measure_all(arguments.device, quick=arguments.quick)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
