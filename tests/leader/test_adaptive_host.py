"""Adaptive eviction of host memory, as requests of an engine see it."""

import pytest
from rig import Rig, chain, disk_policy

from kvbm.core.policies.chain_use import ChainUse
from kvbm.core.policies.ranking import ARRIVING, CLASS_MASK, IN_LOWER_TIER, INCUMBENTS, NEW, RESIDENT, RETAINED
from kvbm.tiers.settings import TierPolicy


@pytest.fixture
def rig():
    return Rig(slots=8, blocks=32, host_eviction="adaptive")


def serve(rig, name, hashes):
    """A request from its lookup to its end, without a load. Returns how many blocks were found."""
    found = rig.leader.match(name, hashes, 0)
    blocks = rig.compute(name, hashes)
    rig.step()
    rig.finish(name, hashes, blocks)
    return found


def classes(rig, hashes):
    store = rig.leader.host.store
    with store.pin(hashes) as held:
        return [store.policy.order.marks[slot] & CLASS_MASK for slot in held.slots]


def use_incumbents(rig):
    adaptive = rig.leader.host.store.policy
    adaptive.order.use_table(INCUMBENTS)
    adaptive._current = adaptive._shadows[-1]  # its own choice takes hundreds of requests


def incumbents(rig, count):
    """The table keeps them: a chain that has come back."""
    use_incumbents(rig)
    kept = chain("kept", count)
    serve(rig, "first", kept)
    serve(rig, "again", kept)
    return kept


def test_blocks_get_the_class_that_their_request_had_when_it_arrived(rig):
    hashes = chain("a", 5)
    assert serve(rig, "first", hashes[:3]) == 0
    assert classes(rig, hashes[:3]) == [NEW] * 3
    assert serve(rig, "second", hashes) == 3
    assert all(one >= RESIDENT for one in classes(rig, hashes[:3]))
    assert all(NEW < one < RESIDENT for one in classes(rig, hashes[3:]))


def test_blocks_that_host_memory_would_not_keep_are_not_copied(rig):
    kept = incumbents(rig, 6)
    before = rig.leader.counters.offload_blocks
    scan = chain("scan", 5)
    rig.leader.match("scan", scan, 0)
    blocks = rig.compute("scan", scan)
    for _ in range(3):  # it is not tried again
        rig.step()
        rig.leader.offload("scan", scan, blocks, computed_blocks=5, prompt_blocks=5)
    rig.finish("scan", scan, blocks)
    assert rig.leader.host.store.match(kept) == 6
    assert rig.leader.host.store.match(scan) == 2  # what was free
    counters = rig.leader.counters
    assert (counters.offload_blocks - before, counters.offload_declined_blocks) == (2, 3)
    assert (counters.eviction_order, counters.offload_skipped_blocks) == (3, 0)


def test_a_declined_request_copies_no_generated_blocks_either(rig):
    incumbents(rig, 8)
    scan = chain("scan", 5)
    rig.leader.match("scan", scan, 0)
    blocks = rig.compute("scan", scan)
    rig.step()
    longer = chain("scan", 6)
    blocks += rig.g1.allocate(1)
    rig.g1.compute(blocks[-1], longer[-1])
    rig.leader._requests["scan"].offloads[0].fresh_until = 1000  # so that it is handled with other requests
    assert rig.leader.offload_all([("scan", longer, blocks, 6, 5)]) == [6]
    assert rig.step() == []
    assert not any(map(rig.leader.host.store.contains, longer))
    rig.finish("scan", longer, blocks)


@pytest.mark.parametrize(
    "tier", [{"disk": TierPolicy("always")}, {"shared": TierPolicy("always")}, {"to_host": "always"}]
)
def test_no_block_is_declined_if_all_are_wanted(tier):
    rig = Rig(slots=8, blocks=32, host_eviction="adaptive", **tier)
    incumbents(rig, 8)
    serve(rig, "scan", chain("scan", 5))
    assert rig.leader.host.store.match(chain("scan", 5)) == 5
    assert rig.leader.counters.offload_declined_blocks == 0


def test_with_second_hit_a_chain_is_copied_when_it_is_used_again():
    rig = Rig(slots=8, blocks=32, host_eviction="adaptive", to_host="second_hit")
    one = chain("a", 1)  # of a chain, every fourth block is remembered
    serve(rig, "first", one)
    assert rig.leader.host.store.match(one) == 0
    serve(rig, "second", one)
    assert rig.leader.host.store.match(one) == 1


