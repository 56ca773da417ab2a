"""`offload.to_host: on_evict`: blocks are copied to host memory when the engine is about to evict them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest
from evicting_g1 import EvictingG1
from rig import Rig, chain

from kvbm.config.schema import Tiers
from kvbm.core.groups import Group
from kvbm.core.policies.ranking import CLASS_MASK, INCUMBENTS, NEW, RESIDENT
from kvbm.leader.late_offloads import reason_to_copy_at_once
from kvbm.leader.offloads import NO_BLOCK
from kvbm.types import Tier


def late_rig(*, slots: int = 16, blocks: int = 32, reach: int = 8, to_host: str = "on_evict", **settings) -> Rig:
    return Rig(slots=slots, blocks=blocks, g1=EvictingG1, to_host=to_host, max_in_flight_blocks=reach, **settings)


@pytest.fixture
def rig():
    return late_rig()


def serve(rig: Rig, name: str, hashes: list[bytes]) -> tuple[int, int]:
    """A request from its lookup to its end. Returns how many blocks came from G1 and from host memory."""
    blocks = rig.g1.find(hashes)
    local = len(blocks)
    loaded = rig.leader.match(name, hashes, local) or 0
    if loaded:
        target = rig.g1.allocate(loaded)
        assert target is not None
        rig.leader.onboard(name, hashes, local, target)
        while not (results := rig.step()):
            pass
        for block, one in zip(target, hashes[local:], strict=False):
            assert rig.g1.holds(block, one) or block in results[0].failed_block_ids, "wrong bytes from host memory"
            rig.g1.compute(block, one)
        blocks += target
    fresh = rig.g1.allocate(len(hashes) - len(blocks))
    assert fresh is not None
    for block, one in zip(fresh, hashes[len(blocks) :], strict=True):
        rig.g1.compute(block, one)
    blocks += fresh
    rig.leader.offload(name, hashes, blocks, computed_blocks=len(hashes), prompt_blocks=len(hashes))
    rig.step()
    rig.leader.finish(name, hashes)
    rig.g1.free(blocks[::-1])
    return local, loaded


def let_be_evicted(rig: Rig, hashes: list[bytes]) -> None:
    """Serve a chain of four blocks, and then others until its blocks are among the next ones."""
    serve(rig, "a", hashes)
    serve(rig, "filler", chain("filler", 20))
    assert rig.leader.counters.offload_blocks == 0
    rig.g1.allocate(4)


def in_host(rig: Rig, hashes: list[bytes]) -> list[bool]:
    return [rig.leader.host.store.contains(one) for one in hashes]


def test_nothing_is_copied_while_g1_has_room(rig):
    for number in range(3):
        serve(rig, f"r{number}", chain(f"c{number}", 8))
    rig.steps(2)
    assert rig.leader.counters.offload_blocks == 0
    assert rig.g1.references.total() == 0


def test_blocks_are_copied_before_they_are_evicted_tail_first(rig):
    first = chain("first", 8)
    serve(rig, "first", first)
    serve(rig, "second", chain("second", 20))  # four blocks are left, then the first chain is evicted
    rig.step()
    assert in_host(rig, first) == [False] * 4 + [True] * 4
    serve(rig, "third", chain("third", 8))
    rig.steps(2)
    assert rig.g1.evicted == first[:3:-1]
    assert in_host(rig, first) == [True] * 8
    assert rig.leader.counters.offload_skipped_blocks == 0


def test_a_working_set_of_g1_and_host_memory_together_is_found(rig):
    conversations = [chain(f"c{number}", 4) for number in range(8)]  # 32 blocks; G1 has 32, some of which are ahead
    for turn in range(4):
        for number, hashes in enumerate(conversations):
            found = serve(rig, f"{turn}-{number}", hashes)
            assert turn == 0 or sum(found) == 4, (turn, number)


@pytest.mark.parametrize("is_same", [False, True])
def test_a_block_that_the_engine_filled_again_is_not_copied_under_its_former_name(rig, is_same):
    """With the same tokens, nobody says whether the engine has finished it."""
    old, new = chain("old", 4), chain("new", 4)
    serve(rig, "old", old)
    for block, content in list(rig.g1.contents.items()):  # by requests that the leader does not know
        name = content.name if is_same else new[old.index(content.name)]
        rig.g1.use([block])
        rig.g1.compute(block, name)
        rig.g1.free([block])
    serve(rig, "filler", chain("filler", 20))
    rig.g1.allocate(4)
    assert not rig.order().offloads
    assert in_host(rig, old) == [False] * 4
    assert rig.leader.counters.offload_skipped_blocks == 4


@pytest.mark.parametrize("forget", ["reset", "discard", "tenant"])
def test_forgotten_blocks_are_not_copied(rig, forget):
    hashes = chain("a", 4)
    serve(rig, "a@t", hashes)
    if forget == "reset":
        rig.leader.reset()
    elif forget == "discard":
        rig.leader.discard_offloads(list(rig.g1.contents))
    else:
        rig.leader.forget_host(b"t")
    serve(rig, "filler", chain("filler", 24))
    rig.steps(2)
    assert in_host(rig, hashes) == [False] * 4


def test_with_auto_free_slots_are_filled_at_once_and_then_blocks_are_copied_late():
    rig = late_rig(to_host="auto")
    first, second, third = chain("first", 8), chain("second", 8), chain("third", 8)
    serve(rig, "first", first)
    assert in_host(rig, first) == [True] * 8
    serve(rig, "second", second)
    serve(rig, "third", third)
    rig.steps(2)
    assert in_host(rig, first + second + third) == [True] * 16 + [False] * 8, "it is full"
    for number in range(3):
        assert rig.leader.counters.offload_blocks == 16, "these are in host memory when they are evicted"
        serve(rig, f"other{number}", chain(f"other{number}", 8))
    rig.steps(2)
    assert in_host(rig, third) == [True] * 8
    assert rig.g1.evicted == first[::-1] + second[::-1]
    assert rig.leader.counters.offload_blocks == 24
    assert rig.leader.counters.offload_skipped_blocks == 0


def test_with_auto_nothing_is_lost_by_a_reset_of_g1_until_host_memory_is_full():
    rig = late_rig(slots=64, reach=4, to_host="auto")
    chains = [chain(f"c{number}", 6) for number in range(10)]
    for number, hashes in enumerate(chains):  # more than may be in flight in a step
        serve(rig, f"r{number}", hashes)
        rig.steps(2)
    rig.g1.contents.clear()
    assert [serve(rig, f"again{number}", hashes) for number, hashes in enumerate(chains)] == [(0, 6)] * 10
    assert rig.leader.counters.offload_blocks == 60


def let_be_computed(rig: Rig, hashes: list[bytes]) -> list[int]:
    """The blocks of a request that goes on."""
    blocks = rig.hold(hashes)
    rig.leader.offload("a", hashes, blocks, computed_blocks=len(hashes), prompt_blocks=len(hashes))
    return blocks


class Examined:
    """How many blocks the leader looks up in host memory and sees of the engine's queue in a step."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.looked_up, self.seen = rig, 0, 0
        store, first = rig.leader.host.store, rig.g1.first
        for name in ("missing", "touch"):
            monkeypatch.setattr(store, name, partial(self._look_up, getattr(store, name)))
        monkeypatch.setattr(rig.g1, "first", lambda count, *, again: map(self._see, first(count, again=again)))

    def _look_up(self, look_up: Callable, hashes: Sequence[bytes], *others: object) -> object:
        self.looked_up += len(hashes)
        return look_up(hashes, *others)

    def _see(self, block: object) -> object:
        self.seen += 1
        return block

    def order(self) -> tuple[int, int, int]:
        """Return how many were looked up, seen, and ordered."""
        self.looked_up = self.seen = 0
        plan = self.rig.order()
        return self.looked_up, self.seen, sum(len(order.slots) for order in plan.offloads)


