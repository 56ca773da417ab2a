"""What goes to disk, what comes back from it, and what happens when it fails: stories with a disk in memory."""

from __future__ import annotations

import itertools
import time

import pytest
from bookkeeping import check_leader
from rig import FakeDisk, Rig, chain, disk_policy

from kvbm.core.groups import Group
from kvbm.errors import EnvironmentProblem
from kvbm.events import TierCleared
from kvbm.leader import onboards
from kvbm.tiers.disk import tier as disk_tier
from kvbm.tiers.disk.orders import Read, Write
from kvbm.tiers.disk.tier import RATES_INTERVAL_S
from kvbm.tiers.rates import GRACE, TRIAL_INTERVAL_S
from kvbm.types import Tier


def make(disk=16, *, slots=8, to_disk="always", **options):
    policy = {"batch_blocks": 2, "read_timeout_s": 10.0, **options.pop("policy", {})}
    return Rig(slots=slots, fake_disk=disk, **disk_policy(writes=to_disk, **policy), **options)


@pytest.fixture(autouse=True)
def _reads_of_two_blocks(monkeypatch):
    monkeypatch.setattr(disk_tier, "PARTS", 1)


@pytest.fixture
def rig():
    return make()


def set_clock(rig, clock):
    rig.disk_tier._clock = clock  # by which a step is cut; the leader's is manual too


def on_disk(rig):
    return {sequence_hash for sequence_hash, _ in rig.disk.kept.values()}


def restarted(rig, **options):
    """Another engine with the disk of this one."""
    disk = rig.disk
    disk.waiting.clear()
    rig.close()
    return make(disk, **options)


def left_on_disk(rig, length, **options):
    """Another engine on the disk to which this one has written a chain; and the chain."""
    hashes = rig.fill("a", length)
    rig.steps(8)
    return restarted(rig, **options), hashes


def asked_again(rig, hashes, request_id="again"):
    """A request that finds all of it in G1."""
    rig.leader.match(request_id, hashes, len(hashes))
    rig.leader.finish(request_id, hashes)


# -- what goes there ---------------------------------------------------------------------------------------------------


def test_every_block_goes_to_disk_when_that_is_wanted(rig):
    hashes = rig.fill("a", 4)
    rig.steps(4)
    assert on_disk(rig) == set(hashes)
    assert rig.leader.counters.disk.offload_blocks == 4
    assert rig.leader.blocks()[Tier.DISK] == {"free": 12, "moving": 0, "pinned": 0, "evictable": 4}


def test_an_engine_that_has_nothing_else_to_do_goes_on_until_everything_is_written(rig):
    rig.fill("a", 6)
    for _ in range(20):
        if not rig.leader.has_pending():
            break
        rig.step()
    assert len(on_disk(rig)) == 6
    rig.fill("b", 6)
    rig.disk.is_on = False
    rig.steps(4)
    assert not rig.leader.has_pending(), "it does not wait for a disk that is off"


@pytest.mark.parametrize("policy", [{}, {"is_buffer": True}], ids=["tier", "buffer"])
def test_a_request_larger_than_host_memory_passes_through_it_to_the_disk(policy):
    rig = make(slots=4, policy=policy)
    hashes = chain("a", 12)
    blocks = rig.compute("r", hashes)
    for _ in range(40):
        rig.leader.offload("r", hashes, blocks, computed_blocks=12, prompt_blocks=12)
        rig.step()
    rig.finish("r", hashes, blocks)
    assert on_disk(rig) == set(hashes)
    assert rig.leader.counters.disk.dropped_blocks == 0


def test_a_block_goes_to_disk_at_its_first_hit_wherever_that_is():
    rig = make(to_disk="frequency")
    device, host = rig.fill("a", 2), rig.fill("b", 2)
    rig.steps(4)
    assert on_disk(rig) == set()
    assert rig.leader.counters.disk.filter_rejected_blocks == 4
    asked_again(rig, device)
    rig.load("r", host)
    rig.steps(4)
    assert on_disk(rig) == {*device, *host}
    assert rig.leader.counters.disk.filter_admitted_blocks == 4


def test_a_count_that_has_decayed_does_not_bring_a_block_to_disk():
    rig = make(to_disk="frequency", policy={"frequency_decay_s": 5.0})
    hashes = rig.fill("a", 2)
    rig.now_s = 6.0
    rig.steps(4)
    asked_again(rig, hashes)
    rig.steps(4)
    assert on_disk(rig) == set()


def test_the_old_end_of_host_memory_is_written_before_it_is_evicted():
    rig = make(to_disk="on_evict", slots=4)
    first = rig.fill("a", 3)
    rig.steps(4)
    assert on_disk(rig) == set(first)
    rig.fill("b", 3)
    assert rig.leader.counters.disk.dropped_blocks == 0
    assert rig.leader.match("r", first, 0) == 3


def test_what_could_not_be_written_in_time_is_counted():
    rig = make(to_disk="on_evict", slots=4)
    rig.disk.is_on = False
    rig.fill("a", 4)
    rig.fill("b", 3)
    assert rig.leader.counters.disk.dropped_blocks >= 3


