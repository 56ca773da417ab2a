"""Workers, their threads and the CUDA path over `late_cuda`, from plans to control words.

The leader of these tests acts at once: it overwrites G1 when an offload is proven, and reads G1 when an onboard is.
"""

import random
import time

import numpy as np
import pytest
from copies import BLOCKS, SLOTS, layers, storage_per_layer, whole_pages
from late_cuda import LateMachine
from late_rig import MODES, LateRig
from manual_pool import ManualPool

from kvbm.device.pool import TransferPool
from kvbm.device.worker import CopyThreads, Worker
from kvbm.host.region import Region
from kvbm.plan import Offload, Onboard, StepPlan
from kvbm.types import SlotState

LIMIT_S = 30.0
SLICE_BLOCKS = 2


class Rank(LateRig):
    """A worker with slices of SLICE_BLOCKS blocks."""

    def __init__(self, cache, machine, device=0, make_pool=lambda: TransferPool(2, name="test"), **facts):
        super().__init__(cache, machine, device, **facts)
        self.onboard_pool, self.offload_pool = make_pool(), make_pool()
        slice_bytes = SLICE_BLOCKS * self.layout.block_bytes
        threads = CopyThreads(self.onboard_pool, self.offload_pool, slice_bytes=slice_bytes)
        self.worker = Worker(self.segment, self.copier, threads)
        self.region = Region.map([self.worker.info])

    def offload_result(self, slots, generation):
        """Poll until there is one, and return the different states of the slots."""
        return self._until_reported(lambda: set(self.region.slot_results(slots, generation)))

    def onboard_result(self, lane, generation):
        (state,) = self._until_reported(lambda: {self.region.lane_result(lane, generation)})
        return state

    def _until_reported(self, read):
        deadline_s = time.monotonic() + LIMIT_S
        while SlotState.EMPTY in (states := read()):
            self.worker.poll()
            assert time.monotonic() < deadline_s
            time.sleep(0)
        return states

    def close(self):
        self.region.close()
        self.worker.close(LIMIT_S)


def offload_of(generation, blocks, slots):
    return StepPlan(1, offloads=(Offload(generation, tuple(blocks), tuple(slots)),))


def onboard_of(generation, lane, slots, source_generation, blocks):
    generations = (source_generation,) * len(slots)
    return StepPlan(1, onboards=(Onboard(generation, lane, tuple(slots), generations, tuple(blocks)),))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
def test_orders_of_two_ranks_move_the_right_bytes_and_are_proven_afterwards(mode, seed, way):
    machine, choice = LateMachine(mode, seed), random.Random(seed)
    ranks = [Rank(layers, machine, 0, slots_per_pin=4, **way), Rank(storage_per_layer, machine, 1, **way)]
    for step in range(2):
        blocks, others = (choice.sample(range(BLOCKS), 7) for _ in range(2))
        slots, generation = choice.sample(range(SLOTS), 7), 10 + 2 * step
        for device, rank in enumerate(ranks):
            for block in blocks:
                rank.engine.run(lambda r=rank, b=block, name=f"{device}/{step}/{block}": r.write(b, name))
            rank.worker.finish(offload_of(generation, blocks, slots))
        for rank in ranks:
            assert rank.offload_result(slots, generation) == {SlotState.READY}, machine.violations
            for storage in rank.storages:
                storage.fill_(0xCD)
        seen = []
        for rank in ranks:
            for block in others:
                rank.engine.run(lambda r=rank, b=block, into=seen: into.append(set(r.read(b))))
            rank.worker.start(onboard_of(generation + 1, 3, slots, generation, others))
        for device, rank in enumerate(ranks):
            assert rank.onboard_result(3, generation + 1) is SlotState.READY, machine.violations
            for block, other in zip(blocks, others, strict=True):
                assert np.array_equal(rank.read(other), rank.content(f"{device}/{step}/{block}"))
        machine.run_all()
        assert seen == [{0xCD}] * 14, "written under a forward pass"
    for rank in ranks:
        rank.close()
    assert not machine.violations


@pytest.fixture
def stepped():
    rank = Rank(whole_pages, LateMachine("late"), make_pool=ManualPool)
    yield rank
    rank.close()


def test_a_short_onboard_waits_for_one_slice_of_a_long_one(stepped):
    stepped.segment.write_slots(range(SLOTS), 1, SlotState.READY)
    stepped.worker.start(onboard_of(2, 0, range(7), 1, range(7)))
    stepped.worker.start(onboard_of(3, 1, [7, 8], 1, [8, 9]))
    for _ in range(2):
        stepped.onboard_pool.run_next()
    stepped.worker.poll()
    assert [stepped.region.lane_result(lane, 2 + lane) for lane in (0, 1)] == [SlotState.EMPTY, SlotState.READY]
    assert stepped.onboard_pool.waiting() == 3


def test_an_onboard_is_reported_once_when_all_of_its_slices_have_ended(stepped):
    stepped.segment.write_slots(range(SLOTS), 1, SlotState.READY)
    stepped.worker.start(onboard_of(2, 0, range(7), 1, range(7)))
    reports = []
    for _ in range(4):
        assert stepped.region.lane_result(0, 2) is SlotState.EMPTY
        stepped.onboard_pool.run_next()
        reports.append(stepped.worker.poll())
    assert stepped.region.lane_result(0, 2) is SlotState.READY
    assert reports == [False, False, False, True]


def test_an_onboard_fails_if_one_source_slot_changes_while_its_slice_is_copied(stepped):
    """The slots of a slice are checked before and after its copy; other slices do not see the change."""
    stepped.segment.write_slots(range(SLOTS), 1, SlotState.READY)
    stepped.worker.start(onboard_of(2, 0, range(6), 1, range(6)))
    stepped.onboard_pool.run_next()
    copy = stepped.copier._path.copy

    def changed(moves, fence, *, to_host):
        copy(moves, fence, to_host=to_host)
        stepped.segment.write_slots([3], 9, SlotState.READY)

    stepped.copier._path.copy = changed
    stepped.onboard_pool.run_next()
    stepped.copier._path.copy = copy
    stepped.onboard_pool.run_next()
    stepped.worker.poll()
    assert stepped.region.lane_result(0, 2) is SlotState.FAILED


@pytest.mark.parametrize("failing", range(3))
def test_a_slice_of_an_offload_that_fails_costs_only_its_own_blocks(stepped, failing):
    for block in range(6):
        stepped.write(block, f"block {block}")
    stepped.worker.finish(offload_of(5, range(6), range(6)))
    for number in range(3):
        if number == failing:
            stepped.machine.fail("record", RuntimeError("CUDA error"))
        assert SlotState.EMPTY in stepped.region.slot_results(range(6), 5)
        stepped.offload_pool.run_next()
    stepped.worker.poll()
    expected = [SlotState.FAILED if slot // SLICE_BLOCKS == failing else SlotState.READY for slot in range(6)]
    assert stepped.region.slot_results(range(6), 5) == expected
    for slot in range(6):
        assert expected[slot] is SlotState.FAILED or np.array_equal(
            stepped.slot(slot), stepped.content(f"block {slot}")
        )