@pytest.mark.parametrize("to_host", ["auto", "on_evict"])
def test_a_step_without_room_examines_nothing(monkeypatch, to_host):
    rig = late_rig(slots=64, reach=4, to_host=to_host)
    examined = Examined(rig, monkeypatch)
    blocks = let_be_computed(rig, chain("a", 32))
    rig.g1.free(blocks[::-1])
    assert examined.order()[2] == 4
    for _ in range(3):
        assert examined.order() == (0, 0, 0)
    rig.end_copies()
    assert examined.order()[2] == 4, "it goes on"
    rig.end_copies()
    assert sum(in_host(rig, chain("a", 32))) == 8


@pytest.mark.parametrize("to_host", ["auto", "on_evict"])
def test_a_step_examines_a_slice_at_most(monkeypatch, to_host):
    rig = late_rig(slots=64, reach=32, slice_blocks=4, to_host=to_host)
    examined = Examined(rig, monkeypatch)
    hashes = [one for number in range(8) for one in chain(f"c{number}", 4)]
    for number in range(8):
        part = hashes[4 * number : 4 * number + 4]
        blocks = rig.hold(part)
        rig.leader.offload(f"r{number}", part, blocks, computed_blocks=4, prompt_blocks=4)
        rig.leader.finish(f"r{number}", part)
        rig.g1.free(blocks[::-1])
    for copied in range(4, 17, 4):
        looked_up, seen, ordered = examined.order()
        assert looked_up <= 4
        assert seen <= copied
        assert ordered == 4
    rig.end_copies()
    assert sum(in_host(rig, hashes)) == 16