def test_a_block_that_failed_to_be_written_is_not_found():
    rig = make(slots=4)
    hashes = rig.fill("a", 2)
    rig.order()
    rig.disk.run("write", "fail")
    rig.settle()
    assert rig.leader.counters.disk.failed_blocks >= 1
    assert len(on_disk(rig)) == rig.leader.blocks()[Tier.DISK]["evictable"] < len(hashes)


def written_at_the_end(rig):
    """Close, on a disk that ends every order at once; return what it is told to write, in order."""
    written = []
    run = rig.disk.poll

    def poll():
        written.extend(name for order in rig.disk.waiting if isinstance(order, Write) for name in order.hashes)
        rig.disk.run_all()
        return run()

    rig.disk.poll = poll
    set_clock(rig, time.monotonic)
    rig.leader.close()
    assert rig.disk.is_closed
    rig.close()
    return written


def test_at_the_end_host_memory_is_written_to_disk_the_newest_first():
    rig = make(4, to_disk="frequency", policy={"drain_s": 5.0})
    old, new = rig.fill("a", 2), rig.fill("b", 2)
    written = written_at_the_end(rig)
    assert set(written[:2]) == set(new)
    assert set(written) == {*old, *new}


def test_at_the_end_a_disk_smaller_than_host_memory_gets_the_newest_blocks_only(caplog):
    """Older ones would evict them."""
    caplog.set_level("INFO")
    rig = make(3, to_disk="frequency", policy={"drain_s": 5.0})
    old, new = rig.fill("a", 2), rig.fill("b", 2)
    assert written_at_the_end(rig) == [*new, old[0]]
    assert on_disk(rig) == {*new, old[0]}
    assert "1 may not be there" in caplog.text


def test_at_the_end_new_blocks_evict_none_that_are_newer_in_host_memory():
    """The disk does not know a hit that no engine step has told it."""
    rig = make(3, to_disk="frequency", policy={"drain_s": 5.0})
    kept = rig.fill("a", 2)
    asked_again(rig, kept)  # writes them
    rig.steps(4)
    other = rig.fill("b", 1)
    asked_again(rig, other)
    rig.steps(4)
    rig.leader.host.store.touch(kept)
    new = rig.fill("c", 1)
    assert written_at_the_end(rig) == new
    assert on_disk(rig) == {*kept, *new}


def test_at_the_end_blocks_that_left_the_disk_for_newer_ones_are_not_written_again():
    rig = make(3, policy={"drain_s": 5.0})
    for name in ("a", "b", "c"):
        newest = rig.fill(name, 2)
        rig.steps(4)
    before = on_disk(rig)
    assert written_at_the_end(rig) == []
    assert set(newest) < on_disk(rig) == before


@pytest.mark.parametrize(("hangs", "said"), [(False, "confirmed 4 blocks"), (True, "confirmed 0 blocks")])
def test_the_end_reports_what_the_disk_has_confirmed(monkeypatch, caplog, hangs, said):
    """Not what it was sent: the next engine would not find that."""
    caplog.set_level("INFO")
    monkeypatch.setattr(disk_tier, "DRAIN_HUNG_S", 0.1)
    rig = make(8, to_disk="frequency", policy={"drain_s": 20.0})
    rig.fill("a", 4)
    rig.disk.is_hanging = hangs
    run = rig.disk.poll

    def poll():
        rig.disk.run_all()
        return run()

    rig.disk.poll = poll
    set_clock(rig, time.monotonic)
    began_s = time.monotonic()
    rig.leader.close()
    assert time.monotonic() - began_s < 10.0, "it does not use up the time to drain"
    assert said in caplog.text
    assert f"{4 if hangs else 0} may not be there" in caplog.text


def test_memory_that_a_rank_has_given_back_is_not_written_as_blocks(rig):
    rig.fill("a", 4)
    rig.order()
    rig.ranks[0].segment.close()  # its memory reads as zeros now
    rig.disk.run("write")
    rig.settle()
    assert on_disk(rig) == set()
    assert rig.leader.blocks()[Tier.DISK]["evictable"] == 0


def test_blocks_on_disk_know_whose_they_are(rig):
    hashes = chain("a", 2)
    blocks = rig.compute("r@tenant", hashes)
    rig.step()
    rig.finish("r@tenant", hashes, blocks)
    rig.fill("b", 1)
    rig.steps(4)
    whose = {rig.disk.kept[slot][0]: tenant for slot, tenant in rig.disk.tenants.items() if slot in rig.disk.kept}
    assert whose == {**dict.fromkeys(hashes, b"tenant"), chain("b", 1)[0]: b""}


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_blocks_of_an_engine_that_has_ended_come_back(rig):
    rig, hashes = left_on_disk(rig, 4)
    blocks = rig.load("r", hashes)
    assert [(result.request_id, result.failed_block_ids) for result in rig.steps(4)] == [("r", ())]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks, hashes, strict=True))
    rig.finish("r", hashes, blocks)
    counters = rig.leader.counters
    assert (counters.onboard_blocks, counters.disk.onboard_blocks, counters.disk.fetched_blocks) == (4, 4, 4)
    assert (counters.hit_rate(Tier.HOST), counters.hit_rate(Tier.DISK)) == (0.0, 1.0)
    assert rig.leader.match("next", hashes, 0) == 4
    assert rig.leader.blocks()[Tier.HOST]["evictable"] == 4  # they stay in host memory


