"""The copies of a CUDA device over `late_cuda`, which executes them as late, as early or as mixed as CUDA may.

The engine of these tests writes G1 late, in a stream of its own. It reads what was onboarded as soon as that is
reported, and overwrites what was offloaded as soon as that is reported. tests/gpu has the same on a real device.
"""

import itertools
import logging
import random
import threading

import numpy as np
import pytest
from copies import BLOCKS, CACHES, SLOTS, check_integrity, layers, padded_layers, storage_per_layer, whole_pages
from late_cuda import PRIORITIES, LateMachine
from late_rig import MODES, LateRig

from kvbm.device import cuda
from kvbm.errors import TransferError

ERROR = RuntimeError("CUDA error: unspecified launch failure")


@pytest.fixture
def machine(request):
    machine = LateMachine(*getattr(request, "param", ("random", 1)))
    yield machine
    assert not machine.violations


@pytest.mark.parametrize("staging_blocks", [1, 3, 100])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("machine", [(mode, 0) for mode in MODES], ids=MODES, indirect=True)
def test_a_block_survives_the_way_out_and_back_into_another_place(cache, machine, way, staging_blocks, monkeypatch):
    stride = cache("cpu")[0].slot_stride
    monkeypatch.setattr(cuda, "STAGING_BYTES", staging_blocks * stride)
    rig = LateRig(cache, machine, **way)
    check_integrity(rig, [11, 0, 6, 2, 7], [8, 0, 4, 2, 3], [1, 7, 3, 10, 0])
    check_integrity(rig, [2, 3, 4, 5], [1, 2, 3, 4], [6, 7, 8, 9])
    rig.segment.close()


@pytest.mark.parametrize("slots_per_pin", [1, 2, 5])
@pytest.mark.parametrize("cache", [whole_pages, layers, padded_layers], ids=lambda cache: cache.__name__)
def test_no_copy_crosses_from_one_page_locked_range_into_the_next(cache, machine, way, slots_per_pin):
    """The device refuses such a copy."""
    rig = LateRig(cache, machine, slots_per_pin=slots_per_pin, **way)
    check_integrity(rig, [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8])
    rig.segment.close()