def test_with_auto_blocks_that_were_evicted_while_too_many_were_in_flight_are_not_copied():
    rig = late_rig(slots=64, reach=4, to_host="auto")
    hashes = chain("a", 12)
    blocks = let_be_computed(rig, hashes)
    rig.order()
    for block in blocks[4:8]:
        del rig.g1.contents[block]
    rig.end_copies()
    orders = [rig.order(), rig.order()]
    assert [order.block_ids for plan in orders for order in plan.offloads] == [tuple(blocks[8:])]
    rig.end_copies()
    assert in_host(rig, hashes) == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_block_that_is_evicted_and_filled_with_others_during_its_copy_is_lost_once(is_noted):
    rig = late_rig(blocks=4, reach=8, to_host="auto")
    hashes, other = chain("a", 4), chain("other", 1)
    blocks = let_be_computed(rig, hashes)
    rig.order()
    rig.g1.free(blocks[::-1])
    rig.g1.use([blocks[2]])
    rig.g1.compute(blocks[2], other[0])
    if is_noted:
        rig.leader.offload("other", other, [blocks[2]], computed_blocks=1, prompt_blocks=1)
    rig.g1.free([blocks[2]])
    rig.order()  # the queue has all blocks
    rig.end_copies()
    assert in_host(rig, hashes + other) == [True, True, False, True, is_noted]
    assert rig.leader.counters.offload_skipped_blocks == 1


@pytest.mark.parametrize("is_same", [False, True])
def test_a_block_that_is_evicted_during_a_copy_to_a_free_slot_is_lost_once(is_same):
    rig = late_rig(to_host="auto")
    hashes = chain("a", 4)
    blocks = let_be_computed(rig, hashes)
    rig.order()
    assert not rig.leader.orders_in_flight()
    rig.g1.free(blocks[::-1])
    rig.g1.use([blocks[2]])
    rig.g1.compute(blocks[2], hashes[2] if is_same else bytes(16))
    rig.g1.free([blocks[2]])
    rig.end_copies()
    rig.leader.finish("a", hashes)
    assert in_host(rig, hashes) == [True, True, False, True]
    serve(rig, "other", chain("other", 32))
    rig.steps(2)
    assert in_host(rig, hashes)[2] is False
    assert rig.leader.counters.offload_skipped_blocks == 1


def test_with_auto_a_block_that_the_engine_does_not_name_is_not_copied():
    """Nobody could tell whether it was filled again during its copy."""
    rig = late_rig(to_host="auto")
    hashes = chain("a", 4)
    blocks = rig.g1.allocate(4)
    for block, one in zip(blocks[:3], hashes, strict=False):
        rig.g1.compute(block, one)
    rig.leader.offload("a", hashes, blocks, computed_blocks=4, prompt_blocks=4)
    rig.step()
    assert in_host(rig, hashes) == [True] * 3 + [False]


def test_another_tenant_is_not_forgotten(rig):
    hashes = chain("a", 4)
    serve(rig, "a@t", hashes)
    rig.leader.forget_host(b"other")
    serve(rig, "filler", chain("filler", 24))
    rig.steps(2)
    assert in_host(rig, hashes) == [True] * 4


