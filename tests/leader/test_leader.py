"""What the leader promises, with real workers, real bytes and copies stepped by hand."""

from __future__ import annotations

import pytest
from rig import Rig, chain

from kvbm.core.groups import Group
from kvbm.leader.offloads import NO_BLOCK
from kvbm.types import Tier


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def two_ranks():
    return Rig(ranks=2)


# -- out ---------------------------------------------------------------------------------------------------------------


def test_offloaded_blocks_come_back_into_other_blocks_byte_for_byte(rig):
    hashes = rig.fill("a", 5)
    other = rig.g1.allocate(3)
    blocks = rig.load("r", hashes)
    assert not set(blocks) & set(other)
    (result,) = rig.step()
    assert (result.request_id, list(result.block_ids), result.failed_block_ids) == ("r", blocks, ())
    assert all(rig.g1.holds(block, h) for block, h in zip(blocks, hashes, strict=True))


def test_a_block_is_not_findable_before_its_copy_is_proven(rig):
    hashes = chain("a", 2)
    rig.compute("r", hashes)
    rig.order()
    assert rig.settle() == []
    assert rig.leader.match("other", hashes, 0) == 0
    rig.ranks[0].run("offload")
    assert rig.leader.match("other", hashes, 0) == 0
    rig.settle()
    assert rig.leader.match("other", hashes, 0) == 2
    assert rig.leader.counters.offload_blocks == 2


def test_a_block_is_registered_only_when_every_rank_has_proven_it(two_ranks):
    hashes = chain("a", 2)
    two_ranks.compute("r", hashes)
    two_ranks.order()
    two_ranks.ranks[0].run_all()
    two_ranks.settle()
    assert two_ranks.leader.match("other", hashes, 0) == 0
    two_ranks.ranks[1].run_all()
    two_ranks.settle()
    assert two_ranks.leader.match("other", hashes, 0) == 2


def test_blocks_whose_handle_was_dropped_are_reported_in_the_log(rig, caplog):
    pinned = rig.leader.host.store.pin(rig.fill("a", 2))
    rig.step()
    assert "leaked" not in caplog.text
    del pinned
    rig.step()
    assert "blocks of host memory leaked, which is a bug in kvbm: PinnedBlocks(2 blocks" in caplog.text


def test_a_block_in_g2_or_in_flight_is_not_copied_again(rig):
    hashes = chain("a", 3)
    rig.compute("first", hashes)
    rig.compute("second", hashes)
    assert [len(order.slots) for order in rig.order().offloads] == [3]
    rig.end_copies()
    rig.compute("third", hashes)
    assert rig.order().is_empty()


def test_blocks_that_the_engine_had_in_g1_already_are_offloaded_too(rig):
    hashes = chain("a", 4)
    blocks = rig.hold(hashes)
    rig.leader.offload("local-hit", hashes, blocks, computed_blocks=4, prompt_blocks=4)
    rig.step()
    assert rig.leader.match("other", hashes, 0) == 4


def test_generated_blocks_are_offloaded_unless_the_profile_says_no(rig):
    hashes = chain("a", 4)
    rig.compute("r", hashes, prompt_blocks=1)
    rig.step()
    assert rig.leader.match("other", hashes, 0) == 4
    only_prompt = Rig(offload_generated=False)
    only_prompt.compute("r", hashes, prompt_blocks=1)
    only_prompt.step()
    assert only_prompt.leader.match("other", hashes, 0) == 1


def test_growing_request_offloads_each_block_once(rig):
    hashes, blocks = chain("a", 4), rig.g1.allocate(4)
    orders = []
    for computed in (1, 1, 3, 4):
        for block, h in zip(blocks[:computed], hashes, strict=False):
            rig.g1.compute(block, h)
        rig.leader.offload("r", hashes[:computed], blocks, computed_blocks=computed, prompt_blocks=1)
        orders += [block for order in rig.order().offloads for block in order.block_ids]
    assert orders == blocks


def test_sources_stay_held_until_the_copy_has_read_them(rig):
    hashes = chain("a", 2)
    blocks = rig.compute("r", hashes)
    rig.order()
    rig.finish("r", hashes, blocks)
    assert [rig.g1.references[block] for block in blocks] == [1, 1]
    rig.end_copies()
    assert [rig.g1.references[block] for block in blocks] == [0, 0]
    rig.load("again", hashes)
    rig.step()


def test_no_more_source_blocks_are_held_than_the_limit_and_the_rest_follows_later():
    rig = Rig(max_in_flight_blocks=2)
    hashes = chain("a", 5)
    blocks = rig.compute("r", hashes)
    rig.order()
    assert sum(rig.g1.references.values()) == 5 + 2
    for _ in range(2):
        rig.end_copies()
        rig.leader.offload("r", hashes, blocks, computed_blocks=5, prompt_blocks=5)
        rig.order()
    rig.end_copies()
    assert rig.leader.match("other", hashes, 0) == 5