def test_a_disk_that_starts_later_gets_the_blocks_that_host_memory_has_kept_for_it():
    """Its process starts when the name of the blocks is known. Blocks of an earlier engine are there then."""
    first = make()
    old = first.fill("old", 2)
    first.steps(4)
    disk = first.disk
    first.close()
    disk.is_lost, disk.is_on, disk.slot_count = True, False, 0
    rig = make(disk)
    new = rig.fill("new", 4)
    rig.steps(4)
    assert rig.leader.counters.disk.off
    assert rig.leader.match("waits", old, 0) == 0
    check_leader(rig.leader)
    disk.is_lost, disk.is_on, disk.slot_count = False, True, 16
    rig.steps(8)
    assert not rig.leader.counters.disk.off
    assert on_disk(rig) == {*old, *new}
    assert rig.leader.match("finds", old, 0) == 2
    assert rig.leader.counters.disk.times_off == 0
    check_leader(rig.leader)


def test_a_chain_may_lie_here_and_there(rig):
    rig, hashes = left_on_disk(rig, 5)
    for index in (0, 3):
        blocks = rig.compute(f"part-{index}", hashes[index : index + 1])
        rig.step()
        rig.finish(f"part-{index}", hashes[index : index + 1], blocks)
    blocks = rig.load("r", hashes)
    assert len(blocks) == 5
    assert rig.leader.lower_tier_tokens("r") == (3 * 16, 0)
    assert [result.failed_block_ids for result in rig.steps(4)] == [()]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks, hashes, strict=True))


def test_a_load_larger_than_host_memory_passes_through_it(rig):
    rig, hashes = left_on_disk(rig, 8, slots=2)
    blocks = rig.load("r", hashes)
    assert len(blocks) == 8
    assert [result.failed_block_ids for result in rig.steps(12)] == [()]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks, hashes, strict=True))


def test_a_load_is_read_in_parts_that_show_how_fast_it_goes(monkeypatch):
    monkeypatch.setattr(disk_tier, "PARTS", 4)
    rig = make(slots=16)
    hashes = rig.fill("a", 8)
    rig.steps(4)
    for slots, sizes in ((16, [2] * 4), (8, [2] * 2), (2, [1])):
        rig = restarted(rig, slots=slots)
        rig.load("r", hashes)
        assert [len(order.hashes) for order in rig.disk.waiting if isinstance(order, Read)] == sizes


def test_two_requests_for_one_prefix_read_it_once(rig):
    rig, hashes = left_on_disk(rig, 4)
    rig.load("first", hashes)
    assert rig.leader.match("second", hashes, 0) is None
    rig.steps(4)
    assert rig.leader.match("second", hashes, 0) == 4
    assert rig.leader.counters.disk.fetched_blocks == 4


def test_nothing_is_copied_to_the_engine_before_its_bytes_have_come(rig):
    rig, hashes = left_on_disk(rig, 2)
    rig.load("r", hashes)
    assert rig.order().onboards == ()
    assert rig.leader.blocks()[Tier.HOST]["moving"] == 2
    rig.disk.run("read")
    assert rig.settle() == []
    assert [len(order.slots) for order in rig.order().onboards] == [2]


@pytest.mark.parametrize(("fault", "left"), [("fail", 3), ("damage", 2), ("fail-all", 4)])
def test_of_a_load_whose_read_fails_the_rest_is_computed_and_a_damaged_block_forgotten(rig, fault, left):
    rig, hashes = left_on_disk(rig, 4)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.disk.run("read")
    rig.disk.run("read", fault)
    results = rig.settle() + rig.steps(4)
    assert [(result.request_id, list(result.failed_block_ids)) for result in results] == [("r", blocks[2:])]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks[:2], hashes[:2], strict=True))
    assert rig.leader.match("r", hashes, 0) == 0, "a failed load is not tried again by the same request"
    rig.finish("r", hashes, blocks)
    assert not +rig.g1.references
    assert rig.leader.match("next", hashes, 0) == left
    assert len(on_disk(rig)) == left
    assert rig.leader.counters.disk.failed_blocks == (1 if fault == "fail" else 2)


def test_reads_before_one_that_has_failed_are_waited_for(rig):
    rig, hashes = left_on_disk(rig, 6)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.disk.waiting.sort(key=lambda order: order.hashes[0] != hashes[2])  # the second part comes first
    rig.disk.run("read", "fail-all")
    assert rig.settle() == []
    results = rig.steps(4)
    assert [(result.request_id, list(result.failed_block_ids)) for result in results] == [("r", blocks[2:])]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks[:2], hashes[:2], strict=True))
    rig.finish("r", hashes, blocks)
    assert not +rig.g1.references