def test_a_copy_changes_neither_the_order_of_eviction_nor_the_references(rig):
    let_be_evicted(rig, chain("a", 4))
    queue = list(rig.g1.queue)
    rig.order()
    assert rig.leader._offloads.queue()[0] == 4
    assert (rig.g1.queue, rig.g1.references.total()) == (queue, 4)
    assert not rig.leader.orders_in_flight()


def test_a_copy_that_runs_is_waited_for_until_it_ends_or_is_abandoned(rig):
    """The engine may unmap its memory then."""
    hashes = chain("a", 4)
    let_be_evicted(rig, hashes)
    rig.order()
    assert rig.leader.settle_offloads()
    rig.leader.reset()
    assert rig.leader.settle_offloads(), "it reads the blocks although nobody wants them"
    rig.leader.abandon_offloads()
    assert not rig.leader.settle_offloads()
    rig.end_copies()
    assert in_host(rig, hashes) == [False] * 4
    assert rig.leader.blocks()[Tier.HOST]["moving"] == 0


@pytest.mark.parametrize("forget", [False, True])
def test_equal_ranks_that_copy_a_block_before_and_after_its_eviction_do_not_turn_the_cache_off(forget):
    rig = late_rig(ranks=2, replicas=2)
    hashes = chain("a", 4)
    let_be_evicted(rig, hashes)
    rig.order()
    rig.ranks[0].run_all()
    for block in rig.g1.allocate(8):  # all that was ordered is evicted
        rig.g1.compute(block, bytes(16))
    if forget:
        rig.leader.reset()
    rig.ranks[1].run_all()
    rig.settle()
    rig.settle()
    assert in_host(rig, hashes) == [False] * 4
    assert rig.leader.counters.disabled == 0


def test_equal_ranks_with_different_kv_turn_the_cache_off():
    rig = late_rig(ranks=2, replicas=2)
    hashes = chain("a", 4)
    let_be_evicted(rig, hashes)
    for block in range(32):
        rig.g1.storages[1][0][block * 512] += 1
    rig.step()
    rig.settle()
    assert rig.leader.counters.disabled == 1


@pytest.mark.parametrize("is_same", [False, True])
def test_a_block_that_is_filled_again_during_its_copy_is_not_registered(rig, is_same):
    hashes = chain("a", 4)
    let_be_evicted(rig, hashes)
    rig.order()
    block = next(block for block, content in rig.g1.contents.items() if content.name == hashes[2])
    rig.g1.use([block])
    rig.g1.compute(block, hashes[2] if is_same else bytes(16))
    rig.end_copies()
    assert in_host(rig, hashes) == [True, True, False, True]
    assert rig.leader.counters.offload_skipped_blocks == 1


def test_a_block_that_a_request_uses_during_its_copy_is_registered(rig):
    hashes = chain("a", 4)
    let_be_evicted(rig, hashes)
    rig.order()
    rig.g1.find(hashes)
    rig.end_copies()
    assert in_host(rig, hashes) == [True] * 4


def test_blocks_that_found_no_room_are_tried_again():
    rig = late_rig(slots=4)
    serve(rig, "a", chain("a", 4))
    serve(rig, "b", chain("b", 4))
    with rig.leader.host.store.allocate(4):
        serve(rig, "filler", chain("filler", 24))
        rig.step()
        assert rig.leader.counters.offload_blocks == 0
    rig.step()
    assert in_host(rig, chain("a", 4)) == [True] * 4


def test_blocks_that_were_evicted_without_a_copy_are_counted(rig):
    serve(rig, "a", chain("a", 32))
    serve(rig, "b", chain("b", 32))  # evicts all at once, before a step
    assert (rig.leader.counters.offload_blocks, rig.leader.counters.offload_skipped_blocks) == (0, 32)
    rig.steps(2)
    serve(rig, "c", chain("c", 32))
    assert (rig.leader.counters.offload_blocks, rig.leader.counters.offload_skipped_blocks) == (8, 32 + 24)


