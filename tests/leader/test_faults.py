"""Copies that fail, hang, get lost or come late, through the real worker: a miss and a counter, nothing else."""

from __future__ import annotations

import pytest
from faults import FAULTS
from manual_pool import ManualPool
from rig import Rig, chain

from kvbm.device.pool import TransferPool
from kvbm.device.worker import CopyThreads, Worker
from kvbm.leader.heartbeats import Heartbeats
from kvbm.plan import Offload, Onboard, StepPlan
from kvbm.types import SlotState, Tier

FAILING = [fault for fault in FAULTS if fault not in ("hold", "lost")]


@pytest.fixture
def rig():
    return Rig(overdue_steps=3)


@pytest.fixture
def two_ranks():
    return Rig(ranks=2, overdue_steps=3)


# -- offload -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAILING)
def test_blocks_of_a_failed_offload_are_not_registered_and_the_next_offload_works(rig, fault):
    hashes = chain("a", 3)
    rig.ranks[0].copier.next(fault)
    blocks = rig.compute("r", hashes)
    rig.step()
    assert rig.leader.match("x", hashes, 0) == 0
    assert rig.leader.counters.offload_failed_blocks == 3
    assert rig.leader.counters.offload_blocks == 0
    assert rig.leader.blocks()[Tier.HOST]["free"] == 8
    rig.finish("r", hashes, blocks)
    rig.fill("a", 3)
    assert rig.leader.match("y", hashes, 0) == 3


def test_slots_of_a_failed_rank_are_not_reused_while_another_rank_copies_and_nothing_is_registered(two_ranks):
    two_ranks.ranks[0].copier.next("fail")
    two_ranks.compute("r", chain("a", 2))
    two_ranks.order()
    two_ranks.ranks[0].run_all()
    two_ranks.settle()
    assert two_ranks.leader.blocks()[Tier.HOST]["moving"] == 2
    two_ranks.ranks[1].run_all()
    two_ranks.settle()
    assert two_ranks.leader.blocks()[Tier.HOST]["moving"] == 0
    assert two_ranks.leader.match("x", chain("a", 2), 0) == 0


def test_one_failed_order_leaves_the_others_in_order(rig):
    rig.ranks[0].copier.at(1, "fail")
    for name in "abc":
        rig.compute(name, chain(name, 2))
        rig.order()
    rig.end_copies()
    assert [rig.leader.match("x", chain(name, 2), 0) for name in "abc"] == [2, 0, 2]


def test_an_offload_that_hangs_holds_its_blocks_and_nothing_else(rig):
    hashes = rig.fill("a", 3)
    blocks = rig.compute("hung", chain("b", 2))
    rig.order()
    rig.finish("hung", chain("b", 2), blocks)
    rig.load("r", hashes)
    rig.order()
    rig.ranks[0].run("onboard")
    (result,) = rig.settle()
    assert result.request_id == "r"
    assert not result.failed_block_ids
    assert all(rig.g1.references[block] for block in blocks)
    for _ in range(10):
        rig.order()
        rig.settle()
    assert all(rig.g1.references[block] for block in blocks), "given up while the copier may still read"
    rig.ranks[0].run("offload")
    rig.settle()
    assert not any(rig.g1.references[block] for block in blocks)
    assert rig.leader.match("x", chain("b", 2), 0) == 2


# -- onboard -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAILING)
def test_a_failed_load_is_reported_and_its_blocks_are_forgotten(rig, fault):
    hashes = rig.fill("a", 3)
    rig.ranks[0].copier.next(fault)
    blocks = rig.load("r", hashes)
    (result,) = rig.step()
    assert list(result.failed_block_ids) == blocks
    assert rig.leader.counters.onboard_failed_blocks == 3
    assert rig.leader.counters.onboard_blocks == 0
    assert rig.leader.match("x", hashes, 0) == 0


