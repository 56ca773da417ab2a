import threading

import numpy as np
import pytest
import torch
from copies import BLOCKS, CACHES, SLOTS, Rig, check_integrity, large_layers, layer_separate, layers, whole_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.device.copier import DeviceCopier
from kvbm.device.worker import HostCapacity, Worker
from kvbm.errors import InvariantError, TransferError
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.segment import Segment

CASES = {
    "one block": ([3], [7], [5]),
    "consecutive on both sides": ([2, 3, 4, 5], [1, 2, 3, 4], [6, 7, 8, 9]),
    "consecutive slots in mixed order": ([2, 9, 4, 5], [4, 1, 3, 2], [11, 0, 8, 1]),
    "few consecutive slots of scattered blocks": ([2, 9, 4], [3, 4, 5], [11, 0, 8]),
    "scattered on both sides": ([11, 0, 6, 2], [8, 0, 4, 2], [1, 7, 3, 10]),
    "first and last of everything": ([0, 11], [8, 0], [11, 0]),
    "as much as there is": (list(range(9)), list(range(9))[::-1], [11, 10, 9, 8, 7, 6, 5, 4, 3]),
}


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("case", CASES)
def test_a_block_survives_the_way_out_and_back_into_another_place(cache, case):
    rig = Rig(cache)
    check_integrity(rig, *CASES[case])
    rig.segment.close()


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_choice_of_blocks_and_slots_keeps_bytes_and_touches_nothing_else(data):
    rig = Rig(data.draw(st.sampled_from(CACHES)))
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True))
    blocks, others = (data.draw(st.permutations(range(BLOCKS)))[: len(slots)] for _ in range(2))
    check_integrity(rig, blocks, slots, others)
    rig.segment.close()


@pytest.mark.parametrize("cache", [layers, large_layers, whole_pages], ids=lambda cache: cache.__name__)
@pytest.mark.parametrize(
    ("blocks", "slots"), [([-1], [0]), ([0], [-1]), ([BLOCKS], [0]), ([0], [SLOTS]), ([0, 1], [0])]
)
def test_a_block_or_slot_that_does_not_exist_is_refused_before_anything_is_copied(cache, blocks, slots):
    rig = Rig(cache)
    rig.segment.payload[:] = 7
    before = rig.everything()
    with pytest.raises(TransferError):
        rig.copier.offload(blocks, slots, None)
    with pytest.raises(TransferError):
        rig.copier.onboard(slots, blocks, None)
    assert (rig.segment.payload == 7).all()
    assert all(np.array_equal(now, then) for now, then in zip(rig.everything(), before, strict=True))


def test_a_copy_of_nothing_does_nothing():
    for cache in CACHES:
        rig = Rig(cache)
        rig.copier.offload([], [], rig.copier.fence())
        rig.copier.onboard([], [], rig.copier.fence())


def test_copies_of_different_blocks_run_side_by_side_in_several_threads():
    rig = Rig(large_layers)
    for block in range(8):
        rig.write(block, f"block {block}")
    copies = [threading.Thread(target=rig.copier.offload, args=([b, b + 1], [b + 1, b], None)) for b in (0, 2, 4, 6)]
    for thread in copies:
        thread.start()
    for thread in copies:
        thread.join()
    for block in range(8):
        assert np.array_equal(rig.segment.payload[block ^ 1], rig.content(f"block {block}"))


@pytest.mark.parametrize("way", ["offload", "onboard"])
def test_the_engine_thread_runs_while_a_long_copy_does(way):
    """Under a copy that keeps the GIL, this thread would never see the first byte there and the last one missing."""
    layout = layer_separate(layer_count=4, block_count=16, piece_bytes=4 << 20)
    segment = Segment.create(rank=0, layout=layout, slot_count=16)
    storage = torch.zeros(layout.storage_bytes(0), dtype=torch.uint8)
    copier = DeviceCopier(layout, [storage], segment)
    everything = list(range(16))
    g1, g2 = storage.numpy(), segment.payload.reshape(-1)
    source, target = (g1, g2) if way == "offload" else (g2, g1)
    source[:] = 1
    copy = copier.offload if way == "offload" else copier.onboard
    thread = threading.Thread(target=copy, args=(everything, everything, None))
    thread.start()
    was_seen_half_done = False
    while thread.is_alive():
        was_seen_half_done |= bool(target[0] == 1 and target[-1] == 0)
    assert was_seen_half_done
    assert target[-1] == 1
    segment.close()


def test_cpu_has_no_fence():
    assert Rig(layers).copier.fence() is None


@pytest.mark.parametrize(
    "storages",
    [
        pytest.param([], id="none"),
        pytest.param([torch.zeros(4 * 4096 - 1, dtype=torch.uint8)], id="too short"),
        pytest.param([torch.zeros(4 * 4096, dtype=torch.float32)], id="not bytes"),
        pytest.param([torch.zeros((4, 4096), dtype=torch.uint8)], id="not flat"),
        pytest.param([torch.zeros(8 * 4096, dtype=torch.uint8)[::2]], id="with gaps"),
    ],
)
def test_storages_that_do_not_fit_the_layout_are_refused(storages):
    layout = BlockLayout.block_contiguous(block_count=4, block_bytes=4096)
    segment = Segment.create(rank=0, layout=layout, slot_count=2)
    with pytest.raises(InvariantError):
        DeviceCopier(layout, storages, segment)


def test_a_segment_of_another_layout_is_refused():
    segment = Segment.create(rank=0, layout=BlockLayout((Piece(0, 0, 9999, 9999),), 4), slot_count=2)
    with pytest.raises(InvariantError, match="slots of"):
        DeviceCopier(
            BlockLayout.block_contiguous(block_count=4, block_bytes=4096),
            [torch.zeros(4 * 4096, dtype=torch.uint8)],
            segment,
        )


def test_a_worker_that_cannot_copy_from_its_storages_leaves_no_thread():
    before = threading.active_count()
    layout = BlockLayout.block_contiguous(block_count=8, block_bytes=4096)
    with pytest.raises(InvariantError):
        Worker.create(layout, [torch.zeros(16, dtype=torch.uint8)], HostCapacity(block_count=4))
    assert threading.active_count() == before