def test_a_copy_that_fails_is_a_miss_and_its_blocks_are_free_again(rig):
    hashes = chain("a", 4)
    serve(rig, "a", hashes)
    rig.ranks[0].copier.next("fail")
    serve(rig, "filler", chain("filler", 24))
    rig.steps(2)
    assert in_host(rig, hashes) == [False] * 4
    assert rig.leader.counters.offload_failed_blocks == 4
    assert rig.g1.references.total() == 0
    assert serve(rig, "again", hashes) == (4, 0)  # and noted again
    serve(rig, "more", chain("more", 24))
    rig.steps(2)
    assert in_host(rig, hashes) == [True] * 4


def test_a_block_that_a_window_has_left_is_not_noted():
    rig = late_rig(groups=(Group(16, window_tokens=32),))
    hashes = chain("a", 4)
    blocks = rig.hold(hashes)
    table = [NO_BLOCK, NO_BLOCK, *blocks[2:]]
    rig.leader.offload("a", hashes, table, computed_blocks=4, prompt_blocks=4)
    rig.step()
    rig.leader.finish("a", hashes)
    rig.g1.free(blocks[::-1])
    serve(rig, "filler", chain("filler", 24))
    rig.steps(2)
    assert in_host(rig, hashes) == [False, False, True, True]


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_host_memory_evicts_blocks_that_are_in_g1_again_first_tail_first(eviction):
    rig = late_rig(host_eviction=eviction)
    first, other = chain("first", 4), chain("other", 4)
    serve(rig, "first", first)
    serve(rig, "other", other)
    for number in range(4):
        serve(rig, f"filler{number}", chain(f"filler{number}", 8))
    assert in_host(rig, first + other) == [True] * 8
    assert serve(rig, "again", first) == (0, 4)
    assert rig.leader.host.store.oldest(4) == tuple(first[::-1])
    assert serve(rig, "in g1", first) == (4, 0)
    assert rig.leader.host.store.oldest(4) == tuple(first[::-1])


@pytest.mark.parametrize(("to_host", "declines"), [("auto", True), ("on_evict", False)])
def test_with_auto_blocks_that_host_memory_would_not_keep_are_not_copied(to_host, declines):
    rig = late_rig(slots=10, host_eviction="adaptive", to_host=to_host)
    adaptive = rig.leader.host.store.policy
    adaptive.order.use_table(INCUMBENTS)
    adaptive._current = adaptive._shadows[-1]
    kept = chain("kept", 8)
    serve(rig, "first", kept)
    assert serve(rig, "again", kept) == (8, 0)
    for number in range(8):
        serve(rig, f"scan{number}", chain(f"scan{number}", 8))
    assert (rig.leader.host.store.match(kept) == 8) == declines
    counters = rig.leader.counters
    assert (counters.offload_declined_blocks > 0, counters.offload_skipped_blocks) == (declines, 0)


def test_blocks_in_g1_count_as_if_they_were_in_host_memory():
    rig = late_rig(host_eviction="adaptive")
    hashes = chain("a", 8)
    serve(rig, "first", hashes)
    assert rig.leader.match("second", hashes, 4) == 0
    arrival = rig.leader._requests["second"].offloads[0].arrival
    assert (arrival.hit, arrival.reused_end, arrival.continues) == (4, 5, True)  # the history has every fourth block
    assert [mark & CLASS_MASK >= RESIDENT for mark in arrival.marks(0, 8)] == [True] * 4 + [False] * 4


def test_the_tail_of_a_chain_of_many_slices_is_evicted_first():
    rig = late_rig(slots=64, blocks=64, reach=16, slice_blocks=4)
    hashes, host = chain("a", 14), rig.leader.host
    host.register(host.reserve(14), hashes, [True] * 14).release()
    blocks = rig.hold(hashes)
    for _ in range(4):
        rig.leader.offload("a", hashes, blocks, computed_blocks=14, prompt_blocks=14)
        rig.step()
    rig.leader.finish("a", hashes)
    rig.steps(4)
    assert host.store.oldest(14) == tuple(hashes[::-1])


def test_twice_as_many_blocks_are_watched_as_a_step_fills():
    rig = late_rig(slots=64, blocks=64, reach=64)
    for number in range(16):
        serve(rig, f"r{number}", chain(f"c{number}", 3))
    assert rig.leader.counters.offload_blocks == 0
    rig.g1.allocate(16)
    rig.steps(2)
    assert rig.leader.counters.offload_blocks == 6