def test_a_request_whose_load_failed_is_not_offered_another(rig):
    hashes = rig.fill("a", 3)
    rig.ranks[0].copier.next("fail")
    blocks = rig.load("r", hashes)
    rig.step()
    rig.g1.release(blocks)
    rig.fill("a", 3)
    assert rig.leader.match("r", hashes, 0) == 0
    assert rig.leader.match("other", hashes, 0) == 3


def test_a_load_is_not_reported_before_every_copier_has_stopped(two_ranks):
    hashes = two_ranks.fill("a", 2)
    two_ranks.ranks[0].copier.next("fail")
    two_ranks.load("r", hashes)
    two_ranks.order()
    two_ranks.ranks[0].run_all()
    assert two_ranks.settle() == []
    two_ranks.ranks[1].run_all()
    (result,) = two_ranks.settle()
    assert result.failed_block_ids


def test_while_a_load_hangs_for_long_no_hits_are_promised_and_offloads_go_on(rig):
    hashes = rig.fill("a", 2)
    rig.load("hung", hashes)
    for _ in range(4):
        rig.order()
        rig.settle()
    assert rig.leader.match("waiting", hashes, 0) == 0
    hashes_b = chain("b", 2)
    rig.compute("out", hashes_b)
    rig.order()
    rig.ranks[0].run("offload")
    rig.settle()
    assert rig.leader.counters.offload_blocks == 4
    rig.ranks[0].run("onboard")
    assert [result.request_id for result in rig.settle()] == ["hung"]
    assert rig.leader.match("x", hashes_b, 0) == 2


# -- lost, late and twice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["offload", "onboard"])
def test_a_copy_that_the_pool_lost_ends_as_failed_after_the_leader_has_asked(rig, kind):
    hashes = rig.fill("a", 2)
    if kind == "offload":
        rig.compute("r", chain("b", 2))
        rig.order()
        rig.ranks[0].offload_pool.lose_next()
    else:
        rig.load("r", hashes)
        rig.order()
        rig.ranks[0].onboard_pool.lose_next()
    results = []
    for _ in range(4):
        rig.order()
        results += rig.settle()
    counters = rig.leader.counters
    assert counters.overdue_transfers == 1
    assert not rig.leader.has_pending()
    assert (counters.offload_failed_blocks, counters.onboard_failed_blocks) == ((2, 0) if kind == "offload" else (0, 2))
    assert [bool(result.failed_block_ids) for result in results] == ([] if kind == "offload" else [True])


@pytest.fixture
def two_parts():
    return Rig(onboard_parts=2, overdue_steps=2)


def test_a_load_in_two_parts_is_reported_when_both_have_ended(two_parts):
    hashes = two_parts.fill("a", 4)
    blocks = two_parts.load("r", hashes)
    two_parts.order()
    assert two_parts.ranks[0].onboard_pool.waiting() == 2
    two_parts.ranks[0].run("onboard")
    assert two_parts.settle() == []
    two_parts.ranks[0].run("onboard")
    assert [result.failed_block_ids for result in two_parts.settle()] == [()]
    assert all(two_parts.g1.holds(block, block_hash) for block, block_hash in zip(blocks, hashes, strict=True))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_fails_with_either_of_its_parts_and_not_before_the_other_has_stopped(two_parts, failing):
    hashes = two_parts.fill("a", 4)
    two_parts.load("r", hashes)
    two_parts.order()
    for part in range(2):
        if part == failing:
            two_parts.ranks[0].copier.next("fail")
        assert two_parts.settle() == []
        two_parts.ranks[0].run("onboard")
    assert [len(result.failed_block_ids) for result in two_parts.settle()] == [4]


def test_a_load_of_which_one_part_was_lost_fails_when_the_other_has_stopped(two_parts):
    two_parts.load("r", two_parts.fill("a", 4))
    two_parts.order()
    two_parts.ranks[0].onboard_pool.lose_next()
    for _ in range(4):
        assert two_parts.settle() == []
        two_parts.order()
    two_parts.ranks[0].run("onboard")
    assert [len(result.failed_block_ids) for result in two_parts.settle()] == [4]