def test_a_part_that_comes_together_with_one_that_failed_is_let_go(rig):
    rig, hashes = left_on_disk(rig, 4)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.disk.run("read", "fail-all")
    rig.disk.run("read")
    assert [len(result.failed_block_ids) for result in rig.settle()] == [4]
    rig.finish("r", hashes, blocks)
    assert not +rig.g1.references
    assert rig.leader.blocks()[Tier.HOST] == {"free": 6, "moving": 0, "pinned": 0, "evictable": 2}


def test_damage_found_at_opening_is_counted(rig):
    rig.disk.counters.dropped_rows = 3
    rig.disk.counters.damaged_superblocks = rig.disk.counters.unusable_instances = 1
    rig.settle()
    assert rig.leader.counters.disk.dropped_rows == 3
    assert rig.leader.counters.disk.damaged_files == 2


def test_a_read_that_hangs_is_given_up_and_its_slots_stay_taken_until_it_ends(rig):
    rig, hashes = left_on_disk(rig, 2)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.now_s = 11.0
    rig.order()
    assert [len(result.failed_block_ids) for result in rig.settle()] == [2]
    rig.finish("r", hashes, blocks)
    assert not +rig.g1.references, "nothing will write to these blocks"
    assert rig.leader.blocks()[Tier.HOST]["moving"] == 2
    rig.disk.run("read")
    rig.settle()
    assert rig.leader.blocks()[Tier.HOST]["moving"] == 0
    assert rig.leader.counters.disk.late_blocks == rig.leader.counters.onboard_failed_blocks == 2


def test_a_request_that_ends_while_its_blocks_are_read_holds_them_until_nothing_writes_there(rig):
    rig, hashes = left_on_disk(rig, 4)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.finish("r", hashes, blocks)
    assert sum((+rig.g1.references).values()) == 4
    rig.steps(4)
    assert not +rig.g1.references


# -- a process that ends, and the next one -----------------------------------------------------------------------------


def test_what_the_next_process_finds_comes_back_and_nothing_else(rig):
    hashes = rig.fill("a", 4)
    rig.steps(4)
    rig.leader.host.store.reset()  # host memory knows them no more
    rig.disk.end()
    (gone,) = [slot for slot, (name, _) in rig.disk.kept.items() if name == hashes[2]]
    rig.disk.kept[gone] = (chain("other", 1)[0], rig.disk.kept[gone][1])
    rig.settle()
    assert rig.leader.match("while-lost", hashes, 0) == 0
    assert rig.leader.counters.disk.off == 1
    assert rig.leader.blocks()[Tier.DISK]["free"] == 16, "what was there is unknown now"
    assert rig.leader.has_pending(), "the next one will be there soon"
    rig.disk.begin_again()
    rig.settle()
    assert rig.leader.counters.disk.off == 0
    assert rig.leader.counters.disk.restarts == 1
    assert not rig.leader.has_pending()
    blocks = rig.load("r", hashes)
    assert len(blocks) == 2, "up to the block whose slot holds another"
    assert [result.failed_block_ids for result in rig.steps(4)] == [()]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks, hashes[:2], strict=True))


@pytest.mark.parametrize("has_committed", [False, True])
def test_writes_in_flight_are_found_only_if_the_next_process_has_them(rig, has_committed):
    hashes = rig.fill("a", 4)
    rig.order()
    assert len(rig.disk.waiting) == 2
    rig.disk.end(has_committed=has_committed)
    rig.settle()
    rig.disk.begin_again()
    rig.settle()
    assert rig.leader.blocks()[Tier.DISK]["evictable"] == (2 if has_committed else 0)
    assert rig.disk_tier.store.match(hashes) == (2 if has_committed else 0)
    check_leader(rig.leader)


def test_a_load_that_waits_for_room_does_not_wait_for_a_disk_that_is_off():
    rig, hashes = left_on_disk(make(slots=2), 2, slots=2)
    rig.compute("other", chain("b", 2))
    rig.order()  # both slots of host memory are on their way
    rig.load("r", hashes)
    rig.order()
    assert not rig.disk.waiting, "there is no room to read into"
    rig.disk.end()
    rig.settle()
    rig.order()
    assert [len(result.failed_block_ids) for result in rig.settle()] == [2]


def test_a_load_whose_disk_has_ended_is_computed_at_once():
    """Also the parts of it that were not yet asked for."""
    rig, hashes = left_on_disk(make(slots=8), 8, slots=2)
    blocks = rig.load("r", hashes)
    rig.order()
    assert len(rig.disk.waiting) == 1
    rig.disk.end()
    results = rig.settle() + rig.steps(1)
    assert [(result.request_id, len(result.failed_block_ids)) for result in results] == [("r", 8)]
    rig.finish("r", hashes, blocks)
    assert not +rig.g1.references
    rig.disk.begin_again()
    rig.steps(1)
    assert rig.leader.match("next", hashes, 0) == 8