def test_what_did_not_fit_is_counted_when_its_request_ends():
    rig = Rig(max_in_flight_blocks=2)
    hashes = chain("a", 5)
    blocks = rig.compute("r", hashes)
    rig.finish("r", hashes, blocks)
    assert rig.leader.counters.offload_skipped_blocks == 3


def test_a_chain_larger_than_g2_keeps_its_head_and_copies_nothing_in_circles():
    rig = Rig(slots=4)
    hashes = chain("a", 7)
    blocks = rig.g1.allocate(7)
    for computed in range(1, 8):
        rig.g1.compute(blocks[computed - 1], hashes[computed - 1])
        rig.leader.offload("r", hashes, blocks, computed_blocks=computed, prompt_blocks=7)
        rig.step()
    assert rig.leader.match("x", hashes, 0) == 4
    assert rig.leader.counters.offload_blocks == 4
    assert rig.leader.counters.evicted_blocks == 0


def test_a_growing_chain_evicts_others_before_its_own_head():
    rig = Rig(slots=6)
    hashes, blocks = chain("a", 5), rig.g1.allocate(5)
    for block, h in zip(blocks, hashes, strict=True):
        rig.g1.compute(block, h)
    rig.leader.offload("r", hashes, blocks, computed_blocks=2, prompt_blocks=5)
    rig.step()
    other = rig.fill("other", 4)
    for computed in (3, 4, 5):
        rig.leader.offload("r", hashes, blocks, computed_blocks=computed, prompt_blocks=5)
        rig.step()
    assert rig.leader.match("x", hashes, 0) == 5
    assert rig.leader.match("y", other, 0) == 1


def test_a_hit_in_g1_keeps_the_whole_chain_recent_head_last(rig):
    hot = rig.fill("hot", 3)
    rig.fill("cold", 5)
    blocks = rig.compute("again", hot)
    assert rig.order().is_empty()
    rig.finish("again", hot, blocks)
    rig.fill("new", 6)
    assert rig.leader.match("probe", hot, 0) == 2


def test_a_prompt_computed_in_chunks_ends_with_its_head_most_recent(rig):
    hashes, blocks = chain("a", 4), rig.g1.allocate(4)
    for computed in range(1, 5):
        rig.g1.compute(blocks[computed - 1], hashes[computed - 1])
        rig.leader.offload("r", hashes, blocks, computed_blocks=computed, prompt_blocks=4)
        rig.step()
    rig.finish("r", hashes, blocks)
    rig.fill("other", 6)
    assert rig.leader.match("x", hashes, 0) == 2


# -- back --------------------------------------------------------------------------------------------------------------


def test_match_starts_nothing_and_counts_per_block(rig):
    hashes = rig.fill("a", 4)
    assert rig.leader.match("r", hashes, 0) == 4
    assert rig.leader.match("r", hashes, 3) == 1
    assert rig.leader.match("r", hashes + chain("b", 1), 2) == 2
    assert rig.leader.match("r", chain("b", 3), 0) == 0
    assert rig.order().is_empty()
    assert rig.leader.blocks()[Tier.HOST] == {"free": 4, "moving": 0, "pinned": 0, "evictable": 4}


def test_a_block_under_onboard_cannot_be_evicted(rig):
    hashes = rig.fill("a", 4)
    blocks = rig.load("r", hashes)
    plan = rig.order()
    other = chain("b", 8)
    sources = rig.compute("flood", other)
    rig.order()
    assert rig.leader.blocks()[Tier.HOST]["pinned"] == 4
    rig.end_copies()
    assert all(rig.g1.holds(block, h) for block, h in zip(blocks, hashes, strict=True))
    rig.finish("flood", other, sources)
    assert len(plan.onboards) == 1


def test_two_requests_with_one_prefix_cause_one_load(rig):
    hashes = rig.fill("a", 3)
    rig.load("first", hashes)
    assert rig.leader.match("second", hashes, 0) is None
    assert len(rig.order().onboards) == 1
    rig.end_copies()
    assert rig.leader.match("second", hashes, 0) == 3
    assert rig.leader.counters.onboard_shared_requests == 1


def test_a_request_waits_for_one_load_of_its_prefix_and_then_loads_by_itself(rig):
    hashes = rig.fill("a", 3)
    rig.load("first", hashes)
    assert rig.leader.match("second", hashes, 0) is None
    assert rig.leader.match("third", hashes, 0) is None
    rig.step()
    rig.load("second", hashes)  # an engine without a prefix cache of its own has to
    assert rig.leader.match("third", hashes, 0) == 3
    rig.step()