def test_an_order_that_never_reached_the_worker_ends_as_failed(rig):
    rig.compute("r", chain("a", 2))
    rig.leader.step()
    for _ in range(4):
        rig.order()
        rig.settle()
    assert not rig.leader.has_pending()
    assert rig.leader.counters.offload_failed_blocks == 2


def test_asking_after_a_transfer_does_not_spoil_what_a_faster_rank_has_proven(two_ranks):
    hashes = chain("a", 2)
    two_ranks.compute("r", hashes)
    two_ranks.order()
    two_ranks.ranks[0].run_all()
    for _ in range(7):
        two_ranks.settle()
        two_ranks.order()
    two_ranks.ranks[1].run_all()
    two_ranks.settle()
    assert two_ranks.leader.match("x", hashes, 0) == 2
    two_ranks.load("r", hashes)
    two_ranks.order()
    two_ranks.ranks[0].run_all()
    results = []
    for _ in range(7):
        results += two_ranks.settle()
        two_ranks.order()
    two_ranks.ranks[1].run_all()
    results += two_ranks.settle()
    assert [result.failed_block_ids for result in results] == [()]


def test_what_waits_behind_hanging_copies_is_given_up_when_it_is_overdue(rig):
    hashes = rig.fill("a", 4)
    rank = rig.ranks[0]
    rank.worker._onboard_pool = rank.onboard_pool = TransferPool(1, name="one-thread")
    rank.copier.next("hold")
    rig.load("hung", hashes[:2])
    rig.load("behind", hashes, 2)
    rig.order()
    rank.copier.wait_until_held()
    results = []
    for _ in range(6):
        results += rig.settle()
        rig.order()
    assert [(result.request_id, bool(result.failed_block_ids)) for result in results] == [("behind", True)]
    rank.copier.heal()
    while len(results) < 2:
        results += rig.settle()
    assert [(result.request_id, bool(result.failed_block_ids)) for result in results][1:] == [("hung", False)]


def test_a_result_that_comes_twice_changes_nothing(rig):
    hashes = chain("a", 2)
    rig.compute("r", hashes)
    plan = rig.order()
    rig.end_copies()
    (order,) = plan.offloads
    rig.ranks[0].segment.write_slots(order.slots, order.generation, SlotState.READY)
    rig.settle()
    assert rig.leader.counters.offload_blocks == 2
    assert rig.leader.match("x", hashes, 0) == 2


def test_a_late_result_of_an_older_transfer_proves_nothing_for_a_newer_one(rig):
    rig.ranks[0].copier.next("fail")
    old = chain("old", 2)
    rig.compute("r", old)
    (stale,) = rig.order().offloads
    rig.end_copies()
    new = chain("new", 8)
    rig.compute("s", new)
    rig.order()
    rig.ranks[0].segment.write_slots(stale.slots, stale.generation, SlotState.READY)
    rig.settle()
    assert rig.leader.match("x", new, 0) == 0
    assert rig.leader.match("x", old, 0) == 0


# -- the worker's own guard --------------------------------------------------------------------------------------------


def test_worker_refuses_to_onboard_a_slot_that_holds_another_block(rig):
    rank = rig.ranks[0]
    rank.segment.write_slots([0], 7, SlotState.READY)
    order = Onboard(generation=9, lane=3, slots=(0,), slot_generations=(6,), block_ids=(5,))
    rank.worker.start(StepPlan(step=1, onboards=(order,)))
    rank.run("onboard")
    rank.worker.poll()
    assert rig.region.lane_result(3, 9) is SlotState.FAILED
    assert int(rig.g1.storages[0][0][5 * 512]) == 0xEE, "bytes of another block were copied"