def test_nothing_is_taken_over_while_a_load_still_holds_slots_from_before(rig):
    rig, hashes = left_on_disk(rig, 4)
    rig.load("r", hashes)
    rig.order()
    rig.disk.run("read")
    rig.settle()
    rig.order()  # the first part is on its way to device memory
    rig.disk.end()
    rig.settle()
    rig.disk.begin_again()
    rig.settle()
    assert rig.leader.counters.disk.off == 1
    assert rig.leader.blocks()[Tier.DISK]["pinned"] == 4
    rig.steps(2)
    assert rig.leader.counters.disk.off == 0
    assert rig.disk_tier.store.match(hashes) == 4


def test_a_process_that_ended_and_began_while_the_engine_rested_serves_the_next_request(rig):
    hashes = rig.fill("a", 4)
    rig.steps(4)
    rig.leader.host.store.reset()
    rig.disk.end()
    rig.disk.begin_again()
    assert rig.leader.match("r", hashes, 0) == 4
    assert rig.disk_tier.contains(hashes[0])


def test_what_a_process_has_found_is_taken_over_a_little_per_step(rig):
    rig.disk.blocks_at_a_time = 1
    hashes = rig.fill("a", 4)
    rig.steps(4)
    rig.leader.host.store.reset()
    rig.disk.end()
    rig.settle()
    rig.disk.begin_again()
    seconds = itertools.count(step=0.6 * disk_tier.FILL_S)
    set_clock(rig, lambda: next(seconds))
    for found in (1, 2, 3):
        rig.settle()
        assert rig.leader.blocks()[Tier.DISK]["evictable"] == found
        assert rig.leader.counters.disk.off == 1
        assert rig.leader.has_pending()
        rig.disk_tier._begin_writes()  # as at the next step, which would take over more
        assert not rig.disk.waiting, "a slot that is not taken over yet would be written to"
    rig.settle()
    assert rig.disk_tier.store.match(hashes) == 4


def test_events_of_what_a_process_has_found_come_after_its_clear_and_say_which_are_the_last():
    rig = make()
    hashes = rig.fill("a", 4)
    rig.steps(4)
    rig.leader.take_events()
    rig.disk.blocks_at_a_time = 3
    rig.disk.end()
    rig.disk.begin_again()
    rig.steps(4)
    cleared, *restored = [event for event in rig.leader.take_events() if event.tier is Tier.DISK]
    assert cleared == TierCleared(Tier.DISK)
    assert [(len(event.hashes), event.is_last) for event in restored] == [(3, False), (1, True)]
    assert {one for event in restored for one in event.hashes} == set(hashes)


def test_blocks_that_left_host_memory_before_their_turn_do_not_make_a_step_long(rig):
    side = rig.disk_tier
    # no request registers and evicts so many in a rig of 8 slots
    side._queue.update(dict.fromkeys(chain("gone", 1000)))
    rig.order()
    assert 0 < rig.leader.counters.disk.dropped_blocks <= 2 * disk_tier.TAKEN_AT_A_TIME  # batches of two blocks
    for _ in range(1000):
        rig.order()
    assert rig.leader.counters.disk.dropped_blocks == 1000


def test_a_reset_while_a_process_is_taken_over_forgets_what_it_has_found(rig, monkeypatch):
    monkeypatch.setattr(disk_tier, "FILL_S", 0.0)
    hashes = rig.fill("a", 4)
    rig.steps(4)
    rig.disk.end()
    rig.settle()
    rig.disk.begin_again()
    rig.settle()
    assert rig.leader.reset()
    monkeypatch.undo()
    rig.steps(4)
    assert rig.leader.counters.disk.off == 0
    assert rig.leader.match("r", hashes, 0) == 0


def test_a_process_that_ends_while_it_is_taken_over_is_forgotten_too(rig, monkeypatch):
    hashes = rig.fill("a", 4)
    rig.steps(4)
    rig.leader.host.store.reset()
    rig.disk.blocks_at_a_time = 1
    for _ in range(2):
        rig.disk.end()
        rig.settle()
        rig.disk.begin_again()
        seconds = itertools.count(step=0.6 * disk_tier.FILL_S)
        set_clock(rig, lambda seconds=seconds: next(seconds))
        rig.settle()
        assert rig.leader.blocks()[Tier.DISK]["evictable"] == 1
    set_clock(rig, lambda: 0.0)
    rig.disk.kept.pop(next(iter(rig.disk.kept)))
    rig.disk.end()
    rig.disk.begin_again()
    rig.steps(4)
    assert rig.leader.blocks()[Tier.DISK]["evictable"] == 3
    assert rig.disk_tier.store.match(hashes) == 0


# -- forgetting --------------------------------------------------------------------------------------------------------


def test_a_reset_forgets_the_disk_and_what_is_on_its_way_there(rig):
    hashes = rig.fill("a", 4)
    rig.order()
    rig.leader.reset()
    assert rig.disk.cleared == 1
    rig.steps(4)
    assert rig.leader.match("r", hashes, 0) == 0
    assert rig.leader.blocks()[Tier.DISK]["evictable"] == 0


