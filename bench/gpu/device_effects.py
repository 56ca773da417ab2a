"""What copies cost others: small loads beside a long one, the engine's compute, its step, and contexts on GPU 0.

`check_and_measure.py` runs these, on CUDA and on the CPU, after its bandwidths. All of them use a worker with its own
threads, as an engine does.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvbm.device import worker as device_worker
from kvbm.device.worker import HostCapacity, Worker
from kvbm.host.layout import BlockLayout, Piece
from kvbm.plan import Offload, Onboard, StepPlan
from kvbm.types import SlotState

MIB = 1 << 20
LAYERS, PIECE_BYTES = 16, 128 << 10  # blocks of 2 MiB
SMALL_BLOCKS = 4
STEP_BLOCKS = 31  # new blocks of a decode step with 500 requests and 16 tokens per block
SHORT_PAUSE_S = 0.0002


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to copy: blocks of G1, of which one long load takes three quarters, samples, and a matrix."""

    block_count: int
    samples: int
    matrix: int
    matmuls: int

    @property
    def long_blocks(self) -> int:
        return self.block_count * 3 // 4


def layer_separate(*, layer_count: int, block_count: int, piece_bytes: int) -> BlockLayout:
    """Return the layout of one storage in which layer follows layer, and inside a layer block follows block."""
    layer_bytes = block_count * piece_bytes
    pieces = tuple(Piece(0, layer * layer_bytes, piece_bytes, piece_bytes) for layer in range(layer_count))
    return BlockLayout(pieces, block_count)


class Rank:
    """A worker over a cache of `block_count` blocks whose slots are all ready."""

    def __init__(self, device: str, block_count: int, slice_bytes: int = device_worker.SLICE_BYTES) -> None:
        layout = layer_separate(layer_count=LAYERS, block_count=block_count, piece_bytes=PIECE_BYTES)
        storage = torch.zeros(layout.storage_bytes(0), dtype=torch.uint8, device=device)
        self.worker = Worker.create(layout, [storage], HostCapacity(block_count=block_count), binds_memory=False)
        self.worker._threads.slice_bytes = slice_bytes
        self.block_count = block_count
        self._generation = 1
        self.worker._segment.write_slots(range(block_count), 1, SlotState.READY)

    def onboard(self, lane: int, first: int, count: int) -> Onboard:
        self._generation += 1
        numbers = tuple(range(first, first + count))
        return Onboard(self._generation, lane, numbers, (1,) * count, numbers)

    def offload(self, first: int, count: int) -> Offload:
        self._generation += 1
        numbers = tuple(range(first, first + count))
        return Offload(self._generation, numbers, numbers)

    def until_idle(self) -> None:
        while self.worker.is_busy():
            self.worker.poll()
            time.sleep(SHORT_PAUSE_S)

    def close(self) -> None:
        self.worker.close()


def small_loads(device: str, sizes: Sizes) -> dict[str, float]:
    """Time from the order of a load of SMALL_BLOCKS blocks to its report: alone, and behind a long load that is copied
    in slices, or whole."""
    results = {}
    for name, slice_bytes in (
        ("alone", 0),
        ("behind_long_in_slices", device_worker.SLICE_BYTES),
        ("behind_long", 1 << 60),
    ):
        rank = Rank(device, sizes.block_count, slice_bytes or device_worker.SLICE_BYTES)
        times_s = [_small_load_s(rank, sizes, is_alone=not slice_bytes) for _ in range(sizes.samples + 1)][1:]
        results[f"{name}_ms"] = round(statistics.median(times_s) * 1e3, 2)
        rank.close()
    return results


def _small_load_s(rank: Rank, sizes: Sizes, *, is_alone: bool) -> float:
    if not is_alone:
        rank.worker.start(StepPlan(1, onboards=(rank.onboard(0, 0, sizes.long_blocks),)))
    small = rank.onboard(1, sizes.long_blocks, SMALL_BLOCKS)
    started_s = time.perf_counter()
    rank.worker.start(StepPlan(2, onboards=(small,)))
    while not rank.worker.has_onboarded(small):
        rank.worker.poll()
        time.sleep(SHORT_PAUSE_S)
    elapsed_s = time.perf_counter() - started_s
    rank.until_idle()
    return elapsed_s