def test_worker_notices_a_slot_that_changes_hands_during_the_copy(rig):
    rank = rig.ranks[0]
    rank.segment.write_slots([0], 7, SlotState.READY)
    real = rank.copier.onboard

    def overtaken(slots, block_ids, fence):
        real(slots, block_ids, fence)
        rank.segment.write_slots([0], 8, SlotState.READY)

    rank.copier.onboard = overtaken
    order = Onboard(generation=9, lane=3, slots=(0,), slot_generations=(7,), block_ids=(5,))
    rank.worker.start(StepPlan(step=1, onboards=(order,)))
    rank.run("onboard")
    rank.worker.poll()
    assert rig.region.lane_result(3, 9) is SlotState.FAILED


def test_worker_writes_no_word_before_its_copy_has_ended(rig):
    rank = rig.ranks[0]
    rank.worker.finish(StepPlan(step=1, offloads=(Offload(generation=4, block_ids=(0,), slots=(2,)),)))
    rank.worker.poll()
    assert rig.region.slot_results([2], 4) == [SlotState.EMPTY]
    rank.run("offload")
    rank.worker.poll()
    assert rig.region.slot_results([2], 4) == [SlotState.READY]


def test_the_copy_of_the_last_part_proves_an_onboard_before_the_next_poll(two_parts):
    rank = two_parts.ranks[0]
    two_parts.load("r", two_parts.fill("a", 4))
    (order,) = two_parts.order().onboards
    rank.run("onboard")
    assert two_parts.region.lane_result(order.lane, order.generation) is SlotState.EMPTY
    rank.run("onboard")
    assert two_parts.region.lane_result(order.lane, order.generation) is SlotState.READY
    assert rank.worker.is_onboarding()
    assert rank.worker.poll()
    assert not rank.worker.is_onboarding()


def test_a_poll_does_not_write_the_word_of_a_proven_onboard_again(rig):
    rank = rig.ranks[0]
    rig.load("r", rig.fill("a", 2))
    (order,) = rig.order().onboards
    rank.run("onboard")
    rank.segment.write_lane(order.lane, order.generation + 1, SlotState.READY)  # the lane has its next onboard
    rank.worker.poll()
    assert rig.region.lane_result(order.lane, order.generation + 1) is SlotState.READY


def test_a_rank_that_the_engine_asks_proves_an_onboard_in_a_poll(rig):
    rank, pool = rig.ranks[0], ManualPool()
    threads = CopyThreads(pool, rank.offload_pool)
    worker = Worker(rank.segment, rank.copier, threads, repeats_onboards=True)
    rank.segment.write_slots([0], 7, SlotState.READY)
    order = Onboard(generation=9, lane=3, slots=(0,), slot_generations=(7,), block_ids=(5,))
    worker.start(StepPlan(step=1, onboards=(order,)))
    pool.run_next()
    assert not worker.has_onboarded(order)
    worker.poll()
    assert worker.has_onboarded(order)


def test_an_engine_that_gives_up_blocks_hears_of_an_overdue_load_once_and_the_copy_keeps_its_blocks():
    rig = Rig(overdue_steps=3, gives_up_blocks=True)
    hashes = rig.fill("a", 2)
    blocks = rig.load("hung", hashes)
    results = []
    for _ in range(8):
        rig.order()
        results += rig.settle()
    assert [(result.request_id, list(result.failed_block_ids)) for result in results] == [("hung", blocks)]
    rig.g1.release(blocks)  # what the engine does with them then
    assert all(rig.g1.references[block] == 1 for block in blocks)
    assert not rig.leader.has_pending(), "the engine may rest although a copy hangs"
    assert rig.end_copies() == []
    assert rig.departed == []
    assert all(rig.g1.references[block] == 0 for block in blocks)
    assert rig.leader.match("next", hashes, 0) == 2


def test_a_denied_transfer_is_told_by_the_worker_although_no_copy_has_ended():
    rig = Rig(overdue_steps=2)
    rig.compute("out", chain("b", 2))
    rig.order()
    worker = rig.ranks[0].worker
    assert worker.poll() is False
    rig.ranks[0].offload_pool.lose_next()
    rig.order()
    rig.order()
    assert worker.poll() is True
    assert worker.poll() is False