def test_only_a_reset_after_a_change_of_weights_ends_persistence(rig):
    assert rig.leader.reset() is True
    assert not rig.disk.has_ended_persistence
    assert rig.leader.reset(ends_persistence=True) is True
    assert rig.disk.has_ended_persistence


def test_a_reset_that_the_disk_could_not_make_durable_says_so(rig):
    rig.fill("a", 2)
    rig.steps(4)
    assert rig.leader.reset() is True

    def clear(*, ends_persistence):
        raise EnvironmentProblem("not cleared durably")

    rig.disk.clear = clear
    assert rig.leader.reset() is False


def test_a_reset_while_blocks_are_read_fails_the_load(rig):
    rig, hashes = left_on_disk(rig, 4)
    rig.load("r", hashes)
    rig.order()
    rig.leader.reset()
    assert [len(result.failed_block_ids) for result in rig.steps(4)] == [4]
    assert rig.leader.match("next", hashes, 0) == 0
    assert rig.leader.blocks()[Tier.HOST]["free"] == 8


def test_a_lost_rank_forgets_host_memory_and_not_the_disk(rig):
    hashes = rig.fill("a", 2)
    rig.steps(4)
    rig.region.has_lost_rank = lambda: True
    rig.settle()
    assert rig.leader.match("r", hashes, 0) == 0
    assert rig.disk.cleared == 0
    assert on_disk(rig) == set(hashes)


# -- load or compute ---------------------------------------------------------------------------------------------------


def known(*, tokens_per_s, blocks_per_s):
    rig, hashes = left_on_disk(make(), 6)
    rig.leader.note_step(1000, 1000 / tokens_per_s)
    rig.disk_tier.rates.note_read(100, 100 / blocks_per_s)
    return rig, hashes


def test_blocks_are_read_where_that_is_faster_than_computing_them():
    rig, hashes = known(tokens_per_s=160, blocks_per_s=20)  # a block of 16 tokens: 0.1 s to compute, 0.05 s to read
    assert rig.leader.match("r", hashes, 0) == 6


def test_blocks_are_computed_where_that_is_faster_than_reading_them():
    rig, hashes = known(tokens_per_s=160, blocks_per_s=5)
    assert rig.leader.match("r", hashes, 0) == 0
    assert rig.leader.counters.disk.declined_blocks == 6
    rig.now_s += TRIAL_INTERVAL_S + 1
    assert rig.leader.match("r2", hashes, 0) == 6, "a disk that may have become faster is tried"
    assert rig.leader.match("r3", hashes, 0) == 0, "by one request"


def test_the_disk_process_keeps_rates_that_have_changed_for_the_next_engine():
    rig = make()
    for step_s, wait_s in ((10.0, RATES_INTERVAL_S), (10.0, RATES_INTERVAL_S), (1.0, 0.0), (1.0, RATES_INTERVAL_S)):
        rig.leader.note_step(1600, step_s)
        rig.step()
        rig.now_s += wait_s
    assert [known.tokens_per_s for known in rig.disk.kept_rates] == [pytest.approx(160), pytest.approx(254, abs=1)]
    rig.disk.earlier_rates = rig.disk.kept_rates[0]
    rig = restarted(rig)
    assert rig.disk_tier.rates.tokens_per_s == pytest.approx(160)


def test_a_policy_of_always_reads_whatever_it_takes():
    rig, hashes = left_on_disk(make(policy={"reads_always": True}), 6, policy={"reads_always": True})
    rig.leader.note_step(1000, 0.001)
    rig.disk_tier.rates.note_read(1, 100.0)
    assert rig.leader.match("r", hashes, 0) == 6


def test_a_load_is_given_up_as_soon_as_it_will_take_longer_than_computing():
    rig, hashes = known(tokens_per_s=160, blocks_per_s=100)  # 0.6 s to compute all
    blocks = rig.load("r", hashes)
    rig.order()
    rig.now_s += 0.6 * GRACE * 0.9
    rig.order()
    assert rig.settle() == []
    rig.now_s += 0.6 * GRACE * 0.2
    rig.order()
    assert [result.failed_block_ids for result in rig.settle()] == [tuple(blocks)]


@pytest.mark.parametrize("at_a_time", [1, 32])
@pytest.mark.parametrize("came", range(3))
def test_what_has_come_before_a_load_is_given_up_is_the_engines(came, at_a_time, monkeypatch):
    """Up to the first missing block; blocks behind it are not used."""
    monkeypatch.setattr(onboards, "FETCHES_AT_A_TIME", at_a_time)
    rig, hashes = known(tokens_per_s=160, blocks_per_s=100)
    blocks = rig.load("r", hashes)
    rig.order()
    for _ in range(came):
        rig.disk.run("read")
        rig.settle()
        rig.order()
    end = 2 * came
    rig.now_s += 0.1 * (end + 6 * GRACE) * 0.9
    rig.order()
    assert rig.leader.counters.disk.late_blocks == 0, "it is no later yet than a request that computes"
    rig.now_s += 0.2
    results = rig.steps(4)
    assert [result.failed_block_ids for result in results] == [tuple(blocks[end:])]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks[:end], hashes, strict=False))
    counters = rig.leader.counters
    assert (counters.onboard_blocks, counters.disk.onboard_blocks, counters.disk.late_blocks) == (end, end, 6 - end)
    assert counters.matched_tokens == 16 * end
    rig.finish("r", hashes, blocks)
    assert not +rig.g1.references
    assert rig.leader.blocks()[Tier.DISK]["pinned"] == 0