def test_requests_of_one_step_do_not_share_the_same_room(rig):
    kept = incumbents(rig, 6)
    for name in ("one", "two"):
        rig.leader.match(name, chain(name, 2), 0)
        rig.compute(name, chain(name, 2))
    rig.step()
    assert rig.leader.host.store.match(kept) == 6
    assert rig.leader.host.store.match(chain("one", 2)) == 2
    assert rig.leader.host.store.match(chain("two", 2)) == 0


def test_with_lru_a_request_is_nothing_special():
    rig = Rig(slots=8, blocks=32)
    serve(rig, "first", chain("a", 6))
    serve(rig, "second", chain("b", 5))
    assert rig.leader.host.store.match(chain("a", 6)) == 3
    assert (rig.leader.counters.eviction_order, rig.leader.counters.offload_declined_blocks) == (0, 0)


def test_a_chain_longer_than_a_slice_gets_its_classes_in_slices():
    rig = Rig(slots=40, blocks=80, host_eviction="adaptive", slice_blocks=4)
    hashes = chain("a", 30)
    for name in ("first", "second"):
        rig.leader.match(name, hashes, 0)
        blocks = rig.compute(name, hashes)
        for _ in range(10):
            rig.step()
            rig.leader.offload(name, hashes, blocks, computed_blocks=30, prompt_blocks=30)
        rig.finish(name, hashes, blocks)
    assert all(one >= RESIDENT for one in classes(rig, hashes))


def test_an_arrival_says_what_follows_a_hit():
    arrival = ChainUse(hit=2, shared_end=0, reused_end=3, pause=1, resident_pause=1, continues=True)
    assert [mark & CLASS_MASK for mark in arrival.marks(0, 4)] == [
        RESIDENT + 1,
        RESIDENT + 1,
        ARRIVING + 1,
        ARRIVING + 1,
    ]


# The disk


@pytest.mark.parametrize("host", [False, True])
def test_blocks_on_disk_have_classes_too(host):
    rig = Rig(
        slots=16,
        blocks=64,
        fake_disk=40,
        host_eviction="adaptive" if host else "lru",
        disk_eviction="adaptive",
        **disk_policy("always"),
    )
    hashes = chain("a", 6)
    serve(rig, "first", hashes[:4])
    rig.step()
    rig.step()
    assert on_disk(rig, hashes[:4]) == [NEW] * 4
    rig.leader.host.store.forget(hashes)
    rig.now_s += 50
    rig.leader.match("second", hashes, 0)
    assert all(one >= RESIDENT for one in on_disk(rig, hashes[:4]))
    rig.compute("second", hashes)
    rig.steps(3)
    later = on_disk(rig, hashes)
    assert later == sorted(later, reverse=True)
    assert all(NEW < one < RESIDENT for one in later[4:])
    assert rig.leader.counters.disk.eviction_order == 1


def on_disk(rig, hashes):
    store = rig.disk_tier.store
    with store.pin(hashes) as held:
        return [store.policy.order.marks[slot] & CLASS_MASK for slot in held.slots]


def test_a_block_that_is_written_is_not_resident_below():
    marks = bytes(range(64))
    below = marks.translate(IN_LOWER_TIER)
    assert all(mark & CLASS_MASK < RESIDENT for mark in below)
    assert all((one ^ other) & ~CLASS_MASK == 0 for one, other in zip(marks, below, strict=True))
    classes = [mark & CLASS_MASK for mark in below[:RETAINED]]
    assert [max(classes[:RESIDENT]), classes[RESIDENT], classes[RETAINED - 1]] == [RESIDENT - 1, ARRIVING, RESIDENT - 1]


def test_a_disk_with_the_table_of_incumbents_keeps_what_came_back():
    rig = Rig(slots=16, blocks=64, fake_disk=8, disk_eviction="adaptive", **disk_policy("always"))
    kept = chain("kept", 6)
    for name in ("first", "again"):
        rig.leader.host.store.forget(kept)
        serve(rig, name, kept)
        rig.step()
    rig.disk_tier.store.policy.order.use_table(INCUMBENTS)
    for number in range(4):
        serve(rig, f"scan {number}", chain(f"scan {number}", 2))
        rig.step()
    assert rig.disk_tier.store.match(kept) == 6
