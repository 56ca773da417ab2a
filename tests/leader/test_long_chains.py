"""Chains of more blocks than one slice: matched, loaded, offloaded and touched over several steps."""

from __future__ import annotations

import pytest
from rig import Rig, chain, disk_policy

from kvbm.types import Tier

SLICE = 3
LENGTH = 10


@pytest.fixture
def rig():
    return Rig(slots=16, blocks=64, slice_blocks=SLICE)


def fill(rig, name, length):
    """Like `Rig.fill`, for a chain that takes several steps."""
    hashes = chain(name, length)
    blocks = rig.compute(f"fill-{name}", hashes)
    considered = 0
    while considered < length:
        rig.step()
        considered = rig.leader.offload(f"fill-{name}", hashes, blocks, computed_blocks=length, prompt_blocks=length)
    rig.step()
    rig.finish(f"fill-{name}", hashes, blocks)
    for _ in range(length):
        rig.step()
    return hashes


def match(rig, request_id, hashes, start=0):
    """Call `match` once per step until it is complete; return (result, calls)."""
    for calls in range(1, 100):
        if (found := rig.leader.match(request_id, hashes, start)) is not None:
            return found, calls
        rig.step()
    raise AssertionError("the match does not end")


def load(rig, request_id, hashes):
    found, _ = match(rig, request_id, hashes)
    blocks = rig.g1.allocate(found)
    rig.leader.onboard(request_id, hashes, 0, blocks)
    return blocks


def holds(rig, blocks, hashes):
    return all(rig.g1.holds(block, one) for block, one in zip(blocks, hashes, strict=False))


def pinned(rig):
    return rig.leader.blocks()[Tier.HOST]["pinned"]


# -- match -------------------------------------------------------------------------------------------------------------


def test_a_long_match_is_made_in_slices_and_repeated_without_another_lookup(rig, monkeypatch):
    hashes = fill(rig, "a", LENGTH)
    assert match(rig, "r", hashes) == (LENGTH, 4)
    calls = []
    monkeypatch.setattr(rig.leader.host.store, "pin_prefix", lambda *arguments: calls.append(arguments))
    assert rig.leader.match("r", hashes, 0) == LENGTH
    assert not calls


def test_a_short_match_is_made_at_once_and_pins_nothing(rig):
    hashes = fill(rig, "a", SLICE)
    assert rig.leader.match("r", hashes, 0) == SLICE
    assert pinned(rig) == 0


def test_what_a_long_match_found_is_not_evicted_until_the_request_ends(rig):
    hashes = fill(rig, "a", LENGTH)
    match(rig, "r", hashes)
    fill(rig, "b", 9)
    assert rig.leader.match("r", hashes, 0) == LENGTH
    assert pinned(rig) == LENGTH
    rig.leader.finish("r", hashes)
    while rig.leader.has_pending():
        rig.step()
    assert pinned(rig) == 0


def test_a_long_match_goes_on_when_its_next_block_has_arrived(rig):
    hashes = fill(rig, "a", LENGTH)
    longer = [*hashes, *chain("more", 2)]
    assert match(rig, "r", longer)[0] == LENGTH
    blocks = rig.compute("other", longer[-2:])
    rig.step()
    rig.finish("other", longer[-2:], blocks)
    assert match(rig, "r", longer)[0] == LENGTH + 2


def test_a_long_match_ends_with_the_prompt_limit(rig):
    hashes = fill(rig, "a", LENGTH)
    assert rig.leader.match("r", hashes, 0, 7) is None
    rig.step()
    assert rig.leader.match("r", hashes, 0, 7) is None
    rig.step()
    assert rig.leader.match("r", hashes, 0, 7) == 7


def test_a_long_match_begins_again_after_another_hit_in_g1_or_a_reset(rig):
    hashes = fill(rig, "a", LENGTH)
    assert match(rig, "r", hashes)[0] == LENGTH
    assert match(rig, "r", hashes, 2)[0] == LENGTH - 2
    rig.leader.reset()
    assert match(rig, "r", hashes, 2)[0] == 0
    rig.steps(8)
    assert pinned(rig) == 0


def test_a_request_whose_hit_in_g1_moves_in_every_step_is_answered(rig):
    hashes = fill(rig, "a", LENGTH)
    answers = []
    for start in range(6, 0, -1):
        answers.append(rig.leader.match("r", hashes, start))
        rig.step()
    assert answers == [None, None, None, None, 8, 9]