@pytest.mark.parametrize("cache", [whole_pages, storage_per_layer], ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_a_copy_waits_for_the_forward_pass_and_ends_before_its_report(mode, seed, cache, way):
    machine, choice = LateMachine(mode, seed), random.Random(seed)
    rig = LateRig(cache, machine, **way)
    before = None
    for step in range(3):
        blocks, slots = choice.sample(range(BLOCKS), 4), choice.sample(range(SLOTS), 4)
        for block in blocks:
            rig.engine.run(lambda block=block, name=f"{step}/{block}": rig.write(block, name))
        rig.copier.offload(blocks, slots, rig.copier.fence())
        for block, slot in zip(blocks, slots, strict=True):
            assert np.array_equal(rig.slot(slot), rig.content(f"{step}/{block}")), "read before the forward pass"
            rig.write(block, "of another request")
        others, seen = choice.sample(range(BLOCKS), 4), []
        before = [rig.read(block) for block in others]
        for block in others:
            rig.engine.run(lambda block=block, seen=seen: seen.append(rig.read(block)))
        rig.copier.onboard(slots, others, rig.copier.fence())
        for block, other in zip(blocks, others, strict=True):
            assert np.array_equal(rig.read(other), rig.content(f"{step}/{block}")), "reported before the last byte"
        machine.run_all()
        assert all(np.array_equal(*pair) for pair in zip(seen, before, strict=True)), "written under a forward pass"
    rig.segment.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", [whole_pages, layers], ids=lambda cache: cache.__name__)
def test_copies_of_both_directions_share_no_buffer(cache, mode, seed, way, monkeypatch):
    """Two threads for each direction; nothing runs on the device before all of them have enqueued their copies."""
    monkeypatch.setattr(cuda, "STAGING_BYTES", 2 * cache("cpu")[0].slot_stride)
    machine = LateMachine(mode, seed)
    rig = LateRig(cache, machine, **way)
    for slot in range(4):
        rig.slot(slot)[:] = rig.content(f"slot {slot}")
    for block in range(8, 12):
        rig.write(block, f"block {block}")
    fence = rig.copier.fence()
    machine.run_together(4)
    threads = [threading.Thread(target=rig.copier.onboard, args=([s, s + 1], [s, s + 1], fence)) for s in (0, 2)]
    threads += [threading.Thread(target=rig.copier.offload, args=([b, b + 1], [b - 4, b - 3], fence)) for b in (8, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slot in range(4):
        assert np.array_equal(rig.read(slot), rig.content(f"slot {slot}"))
        assert np.array_equal(rig.slot(slot + 4), rig.content(f"block {slot + 8}"))
    assert not machine.violations
    rig.segment.close()


def test_more_threads_than_streams_wait_for_one(machine, way):
    rig = LateRig(layers, machine, **way)
    for block in range(9):
        rig.write(block, f"block {block}")
    threads = [threading.Thread(target=rig.copier.offload, args=([block], [block], None)) for block in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(rig.slot(slot), rig.content(f"block {slot}")) for slot in range(9))
    rig.segment.close()


def test_a_stream_is_taken_again_only_when_its_copies_have_ended(monkeypatch):
    """Its buffers have one user at a time."""
    monkeypatch.setattr(cuda, "STREAMS_PER_DIRECTION", 1)
    machine = LateMachine("late")
    rig = LateRig(layers, machine)
    machine.run_together(2)
    threads = []
    for block in range(2):
        rig.write(block, f"block {block}")
        threads.append(threading.Thread(target=rig.copier.offload, args=([block], [block], None)))
        threads[block].start()
        machine.until_waiting(block + 1, timeout_s=0.1)  # the second thread gets no stream
    machine.run_together(0)
    for block, thread in enumerate(threads):
        thread.join()
        assert np.array_equal(rig.slot(block), rig.content(f"block {block}"))
    rig.segment.close()


CALLS = [(way, *call) for way in ("offload", "onboard") for call in (("wait", 0), ("upload", 0), ("copy_each", 0))]
CALLS += [(way, "record", 0) for way in ("offload", "onboard")]
CALLS += [("offload", "gather", 0), ("offload", "gather", 1), ("onboard", "scatter", 1)]


@pytest.mark.parametrize(("direction", "call", "after"), CALLS)
@pytest.mark.parametrize("error", [ERROR, IndexError("a bug"), MemoryError("too much")], ids=lambda e: type(e).__name__)
def test_an_error_is_raised_only_when_everything_enqueued_before_has_ended(error, direction, call, after):
    """What still runs would write to blocks and slots that are released after the report."""
    machine = LateMachine("late")
    rig = LateRig(storage_per_layer, machine, has_batch_copy=False)
    rig.engine.run(lambda: None)
    fence = rig.copier.fence()
    machine.fail(call, error, after=after)
    copy = getattr(rig.copier, direction)
    with pytest.raises(TransferError if error is ERROR else type(error), match=str(error)):
        copy([0, 1], [0, 1], fence)
    assert not any(stream.queued for stream in rig.runtime.streams)
    path = rig.copier._path
    assert path._out.qsize() + path._back.qsize() == len(rig.runtime.streams), "a stream is lost"
    copy([0, 1], [0, 1], None)
    rig.segment.close()


def test_a_lost_device_fails_the_copy_and_the_next_one_too(machine):
    rig = LateRig(layers, machine)
    machine.fail("synchronize", ERROR)
    machine.fail("synchronize_stream", ERROR)
    with pytest.raises(TransferError, match="unspecified"):
        rig.copier.offload([0], [0], None)
    machine.run_all()
    rig.segment.close()


def test_a_driver_that_refuses_a_batch_gets_no_other_one(machine, caplog):
    rig = LateRig(layers, machine)
    machine.fail("copy_batch", RuntimeError("cuMemcpyBatchAsync of 2 copies: CUDA error 801"))
    with caplog.at_level(logging.WARNING):
        check_integrity(rig, [5, 3, 8], [0, 1, 6], [1, 2, 3])
        check_integrity(rig, [5, 3, 8], [0, 1, 6], [1, 2, 3])
    assert [record.getMessage() for record in caplog.records] == [
        "kvbm: cuMemcpyBatchAsync of 2 copies: CUDA error 801; kvbm copies the ranges one by one from now on"
    ]
    assert [name.split()[0] for name in machine.operations if name.startswith("copy")] == ["copy_batch"] + [
        "copy_each"
    ] * 4
    rig.segment.close()


def test_consecutive_slots_cross_the_link_together(machine):
    rig = LateRig(layers, machine)
    rig.copier.offload([5, 3, 8, 1], [0, 1, 2, 6], None)
    rig.copier.onboard([6, 2, 0, 1], [5, 3, 8, 1], None)
    assert [name for name in machine.operations if name.startswith("copy")] == ["copy_batch 2"] * 2
    rig.segment.close()


def test_pieces_are_staged_unless_they_are_long_and_the_driver_takes_all_at_once(machine, monkeypatch):
    """`layers` has pieces of 16 KiB, `whole_pages` blocks of one piece."""

    def ways(cache, has_batch_copy, shortest):
        monkeypatch.setattr(cuda, "MIN_DIRECT_BYTES", shortest)
        machine.operations.clear()
        rig = LateRig(cache, machine, has_batch_copy=has_batch_copy)
        rig.copier.offload([1, 3], [0, 2], None)
        rig.segment.close()
        return [name for name in machine.operations if name.startswith(("gather", "copy"))]

    assert ways(layers, True, 16 << 10) == ["copy_batch 8"]
    assert ways(layers, True, (16 << 10) + 1) == ["gather", "copy_batch 2"]
    assert ways(layers, False, 1) == ["gather", "copy_each 2"]
    assert ways(whole_pages, False, 1 << 40) == ["copy_each 2"]


def test_streams_have_the_least_priority_of_the_device(machine):
    rig = LateRig(layers, machine)
    least, greatest = PRIORITIES
    assert least > greatest
    assert [stream.priority for stream in rig.runtime.streams] == [least] * 4
    rig.segment.close()


@pytest.mark.parametrize("direction", ["offload", "onboard"])
def test_a_thread_selects_the_device_of_its_rank_before_it_copies(direction, machine, way):
    """CUDA would open a context on GPU 0, or run the copy there."""
    rigs = [LateRig(cache, machine, device, **way) for device, cache in enumerate((layers, whole_pages))]
    failures = []

    def copy(rig):
        try:
            getattr(rig.copier, direction)([0, 1], [0, 1], rig.copier.fence())
        except BaseException as error:
            failures.append(error)

    for rig, _ in itertools.product(rigs, range(2)):
        thread = threading.Thread(target=copy, args=(rig,))
        thread.start()
        thread.join()
        rig.segment.close()
    assert failures == []