def test_the_reason_of_a_failed_copy_is_in_the_log(rig, caplog):
    rig.ranks[0].copier.next("fail")
    rig.compute("out", chain("b", 2))
    rig.step()
    assert "a copy failed" in caplog.text


def test_a_load_whose_second_part_could_not_be_submitted_ends_with_its_first_part(caplog):
    """Reported earlier, its G1 blocks would be released under the copy of the first part."""
    rig = Rig(slots=8, blocks=16, onboard_parts=2)
    hashes = rig.fill("a", 4)
    pool = rig.ranks[0].onboard_pool
    submit = pool.submit

    def only_once(run, turn):
        pool.submit = refuse
        return submit(run, turn)

    def refuse(run, turn):
        raise MemoryError

    pool.submit = only_once
    blocks = rig.load("r", hashes)
    rig.order()
    assert rig.settle() == []
    assert [rig.g1.references[block] for block in blocks] == [2, 2, 2, 2]
    (result,) = rig.end_copies()
    assert result.failed_block_ids == tuple(blocks)
    assert [rig.g1.references[block] for block in blocks] == [1, 1, 1, 1]
    assert "MemoryError" in caplog.text


# -- a rank that is silent ---------------------------------------------------------------------------------------------


def silent_steps(rig, seconds, *, silent=()):
    """Steps of half a second in which these ranks do not poll and run nothing."""
    results = []
    for _ in range(int(2 * seconds)):
        rig.now_s += 0.5
        rig.order()
        for index, rank in enumerate(rig.ranks):
            if index not in silent:
                rank.run_all()
                rank.worker.poll()
        results += rig.leader.settle()
    return results


def test_a_load_is_given_up_after_two_seconds_without_a_heartbeat_and_its_blocks_stay_held():
    rig = Rig(ranks=2, gives_up_blocks=True)
    hashes = rig.fill("a", 3)
    blocks = rig.load("r", hashes)
    assert silent_steps(rig, 2, silent=[1]) == []
    (result,) = silent_steps(rig, 1, silent=[1])
    assert result.failed_block_ids == tuple(blocks)
    assert [rig.g1.references[block] for block in blocks] == [2, 2, 2]
    assert rig.leader.match("s", hashes, 0) == 0, "a hit would wait for the silent rank"
    assert silent_steps(rig, 20, silent=[1]) == []
    assert [rig.g1.references[block] for block in blocks] == [2, 2, 2]
    silent_steps(rig, 1)
    assert [rig.g1.references[block] for block in blocks] == [1, 1, 1]
    assert rig.leader.match("s", hashes, 0) == 3


def test_a_slow_copy_of_a_rank_that_is_alive_is_waited_for():
    rig = Rig(gives_up_blocks=True)
    hashes = rig.fill("a", 3)
    rig.load("r", hashes)
    for _ in range(20):
        rig.now_s += 1.0
        rig.order()
        assert rig.settle() == []
    (result,) = rig.end_copies()
    assert not result.failed_block_ids


def test_a_rank_without_orders_need_not_show_that_it_is_alive():
    rig = Rig(gives_up_blocks=True)
    hashes = rig.fill("a", 3)
    silent_steps(rig, 10, silent=[0])
    assert rig.leader.match("r", hashes, 0) == 3
    rig.load("r", hashes)
    assert silent_steps(rig, 2, silent=[0]) == []


class RankThatNeverBeats:
    def heartbeats(self) -> list[int | None]:
        return [7]


def test_silence_of_a_rank_counts_from_its_first_order_after_a_rest() -> None:
    now_s = 0.0
    heartbeats = Heartbeats(RankThatNeverBeats(), silence_s=2.0, clock=lambda: now_s)  # type: ignore[arg-type]
    assert not heartbeats.check(has_orders=False)
    now_s = 100.0
    assert not heartbeats.check(has_orders=True), "it had no reason to beat"
    now_s = 101.9
    assert not heartbeats.check(has_orders=True)
    now_s = 102.1
    assert heartbeats.check(has_orders=True)
    assert not heartbeats.check(has_orders=False)