def test_much_host_memory_lets_more_blocks_be_watched_than_may_be_in_flight():
    rig = late_rig(slots=64, reach=4)
    serve(rig, "a", chain("a", 12))
    serve(rig, "b", chain("b", 12))
    rig.steps(4)
    assert rig.leader.counters.offload_blocks == 8, "of the next 16 blocks, a quarter of host memory, 8 are free"


def test_a_long_chain_is_noted_in_slices():
    rig = late_rig(slots=64, blocks=64, reach=16, slice_blocks=4)
    hashes = chain("a", 20)
    blocks = rig.hold(hashes)
    considered = 0
    for expected in (4, 8, 12, 16, 20, 20):
        considered = rig.leader.offload("a", hashes, blocks, computed_blocks=20, prompt_blocks=20)
        assert considered == expected
        rig.step()


def test_with_adaptive_eviction_blocks_keep_the_class_of_their_request():
    rig = late_rig(host_eviction="adaptive")
    store = rig.leader.host.store
    hashes = chain("a", 4)
    for name in ("first", "second"):
        rig.now_s += 1
        rig.leader.match(name, hashes, 0)
        serve(rig, name, hashes)
        serve(rig, f"{name}-filler", chain(f"{name}-filler", 24))
    rig.steps(2)
    with store.pin(hashes) as held:
        marks = {store.policy.order.marks[slot] & CLASS_MASK for slot in held.slots}
    assert min(marks) > NEW


HOST = {"host": {"blocks": 1}}


@pytest.mark.parametrize(
    ("tiers", "blocks", "reason"),
    [
        (HOST, 1999, ""),
        (HOST, 2000, "host memory has 2,000 blocks, at least 20 times the 100 of G1"),
        ({**HOST, "disk": {"blocks": 9}}, 10, "blocks on disk are kept for the next start"),
        ({**HOST, "disk": {"blocks": 9, "persist": False}}, 10, ""),
        ({**HOST, "shared": {"url": "s3://b/p"}}, 10, "the shared tier takes the blocks of a request at its end"),
        ({**HOST, "shared": {"url": "s3://b/p", "write": False}}, 10, ""),
        ({"disk": {"blocks": 9, "persist": False}}, 10, "host memory is only a buffer"),
    ],
)
def test_with_auto_host_memory_gets_blocks_late_if_no_tier_needs_them_earlier(tiers, blocks, reason):
    assert reason_to_copy_at_once(Tiers.model_validate(tiers), host_blocks=blocks, g1_blocks=100) == reason


@pytest.mark.parametrize("to_host", ["on_evict", "auto"])
@pytest.mark.parametrize("seed", range(20))
def test_loads_bring_the_right_bytes_whatever_is_shared_evicted_and_reset(seed, to_host):
    """`serve` compares the bytes of each load."""
    random = Random(seed)
    slots, reach, ranks = random.choice((6, 12, 40)), random.choice((2, 8, 20)), random.choice((1, 2))
    rig = late_rig(slots=slots, reach=reach, ranks=ranks, to_host=to_host)
    stems = [chain(f"stem{number}", 6) for number in range(6)]
    loaded = 0
    for number in range(120):
        stem = random.choice(stems)
        hashes = stem[: random.randint(1, 6)] + chain(f"tail{random.randrange(8)}-{stem[0].hex()}", random.randrange(4))
        loaded += serve(rig, f"r{number}", hashes)[1]
        action = random.random()
        if action < 0.02:
            rig.leader.reset()
            rig.g1.contents.clear()
        elif action < 0.05:
            rig.ranks[0].copier.next("fail")
        elif action < 0.1 and rig.g1.queue:
            block = random.choice(rig.g1.queue)
            rig.g1.use([block])
            rig.g1.compute(block, bytes(16))
            rig.g1.free([block])
        elif action < 0.2:
            rig.order()  # a step whose copies are late
    rig.ranks[0].copier.heal()
    rig.steps(4)
    assert rig.g1.references.total() == 0
    assert len(rig.g1.queue) == rig.g1.block_count
    assert loaded or random