def test_a_request_that_waits_for_a_load_that_fails_gets_an_answer(rig):
    hashes = rig.fill("a", 3)
    rig.load("first", hashes)
    assert rig.leader.match("second", hashes, 0) is None
    rig.leader.reset()
    assert rig.leader.match("second", hashes, 0) == 0


def test_aborting_a_request_under_onboard_leaves_its_blocks_to_the_copy(rig):
    hashes = rig.fill("a", 3)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.finish("r", hashes, blocks)
    assert all(rig.g1.references[block] == 1 for block in blocks)
    assert rig.end_copies() == []
    assert [(result.request_id, result.failed_block_ids) for result in rig.departed] == [("r", ())]
    assert all(rig.g1.references[block] == 0 for block in blocks)
    assert not rig.leader.has_pending()


def test_a_new_request_with_an_old_id_does_not_get_the_old_result(rig):
    hashes = rig.fill("a", 3)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.finish("r", hashes, blocks)
    rig.leader.match("r", chain("z", 2), 0)
    assert rig.end_copies() == []


def test_load_of_blocks_that_have_gone_since_the_match_fails_at_once(rig):
    hashes = rig.fill("a", 3)
    assert rig.leader.match("r", hashes, 0) == 3
    rig.leader.reset()
    rig.leader.onboard("r", hashes, 0, rig.g1.allocate(3))
    (result,) = rig.settle()
    assert result.failed_block_ids == result.block_ids
    assert rig.leader.match("r", hashes, 0) == 0


# -- reset -------------------------------------------------------------------------------------------------------------


def test_reset_forgets_and_fails_what_is_in_flight_in_both_directions(rig):
    hashes = rig.fill("a", 3)
    blocks = rig.load("r", hashes)
    rig.compute("out", chain("b", 2))
    rig.order()
    rig.leader.reset()
    (result,) = rig.end_copies()
    assert list(result.failed_block_ids) == blocks
    assert rig.leader.match("x", hashes, 0) == 0
    assert rig.leader.match("x", chain("b", 2), 0) == 0
    assert rig.leader.blocks()[Tier.HOST] == {"free": 8, "moving": 0, "pinned": 0, "evictable": 0}


def test_an_offload_releases_its_blocks_between_two_steps_without_a_poll_of_the_worker(two_ranks):
    hashes = chain("a", 2)
    two_ranks.finish("r", hashes, two_ranks.compute("r", hashes))
    two_ranks.order()
    assert two_ranks.leader.settle_offloads() is True
    two_ranks.ranks[0].run_all()
    assert two_ranks.leader.settle_offloads() is True, "the other rank still reads the blocks"
    two_ranks.ranks[1].run_all()
    assert two_ranks.leader.settle_offloads() is False
    assert not any(two_ranks.g1.references.values())
    assert two_ranks.leader.match("other", hashes, 0) == 2


def test_blocks_of_an_abandoned_offload_are_free_and_what_it_copies_is_not_registered(rig):
    hashes = chain("a", 2)
    blocks = rig.compute("r", hashes)
    rig.finish("r", hashes, blocks)
    rig.order()
    rig.leader.abandon_offloads()
    assert not any(rig.g1.references.values())
    assert rig.leader.orders_in_flight() == {}, "they would be released again if the cache is turned off"
    rig.compute("overwrites", chain("b", 2))
    rig.end_copies()
    assert rig.leader.match("other", hashes, 0) == 0
    rig.order()
    assert rig.leader.blocks()[Tier.HOST]["moving"] == 2, "the copy of the newer request"


def test_a_load_keeps_its_blocks_when_offloads_are_abandoned(rig):
    hashes = rig.fill("a", 3)
    blocks = rig.load("r", hashes)
    rig.order()
    rig.leader.abandon_offloads()
    assert all(rig.g1.references[block] == 2 for block in blocks)


def test_a_request_that_lives_through_a_reset_offloads_nothing_of_its_old_state(rig):
    hashes = chain("a", 4)
    blocks = rig.compute("r", hashes[:2])
    rig.leader.reset()
    rig.leader.offload("r", hashes, blocks + rig.g1.allocate(2), computed_blocks=4, prompt_blocks=4)
    rig.step()
    assert rig.leader.match("x", hashes, 0) == 0
    assert rig.leader.match("x", hashes, 2) == 0


def test_a_request_that_had_computed_nothing_at_a_reset_offloads_as_ever(rig):
    hashes = chain("a", 2)
    rig.leader.match("waiting", hashes, 0)
    rig.leader.reset()
    rig.compute("waiting", hashes)
    rig.step()
    assert rig.leader.match("x", hashes, 0) == 2


