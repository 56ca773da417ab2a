"""Copies between a CUDA device and a page-locked segment. The same checks as on the CPU, and what only a device has."""

import threading

import numpy as np
import pytest
import torch
from copies import BLOCKS, CACHES, SLOTS, Rig, check_integrity, layers, whole_pages

from kvbm.device.cuda import numa_node_of
from kvbm.errors import TransferError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = {
    "consecutive on both sides": ([2, 3, 4, 5], [1, 2, 3, 4], [6, 7, 8, 9]),
    "scattered on both sides": ([11, 0, 6, 2], [8, 0, 4, 2], [1, 7, 3, 10]),
    "as much as there is": (list(range(9)), list(range(9))[::-1], [11, 10, 9, 8, 7, 6, 5, 4, 3]),
}


@pytest.mark.parametrize("pin", [True, False], ids=["page-locked", "pageable"])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("case", CASES)
def test_a_block_survives_the_way_out_and_back_into_another_place(cache, case, pin):
    rig = Rig(cache, "cuda", pin=pin)
    check_integrity(rig, *CASES[case])
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages], ids=lambda cache: cache.__name__)
def test_more_blocks_than_the_staging_buffer_holds(cache, monkeypatch):
    monkeypatch.setattr("kvbm.device.cuda.STAGING_BYTES", 3 * (64 << 10))
    rig = Rig(cache, "cuda", pin=True)
    check_integrity(rig, list(range(8)), [8, 1, 7, 0, 3, 2, 5, 4], list(range(8))[::-1])
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages], ids=lambda cache: cache.__name__)
def test_a_copy_waits_for_the_work_that_its_fence_marks(cache):
    rig = Rig(cache, "cuda", pin=True)
    torch.cuda._sleep(200_000_000)  # a forward pass of about 0.1 s, after which the block is computed
    rig.write(3, "computed late")
    rig.copier.offload([3], [4], rig.copier.fence())
    assert np.array_equal(rig.segment.payload[4, : rig.layout.block_bytes], rig.content("computed late"))
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, whole_pages], ids=lambda cache: cache.__name__)
def test_copies_of_both_directions_run_side_by_side_in_several_threads(cache):
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

    monkeypatch.setattr(torch, "_foreach_copy_", broken)
    with pytest.raises(TransferError, match="illegal memory access"):
        rig.copier.offload([0], [0], rig.copier.fence())
    rig.segment.close()


def test_the_node_of_a_device_is_known_or_none():
    assert numa_node_of(torch.zeros(1, device="cuda")) in (None, *range(64))
    assert numa_node_of(torch.zeros(1)) is None