def test_blocks_that_are_forgotten_do_not_hold_up_a_long_match(rig):
    hashes = fill(rig, "a", LENGTH)
    others, answers = fill(rig, "b", 6), []
    for other in others:
        answers.append(rig.leader.match("r", hashes, 0))
        rig.leader.host.store.forget([other])
        rig.step()
    assert answers[-1] == LENGTH


def test_a_second_long_match_pins_nothing_if_both_would_pin_most_of_host_memory():
    rig = Rig(slots=24, blocks=64, slice_blocks=SLICE)
    first, second = fill(rig, "a", LENGTH), fill(rig, "b", LENGTH)
    assert match(rig, "r", first)[0] == LENGTH
    assert match(rig, "s", second) == (LENGTH, 1)
    assert pinned(rig) == LENGTH


def test_all_requests_together_examine_one_slice_per_step():
    rig = Rig(slots=64, blocks=64, slice_blocks=SLICE)
    chains = {name: fill(rig, name, 8) for name in "abc"}
    for name, hashes in chains.items():
        rig.leader.match(name, hashes, 0)
    assert pinned(rig) == SLICE


def test_the_pins_of_a_long_match_end_when_the_request_runs_without_a_load(rig):
    hashes = fill(rig, "a", LENGTH)
    match(rig, "r", hashes)
    blocks = rig.compute("r", hashes[:1])
    rig.steps(5)
    assert pinned(rig) == 0
    rig.finish("r", hashes, blocks)


def test_the_pins_of_a_long_match_end_when_nothing_may_be_loaded(rig):
    hashes = fill(rig, "a", LENGTH)
    match(rig, "r", hashes)
    rig.leader._live("r").may_onboard = False
    assert rig.leader.match("r", hashes, 0) == 0
    rig.steps(5)
    assert pinned(rig) == 0


# -- load --------------------------------------------------------------------------------------------------------------


def test_a_long_load_is_ordered_one_slice_per_step_and_reported_once(rig):
    hashes = fill(rig, "a", LENGTH)
    blocks = load(rig, "r", hashes)
    sizes, results = [], []
    for _ in range(6):
        plan = rig.order()
        sizes.append([len(order.slots) for order in plan.onboards])
        rig.ranks[0].run_all()
        results += rig.settle()
    assert sizes == [[], [3], [3], [3], [1], []]
    assert [(one.request_id, list(one.block_ids), one.failed_block_ids) for one in results] == [("r", blocks, ())]
    assert holds(rig, blocks, hashes)
    assert rig.leader.counters.onboard_blocks == LENGTH
    assert pinned(rig) == 0


def test_a_long_load_keeps_the_engine_stepping_until_it_is_over(rig):
    load(rig, "r", fill(rig, "a", LENGTH))
    for _ in range(5):
        assert rig.leader.has_pending()
        assert rig.leader.needs_settle()
        rig.step()
    assert not rig.leader.needs_settle()


def test_long_loads_take_turns_and_a_short_one_does_not_wait():
    rig = Rig(slots=32, blocks=64, slice_blocks=SLICE)
    chains = {"r": fill(rig, "a", 9), "s": fill(rig, "b", 9)}
    short = fill(rig, "c", 2)
    blocks = {name: rig.g1.allocate(match(rig, name, hashes)[0]) for name, hashes in chains.items()}
    for name, hashes in chains.items():
        rig.leader.onboard(name, hashes, 0, blocks[name])
    rig.order()
    in_short = rig.load("t", short)
    owners = {block: name for name, own in {**blocks, "t": in_short}.items() for block in own}
    turns = [[owners[order.block_ids[0]] for order in rig.order().onboards] for _ in range(6)]
    assert turns == [["t", "r"], ["s"], ["r"], ["s"], ["r"], ["s"]]
    rig.steps(3)
    assert all(holds(rig, blocks[name], hashes) for name, hashes in chains.items())


def test_a_request_that_ends_during_its_long_load_gets_no_more_slices(rig):
    hashes = fill(rig, "a", LENGTH)
    blocks = load(rig, "r", hashes)
    rig.order()
    rig.order()
    rig.finish("r", hashes, blocks)
    assert [rig.g1.references[block] for block in blocks] == [1] * 3 + [0] * 7, "the first slice is being copied"
    others = rig.compute("other", chain("b", 7))
    for _ in range(8):
        assert not rig.order().onboards
        assert rig.end_copies() == []
    assert holds(rig, others, chain("b", 7)), "a slice was copied over the blocks of another request"
    assert [result.request_id for result in rig.departed] == ["r"]
    assert pinned(rig) == 0