def test_blocks_in_host_memory_behind_a_missing_one_are_no_use():
    rig, hashes = known(tokens_per_s=160, blocks_per_s=100)
    blocks = rig.compute("part", hashes[3:4])
    rig.step()
    rig.finish("part", hashes[3:4], blocks)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.disk.run("read")
    rig.settle()
    rig.now_s += 10.0
    assert [result.failed_block_ids for result in rig.steps(4)] == [tuple(blocks[2:])]


def test_blocks_of_several_groups_are_of_use_together_or_not_at_all():
    groups = (Group(16), Group(16, window_tokens=32))
    rig, hashes = left_on_disk(make(), 6, groups=groups)
    rig.leader.note_step(1000, 1.0)
    blocks = rig.g1.allocate(6)
    rig.leader.onboard("r", hashes, 0, blocks, tokens=48)
    rig.order()
    rig.disk.run("read")
    rig.settle()
    rig.now_s += 10.0
    assert [result.failed_block_ids for result in rig.steps(4)] == [tuple(blocks)]


def group_rig(groups):
    """An engine with groups on a disk that has two chains, and a request that has begun to load both."""
    rig = make(disk=32, slots=16, blocks=32)
    chains = [rig.fill("a", 4), rig.fill("b", 4)]
    rig.steps(4)
    rig = restarted(rig, slots=16, blocks=32, groups=groups)
    rig.leader.note_step(1000, 1.0)
    return rig, chains


def load_groups(rig, chains, tokens, first=0):
    """Of the second chain from its block `first` on."""
    wanted = [*chains[0][: tokens // 16], *chains[1][first : tokens // 16]]
    blocks = rig.g1.allocate(len(wanted))
    rig.leader.onboard("r", wanted, 0, blocks, tokens=tokens)
    return blocks, wanted


def test_of_a_load_of_several_groups_that_the_disk_fails_what_has_come_is_offered_once():
    rig, chains = group_rig((Group(16), Group(16)))
    assert rig.leader.match_groups("r", chains, 0, 64) == 64
    load_groups(rig, chains, 64)
    rig.order()
    for _ in range(3):  # all of the first chain, half of the second
        rig.disk.run("read")
    rig.settle()
    rig.disk.is_hanging = True
    rig.now_s += 10.0
    assert [len(result.failed_block_ids) for result in rig.steps(4)] == [8]
    assert rig.leader.match_groups("r", chains, 0, 64) == 32, "in host memory, the disk is not asked"
    load_groups(rig, chains, 32)
    rig.ranks[0].copier.next("fail")
    assert [len(result.failed_block_ids) for result in rig.steps(4)] == [4]
    assert rig.leader.match_groups("r", chains, 0, 64) == 0, "it goes on without"
    assert rig.leader.match_groups("other", chains, 0, 64) == 0, "a read still hangs"
    rig.disk.is_hanging = False
    rig.steps(4)
    assert rig.leader.match_groups("third", chains, 0, 64) > 0


def test_where_a_group_with_a_window_lacks_its_end_what_host_memory_serves_is_offered():
    rig, chains = group_rig((Group(16), Group(16, window_tokens=20)))
    for name, hashes in zip("ab", chains, strict=True):  # the first two blocks of both are in host memory
        blocks = rig.compute(name, hashes[:2])
        rig.step()
        rig.g1.release(blocks)
    assert rig.leader.match_groups("r", chains, 0, 64) == 64
    load_groups(rig, chains, 64, first=2)
    rig.order()
    rig.disk.is_hanging = True
    rig.now_s += 10.0
    assert [len(result.failed_block_ids) for result in rig.steps(4)] == [6]
    assert rig.leader.match_groups("r", chains, 0, 64) == 32
    blocks, wanted = load_groups(rig, chains, 32, first=0)
    assert [result.failed_block_ids for result in rig.steps(4)] == [()]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks, wanted, strict=True))


def test_a_request_whose_load_the_disk_has_failed_does_not_read_from_it_again():
    rig, hashes = left_on_disk(make(), 3)
    blocks = rig.load("r", hashes)
    rig.order()
    while rig.disk.run("read", "fail-all"):
        rig.leader.settle()
    assert rig.disk_tier.is_on
    assert rig.leader.match("r", hashes, 0) == 0
    assert rig.leader.match("other", hashes, 0) == 3, "a failed read says nothing about the blocks"
    rig.finish("r", hashes, blocks)


