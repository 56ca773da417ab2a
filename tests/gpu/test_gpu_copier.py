"""Copies between a CUDA device and a page-locked segment: the checks of tests/device, on a real device."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from copies import BLOCKS, CACHES, SLOTS, Rig, check_integrity, layers, storage_per_layer, whole_pages

from kvbm.device import cuda
from kvbm.device.cuda_runtime import CudaRuntime, numa_node_of
from kvbm.device.worker import HostCapacity, Worker
from kvbm.errors import TransferError
from kvbm.host import shared_memory
from kvbm.plan import Offload, Onboard, StepPlan

REPOSITORY = Path(__file__).parent.parent.parent
FORWARD_PASS_CYCLES = 200_000_000  # about 0.1 s
BATCH_COPY_VERSION = 12080

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]

CASES = {
    "consecutive on both sides": ([2, 3, 4, 5], [1, 2, 3, 4], [6, 7, 8, 9]),
    "scattered on both sides": ([11, 0, 6, 2], [8, 0, 4, 2], [1, 7, 3, 10]),
    "as much as there is": (list(range(9)), list(range(9))[::-1], [11, 10, 9, 8, 7, 6, 5, 4, 3]),
}


@pytest.fixture(params=["staged", "staged, no batch", "direct"])
def way(request, monkeypatch):
    """Which copies are direct, and which call of the driver copies."""
    monkeypatch.setattr(cuda, "MIN_DIRECT_BYTES", 1 if request.param == "direct" else 1 << 40)
    if request.param == "staged, no batch":
        monkeypatch.setattr(CudaRuntime, "has_batch_copy", False)
    return request.param


@pytest.mark.parametrize("pin", [True, False], ids=["page-locked", "pageable"])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("case", CASES)
def test_a_block_survives_the_way_out_and_back_into_another_place(cache, case, pin, way):
    rig = Rig(cache, "cuda", pin=pin)
    check_integrity(rig, *CASES[case])
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages], ids=lambda cache: cache.__name__)
def test_more_blocks_than_the_staging_buffer_holds(cache, way, monkeypatch):
    monkeypatch.setattr("kvbm.device.cuda.STAGING_BYTES", 3 * (64 << 10))
    rig = Rig(cache, "cuda", pin=True)
    check_integrity(rig, list(range(8)), [8, 1, 7, 0, 3, 2, 5, 4], list(range(8))[::-1])
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages], ids=lambda cache: cache.__name__)
def test_no_copy_crosses_from_one_page_locked_range_into_the_next(cache, way, monkeypatch):
    monkeypatch.setattr(shared_memory, "PIN_BYTES", 2 * (64 << 10))
    rig = Rig(cache, "cuda", pin=True)
    assert rig.segment.slots_per_pin == 2
    check_integrity(rig, [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8])
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages, storage_per_layer], ids=lambda cache: cache.__name__)
def test_an_offload_waits_for_the_forward_pass_and_ends_before_its_report(cache, way):
    rig = Rig(cache, "cuda", pin=True)
    torch.cuda._sleep(FORWARD_PASS_CYCLES)
    rig.write(3, "computed late")
    rig.copier.offload([3], [4], rig.copier.fence())
    rig.write(3, "of another request")
    assert np.array_equal(rig.segment.payload[4, : rig.layout.block_bytes], rig.content("computed late"))
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages], ids=lambda cache: cache.__name__)
def test_an_onboard_waits_for_the_forward_pass_that_reads_the_block(cache, way):
    rig = Rig(cache, "cuda", pin=True)
    rig.write(3, "of another request")
    rig.segment.payload[4, : rig.layout.block_bytes] = rig.content("loaded")
    torch.cuda._sleep(FORWARD_PASS_CYCLES)
    seen = [view.clone() for view, _ in rig.views(3)]
    rig.copier.onboard([4], [3], rig.copier.fence())
    assert np.array_equal(rig.read(3), rig.content("loaded"))
    assert np.array_equal(torch.cat(seen).cpu().numpy(), rig.content("of another request"))
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages], ids=lambda cache: cache.__name__)
def test_copies_of_both_directions_share_no_buffer(cache, way):
    rig = Rig(cache, "cuda", pin=True)
    for slot in range(4):
        rig.segment.payload[slot, : rig.layout.block_bytes] = rig.content(f"slot {slot}")
    for block in range(8, 12):
        rig.write(block, f"block {block}")
    fence = rig.copier.fence()
    copies = [threading.Thread(target=rig.copier.onboard, args=([slot], [slot], fence)) for slot in range(4)]
    copies += [threading.Thread(target=rig.copier.offload, args=([b], [b - 4], fence)) for b in range(8, 12)]
    for thread in copies:
        thread.start()
    for thread in copies:
        thread.join()
    for slot in range(4):
        assert np.array_equal(rig.read(slot), rig.content(f"slot {slot}"))
        assert np.array_equal(rig.segment.payload[slot + 4, : rig.layout.block_bytes], rig.content(f"block {slot + 8}"))
    rig.segment.close()


def test_orders_of_a_worker_move_the_right_bytes(way):
    """With its own threads, in slices of two blocks."""
    layout, storages = layers("cuda")
    worker = Worker.create(layout, storages, HostCapacity(block_count=SLOTS))
    rig = Rig.__new__(Rig)
    rig.layout, rig.storages, rig.segment = layout, storages, worker._segment
    worker._threads.slice_bytes = 2 * layout.block_bytes
    numbers, others = tuple(range(7)), tuple(range(BLOCKS - 1, BLOCKS - 8, -1))
    for block in numbers:
        rig.write(block, f"block {block}")
    plans = [
        StepPlan(1, offloads=(Offload(5, numbers, numbers),)),
        StepPlan(2, onboards=(Onboard(6, 0, numbers, (5,) * 7, others),)),
    ]
    for plan in plans:
        worker.start(plan)
        worker.finish(plan)
        while worker.is_busy():
            worker.poll()
        if plan.offloads:
            assert worker._segment.slots_carry(numbers, [5] * 7)
            storages[0].fill_(0xCD)
    assert worker.has_onboarded(plans[1].onboards[0])
    for block, other in zip(numbers, others, strict=True):
        assert np.array_equal(rig.read(other), rig.content(f"block {block}"))
    worker.close()


@pytest.mark.parametrize(("blocks", "slots"), [([-1], [0]), ([0], [-1]), ([BLOCKS], [0]), ([0], [SLOTS])])
def test_a_block_or_slot_that_does_not_exist_never_reaches_the_device(blocks, slots):
    rig = Rig(layers, "cuda", pin=True)
    with pytest.raises(TransferError):
        rig.copier.offload(blocks, slots, None)
    torch.cuda.synchronize()
    rig.segment.close()


def test_an_error_of_the_device_is_a_failed_copy(monkeypatch):
    rig = Rig(layers, "cuda", pin=True)

    def broken(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(CudaRuntime, "has_batch_copy", False)
    monkeypatch.setattr(CudaRuntime, "gather", broken)
    with pytest.raises(TransferError, match="illegal memory access"):
        rig.copier.offload([0], [0], rig.copier.fence())
    rig.segment.close()


def test_the_call_for_many_copies_is_found_in_drivers_that_have_it():
    rig = Rig(layers, "cuda", pin=True)
    runtime = CudaRuntime(rig.storages[0].device, rig.segment.payload)
    assert runtime.has_batch_copy == (torch._C._cuda_getDriverVersion() >= BATCH_COPY_VERSION)
    rig.segment.close()


def test_streams_have_the_least_priority_of_the_device():
    rig = Rig(layers, "cuda", pin=True)
    least, greatest = torch.cuda.Stream.priority_range()
    assert least > greatest
    assert [rig.copier._path._out.get().handle.priority for _ in range(2)] == [least] * 2
    rig.segment.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, torch finds {torch.cuda.device_count()}")
def test_a_rank_on_gpu_1_opens_no_context_on_gpu_0():
    command = [sys.executable, REPOSITORY / "bench/gpu/check_and_measure.py", "--use-gpu-1-only"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "none"


def test_the_node_of_a_device_is_known_or_none():
    assert numa_node_of(torch.zeros(1, device="cuda")) in (None, *range(64))
    assert numa_node_of(torch.zeros(1)) is None