def test_a_slice_that_fails_fails_the_load_and_the_slices_after_it_are_not_copied(rig):
    hashes = fill(rig, "a", LENGTH)
    rig.ranks[0].copier.at(1, "fail")
    blocks = load(rig, "r", hashes)
    results = rig.steps(8)
    assert [(one.request_id, list(one.failed_block_ids)) for one in results] == [("r", blocks)]
    assert pinned(rig) == 0
    assert rig.leader.match("r", hashes, 0) == 0, "it computes"


def test_a_reset_ends_a_long_load_as_failed(rig):
    hashes = fill(rig, "a", LENGTH)
    blocks = load(rig, "r", hashes)
    rig.step()
    rig.leader.reset()
    results = rig.steps(8)
    assert [list(one.failed_block_ids) for one in results] == [blocks]
    assert rig.leader.blocks()[Tier.HOST]["free"] == 16


def test_an_engine_may_take_less_than_a_long_match_found(rig):
    hashes = fill(rig, "a", LENGTH)
    match(rig, "r", hashes)
    blocks = rig.g1.allocate(7)
    rig.leader.onboard("r", hashes, 0, blocks)
    results = rig.steps(8)
    assert [(list(one.block_ids), one.failed_block_ids) for one in results] == [(blocks, ())]
    assert holds(rig, blocks, hashes)
    assert pinned(rig) == 0


def test_a_load_of_other_blocks_than_the_match_found_uses_none_of_them(rig):
    match(rig, "r", fill(rig, "a", 5))
    other = fill(rig, "b", 5)
    blocks = rig.g1.allocate(5)
    rig.leader.onboard("r", other, 0, blocks)
    assert len(rig.steps(6)) == 1
    assert holds(rig, blocks, other)
    assert pinned(rig) == 0


def test_a_long_chain_in_both_tiers_is_loaded_byte_for_byte():
    policy = disk_policy(writes="always", batch_blocks=2, read_timeout_s=10.0, reads_always=True)
    rig = Rig(slots=8, blocks=64, slice_blocks=SLICE, fake_disk=64, **policy)
    hashes = fill(rig, "a", LENGTH)
    fill(rig, "b", 6)
    in_host = rig.leader.host.store.match(hashes)
    assert in_host < LENGTH, "host memory has no room for all"
    blocks = load(rig, "r", hashes)
    assert len(blocks) == LENGTH
    results = rig.steps(20)
    assert [(list(one.block_ids), one.failed_block_ids) for one in results] == [(blocks, ())]
    assert holds(rig, blocks, hashes)
    assert pinned(rig) == 0
    assert rig.leader.blocks()[Tier.DISK]["pinned"] == 0


# -- offload and the end of a request ----------------------------------------------------------------------------------


def test_the_blocks_of_a_long_prefix_are_offloaded_in_slices(rig):
    hashes = chain("a", LENGTH)
    blocks = rig.compute("r", hashes)
    sizes = []
    for _ in range(5):
        sizes.append([len(order.slots) for order in rig.order().offloads])
        rig.end_copies()
        rig.leader.offload("r", hashes, blocks, computed_blocks=LENGTH, prompt_blocks=LENGTH)
    assert sizes == [[3], [3], [3], [1], []]
    assert match(rig, "s", hashes)[0] == LENGTH


def test_a_long_prefix_in_g2_is_passed_over_so_that_a_short_answer_is_offloaded(rig):
    hashes = fill(rig, "a", LENGTH)
    longer = [*hashes, *chain("more", 1)]
    blocks = rig.hold(longer)
    considered = [
        rig.leader.offload("r", longer, blocks, computed_blocks=LENGTH + 1, prompt_blocks=LENGTH) for _ in range(2)
    ]
    assert considered == [3 * SLICE, LENGTH + 1]
    (order,) = rig.order().offloads
    assert order.block_ids == (blocks[-1],)


def test_the_end_of_a_long_request_makes_its_whole_chain_recent(rig):
    hashes = fill(rig, "a", LENGTH)
    fill(rig, "b", 6)
    rig.leader.offload("r", hashes, list(range(LENGTH)), computed_blocks=1, prompt_blocks=LENGTH)
    rig.leader._live("r").hit_blocks = LENGTH
    rig.leader.finish("r", hashes)
    rig.steps(4)
    store = rig.leader.host.store
    assert list(store.oldest(16)) == [*chain("b", 6)[::-1], *hashes[::-1]]


def test_the_offloads_of_all_requests_in_a_step_are_one_order(rig):
    chains = [chain(name, 2) for name in "abc"]
    for number, hashes in enumerate(chains):
        rig.compute(f"r{number}", hashes)
    (order,) = rig.order().offloads
    assert len(order.slots) == len(order.block_ids) == 6
    rig.end_copies()
    assert [rig.leader.match("x", hashes, 0) for hashes in chains] == [2, 2, 2]