def test_the_same_block_offloaded_again_after_a_reset_in_flight_is_found(rig):
    hashes = chain("a", 2)
    rig.compute("old", hashes)
    rig.order()
    rig.leader.reset()
    rig.compute("new", hashes)
    rig.step()
    assert rig.leader.match("x", hashes, 0) == 2
    blocks = rig.load("x", hashes)
    rig.step()
    assert all(rig.g1.holds(block, h) for block, h in zip(blocks, hashes, strict=True))


# -- counters and events -----------------------------------------------------------------------------------------------


def test_counters_move_when_a_thing_has_happened_and_not_before(rig):
    counters = rig.leader.counters
    rig.compute("r", chain("a", 2))
    rig.order()
    assert (counters.offload_blocks, counters.offload_bytes) == (0, 0)
    rig.end_copies()
    assert (counters.offload_blocks, counters.offload_bytes) == (2, 2048)
    rig.load("s", chain("a", 2))
    rig.order()
    assert (counters.onboard_blocks, counters.matched_tokens) == (0, 0)
    rig.end_copies()
    assert (counters.onboard_blocks, counters.onboard_bytes, counters.matched_tokens) == (2, 2048, 32)


def test_hit_rate_counts_finished_requests(rig):
    hashes = rig.fill("a", 4)
    blocks = rig.load("hit", hashes)
    rig.step()
    rig.finish("hit", hashes, blocks)
    rig.leader.match("miss", chain("b", 4), 0)
    rig.leader.finish("miss", chain("b", 4))
    assert rig.leader.counters.hit_rate(Tier.HOST) == pytest.approx(4 / 8)


def test_replayed_events_equal_what_match_finds(rig):
    live: set[bytes] = set()
    names = ["a", "b", "c", "a", "d"]
    for name in names:
        rig.fill(name, 4)
        for event in rig.leader.take_events():
            live = live | set(event.hashes) if type(event).__name__ == "BlocksStored" else live - set(event.hashes)
    found = {h for name in names for h in chain(name, 4) if rig.leader.match("probe", [h], 0)}
    assert live == found


# -- several KV cache groups -------------------------------------------------------------------------------------------


def test_groups_are_offloaded_and_onboarded_side_by_side():
    rig = Rig(slots=16, blocks=32, groups=(Group(16), Group(16, window_tokens=20)))
    full, window = chain("full", 4), chain("window", 4)
    for group, hashes in enumerate((full, window)):
        blocks = rig.hold(hashes)
        sources = blocks if group == 0 else [NO_BLOCK, NO_BLOCK, *blocks[2:]]
        rig.leader.offload("a", hashes, sources, computed_blocks=4, prompt_blocks=4, group=group)
    rig.step()
    rig.leader.finish("a", full, window)
    assert rig.leader.counters.offload_blocks == 6
    assert rig.leader.match_groups("b", [full, window], 0, 64) == 64
    assert rig.leader.match_groups("b", [full, window], 0, 63) == 0, "the window of a shorter hit is not there"
    targets = rig.g1.allocate(6)
    wanted = [*full, *window[2:]]
    rig.leader.onboard("b", wanted, 0, targets, tokens=64)
    (result,) = rig.step()
    assert not result.failed_block_ids
    assert all(rig.g1.holds(block, block_hash) for block, block_hash in zip(targets, wanted, strict=True))
    assert rig.leader.counters.matched_tokens == 64


def test_a_block_of_a_window_that_found_no_room_is_not_read_later_when_the_engine_may_have_reused_it():
    rig = Rig(slots=16, blocks=32, max_in_flight_blocks=2, groups=(Group(16), Group(16, window_tokens=20)))
    for group, expected in ((0, [1, 1, 1, 1]), (1, [0, 0, 1, 1])):
        hashes, blocks = chain(f"group {group}", 4), rig.g1.allocate(4)
        for block, block_hash in zip(blocks, hashes, strict=True):
            rig.g1.compute(block, block_hash)
        for _ in range(3):
            rig.leader.offload("a", hashes, blocks, computed_blocks=4, prompt_blocks=4, group=group)
            rig.step()
        present = [rig.leader.match(f"c{i}", [h], 0) for i, h in enumerate(hashes)]
        assert present == expected


# -- priorities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priorities", "offloaded"),
    [((50, 50, 50, 50), 4), ((50, 30, 29, 90), 2), ((29, 90, 90, 90), 0), ((50, 50), 2), ((), 0), (None, 4)],
)
def test_what_is_offloaded_ends_before_the_first_block_whose_priority_is_too_low(priorities, offloaded):
    rig = Rig(min_priority=30)
    hashes = chain("a", 4)
    blocks = rig.hold(hashes)
    for computed in (2, 4):  # in two chunks: the second adds nothing behind a gap
        rig.leader.offload("r", hashes, blocks, computed_blocks=computed, prompt_blocks=4, priorities=priorities)
        rig.step()
    assert rig.leader.match("next", hashes, 0) == offloaded
    assert rig.leader.counters.offload_blocks == offloaded