def compute_slowdown(device: str, sizes: Sizes) -> dict[str, float]:
    """Time of a series of matrix products beside copies in each direction, over the time of it alone."""
    matrix = torch.rand((sizes.matrix, sizes.matrix), device=device)

    def products() -> None:
        for _ in range(sizes.matmuls):
            matrix @ matrix
        if device != "cpu":
            torch.cuda.synchronize()

    def order(rank: Rank, direction: str) -> StepPlan:
        if direction == "offload":
            return StepPlan(1, offloads=(rank.offload(0, sizes.long_blocks),))
        return StepPlan(1, onboards=(rank.onboard(0, 0, sizes.long_blocks),))

    results = {}
    for direction in ("offload", "onboard"):
        rank, ratios = Rank(device, sizes.block_count), []
        for _ in range(sizes.samples + 1):
            alone_s = _seconds(products)
            with _Copying(rank, partial(order, rank, direction)):
                ratios.append(_seconds(products) / alone_s)
        results[f"beside_{direction}"] = round(statistics.median(ratios[1:]), 3)
        rank.close()
    return results


def _seconds(run: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


class _Copying:
    """A thread that owns the worker and keeps it busy with one order after the other."""

    def __init__(self, rank: Rank, order: Callable[[], StepPlan]) -> None:
        self._rank, self._order = rank, order
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stopping.is_set():
            plan = self._order()
            self._rank.worker.start(plan)
            self._rank.worker.finish(plan)
            self._rank.until_idle()


def step_overhead(device: str, sizes: Sizes) -> dict[str, float]:
    """Time that a step with one offload of STEP_BLOCKS blocks spends in the worker's calls."""
    rank, times_us = Rank(device, sizes.block_count), []
    for step in range(20 * sizes.samples):
        plan = StepPlan(step, offloads=(rank.offload(step % (sizes.block_count - STEP_BLOCKS), STEP_BLOCKS),))

        def calls(plan: StepPlan = plan) -> None:
            rank.worker.start(plan)
            rank.worker.finish(plan)
            rank.worker.poll()

        times_us.append(_seconds(calls) * 1e6)
        rank.until_idle()
    rank.close()
    return {"p50_us": round(statistics.median(times_us), 1), "max_us": round(max(times_us), 1)}


def contexts_on_gpu_0() -> str:
    """Whether copies of a rank on GPU 1, with all of its threads, leave GPU 0 alone. Runs in a process of its own."""
    if torch.cuda.device_count() < 2:
        return f"not checked: {torch.cuda.device_count()} GPUs"
    command = [sys.executable, str(Path(__file__).with_name("check_and_measure.py")), "--use-gpu-1-only"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return output.splitlines()[-1]


def use_gpu_1_only() -> str:
    """Copy in both directions on GPU 1 and say whether this process has a context on GPU 0."""
    torch.cuda.set_device(1)  # as the engine of rank 1 does in its main thread
    rank = Rank("cuda:1", 64)
    for plan in (StepPlan(1, offloads=(rank.offload(0, 8),)), StepPlan(2, onboards=(rank.onboard(0, 16, 8),))):
        rank.worker.start(plan)
        rank.worker.finish(plan)
        rank.until_idle()
    closing = threading.Thread(target=rank.close)
    closing.start()
    closing.join()
    return "a context on GPU 0" if is_context_active(0) else "none"


def is_context_active(ordinal: int) -> bool:
    """Whether this process has opened the primary context of a GPU."""
    flags, is_active, device = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
    cuda = ctypes.CDLL("libcuda.so.1")
    results = [
        cuda.cuDeviceGet(ctypes.byref(device), ordinal),
        cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active)),
    ]
    if any(results):
        raise RuntimeError(f"state of the context of GPU {ordinal}: CUDA errors {results}")
    return bool(is_active.value)


def measure_all(device: str, *, quick: bool) -> dict[str, object]:
    """Measure and print each effect; returns their part of the result file."""
    sizes = Sizes(block_count=2048, samples=9, matrix=8192, matmuls=100)
    if device == "cpu":
        sizes = Sizes(block_count=256, samples=9, matrix=512, matmuls=20)
    if quick:
        sizes = Sizes(block_count=64, samples=1, matrix=64, matmuls=2)
    results: dict[str, object] = {
        "blocks": {"bytes": LAYERS * PIECE_BYTES, "long_load": sizes.long_blocks, "small_load": SMALL_BLOCKS},
        "small_loads": small_loads(device, sizes),
        "compute_time_ratio": compute_slowdown(device, sizes),
        "step_of_31_blocks": step_overhead(device, sizes),
        "contexts_on_gpu_0": contexts_on_gpu_0() if device != "cpu" else "not checked: no GPU was used",
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    return results