def test_blocks_of_a_merged_order_keep_their_tenants():
    policy = disk_policy(writes="always", read_timeout_s=10.0)
    rig = Rig(slots=16, blocks=32, fake_disk=16, **policy)
    for name in ("a@x", "b@y", "c@x"):
        rig.compute(name, chain(name, 2))
    (order,) = rig.order().offloads
    assert len(order.slots) == 6
    rig.steps(3)
    tenants = {rig.disk.kept[slot][0]: tenant for slot, tenant in rig.disk.tenants.items()}
    assert tenants == {one: name[2:].encode() for name in ("a@x", "b@y", "c@x") for one in chain(name, 2)}


def test_completed_blocks_of_many_requests_are_offloaded_as_one_by_one():
    """Some requests complete one block, some more; two complete the same block; one is at its first block."""
    found = []
    for is_together in (False, True):
        rig = Rig(slots=24, blocks=64)
        chains = {name: chain(name, 6) for name in "abcd"} | {"e": chain("a", 6)}
        blocks = {name: rig.compute(name, hashes[: 0 if name == "d" else 3]) for name, hashes in chains.items()}
        rig.step()
        ends = {"a": 4, "b": 5, "c": 3, "d": 1, "e": 4}
        for name, end in ends.items():
            blocks[name] += rig.g1.allocate(end - len(blocks[name])) or []
            for block, one in zip(blocks[name], chains[name], strict=False):
                rig.g1.compute(block, one)
        completed = [(name, chains[name], blocks[name], end, 2) for name, end in ends.items()]
        if is_together:
            considered = rig.leader.offload_all(completed)
        else:
            considered = [
                rig.leader.offload(name, one, ids, computed_blocks=end, prompt_blocks=prompt)
                for name, one, ids, end, prompt in completed
            ]
        (order,) = rig.order().offloads
        rig.end_copies()
        matches = [rig.leader.match("x", hashes, 0) for hashes in chains.values()]
        found.append((considered, sorted(order.block_ids), matches))
        rig.close()
    assert found[0] == found[1]
    assert found[0][2] == [4, 5, 3, 1, 4]


def test_a_completed_block_that_is_on_its_way_is_not_copied_again(rig):
    hashes = chain("a", 3)
    own = [rig.compute(name, hashes[:2]) for name in "rs"]
    rig.step()
    for name, blocks in zip("rs", own, strict=True):
        blocks += rig.g1.allocate(1)
        rig.g1.compute(blocks[2], hashes[2])
        assert rig.leader.offload_all([(name, hashes, blocks, 3, 3)]) == [3]
        rig.order()
    assert [len(order.slots) for order in rig.leader.orders_in_flight().values()] == [1]


def test_of_a_merged_order_only_the_blocks_that_the_engine_took_back_are_dropped(rig):
    first, second = chain("a", 2), chain("b", 2)
    taken = rig.compute("r", first)
    rig.compute("s", second)
    rig.order()
    rig.leader.discard_offloads(taken[1:])
    rig.end_copies()
    assert [rig.leader.match("x", hashes, 0) for hashes in (first, second)] == [1, 2]


def test_collected_blocks_that_the_engine_took_back_are_not_ordered(rig):
    first, second = chain("a", 2), chain("b", 2)
    taken = rig.compute("r", first)
    rig.compute("s", second)
    rig.leader.discard_offloads(taken)
    (order,) = rig.order().offloads
    assert not set(order.block_ids) & set(taken)
    assert [rig.g1.references[block] for block in taken] == [1, 1], "only the request has them"


def test_single_blocks_do_not_take_more_room_than_larger_requests_have_left():
    rig = Rig(slots=16, blocks=64, max_in_flight_blocks=4)
    chains = {name: chain(name, 5) for name in "abc"}
    blocks = {name: rig.compute(name, hashes[:1]) for name, hashes in chains.items()}
    rig.step()
    ends = {"a": 2, "b": 2, "c": 5}
    for name, end in ends.items():
        blocks[name] += rig.g1.allocate(end - 1)
        for block, one in zip(blocks[name], chains[name], strict=False):
            rig.g1.compute(block, one)
    considered = rig.leader.offload_all([(name, chains[name], blocks[name], end, 5) for name, end in ends.items()])
    (order,) = rig.order().offloads
    assert len(order.block_ids) == 4
    assert sum(considered) - 3 == 4, "what found no room is tried again"