def test_blocks_of_another_disk_are_refused_when_they_do_not_fit():
    disk = FakeDisk(2)
    disk.kept = {0: (chain("a", 1)[0], []), 1: (chain("a", 1)[0], [])}
    with pytest.raises(Exception, match="restored"):
        make(disk)


def test_a_load_whose_blocks_are_lost_to_an_abandoned_read_is_computed(rig):
    rig, hashes = left_on_disk(rig, 8, slots=8)
    late = rig.load("late", hashes)
    rig.finish("late", hashes, late)
    rig.settle()
    blocks = rig.load("r", hashes)
    while rig.disk.run("read", "damage"):
        pass
    results = [*rig.settle(), *rig.steps(4)]
    assert [result.failed_block_ids for result in results] == [tuple(blocks)]
    rig.finish("r", hashes, blocks)
    rig.steps(4)
    assert rig.leader.blocks()[Tier.HOST]["moving"] == 0
    assert rig.leader.blocks()[Tier.DISK]["pinned"] == 0
    assert not +rig.g1.references


# -- a disk that does not answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_always", [False, True])
def test_a_disk_that_does_not_answer_costs_its_loads_and_no_block(rig, reads_always):
    """And is sent nothing more until it answers; what it read meanwhile is in host memory then."""
    rig, hashes = left_on_disk(rig, 6, policy={"reads_always": reads_always}, slots=16)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.disk.is_on = False
    sent = list(rig.disk.waiting)
    rig.order()
    assert [result.failed_block_ids for result in rig.settle()] == [tuple(blocks)]
    rig.finish("r", hashes, blocks)
    for name in ("b", "c"):
        rig.compute(name, chain(name, 2))
        rig.order()
        assert rig.leader.match(f"{name}-again", hashes, 0) == 0
        rig.settle()
    assert rig.disk.waiting == sent
    assert not rig.disk_tier.is_writing(), "an engine can rest meanwhile"
    rig.disk.is_on = True
    rig.steps(4)
    assert rig.leader.match("next", hashes, 0) == 6
    assert rig.leader.counters.disk.failed_blocks == 0
    assert on_disk(rig) >= set(hashes)
    check_leader(rig.leader)


def test_requests_for_one_prefix_outlive_a_disk_that_stops_and_goes_on_again(rig):
    """With a policy of `always`, as each of them promises the blocks that the one before was denied."""
    rig, hashes = left_on_disk(rig, 8, policy={"reads_always": True, "read_timeout_s": 2.0}, slots=8, blocks=64)
    rig.disk.is_hanging = True
    for number in range(4):
        if matched := rig.leader.match(f"r{number}", hashes, 0):
            rig.leader.onboard(f"r{number}", hashes, 0, rig.g1.allocate(matched))
        rig.step()
        rig.now_s += 2.5
        rig.step()
    rig.disk.is_hanging = False
    while rig.disk.run("read", "fail-all"):
        pass
    rig.steps(4)
    assert rig.leader.match("next", hashes, 0) == 8
    assert on_disk(rig) == set(hashes)
    assert rig.leader.blocks()[Tier.DISK]["pinned"] == 0


def test_an_answer_that_comes_while_the_engine_rests_serves_the_next_request(rig):
    hashes = rig.fill("a", 2)
    rig.order()
    rig.disk.is_on = False
    rig.settle()
    rig.disk.run_all()
    poll = rig.disk.poll

    def poll_and_note_the_answer():
        rig.disk.is_on = True
        return poll()

    rig.disk.poll = poll_and_note_the_answer
    rig.leader.match("r", hashes, 0)
    assert rig.disk_tier.store.match(hashes) == 2


def test_a_read_that_waits_for_room_drops_nothing_from_host_memory():
    rig = make(slots=4, to_disk="on_evict")
    hashes = rig.fill("a", 2)
    rig.steps(4)
    disk = rig.disk
    rig.close()
    rig = make(disk, slots=4, to_disk="on_evict")
    rig.disk.is_on = False
    pinned = rig.fill("b", 2)
    rig.compute("moving", chain("c", 2))
    rig.order()
    pin = rig.leader.host.store.pin(pinned[:1])
    rig.disk.is_on = True
    before = rig.leader.counters.disk.dropped_blocks
    source = rig.disk_tier.store.pin(hashes)
    for _ in range(3):
        assert rig.disk_tier.fetch(hashes, b"") is None, "there is no room for two blocks"
    assert rig.leader.counters.disk.dropped_blocks == before
    pin.release()
    source.release()


def test_a_load_that_cannot_begin_holds_nothing_on_disk():
    rig = make()
    hashes = rig.fill("a", 4)
    rig.steps(4)
    rig.leader.host.store.forget(hashes)
    assert rig.leader.match("r", hashes, 0) == 4
    rig.disk_tier.store.forget(hashes[3:])
    blocks = rig.g1.allocate(4)
    rig.leader.onboard("r", hashes, 0, blocks)
    assert [result.failed_block_ids for result in rig.settle()] == [tuple(blocks)]
    assert rig.leader.blocks()[Tier.DISK]["pinned"] == 0
