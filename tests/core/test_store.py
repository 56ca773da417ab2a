"""What the state machine cannot see: misuse, eviction order, resets and duplicates as scenarios, many dicts."""

import gc
import os

import pytest
from bookkeeping import check_store

from kvbm.core.index import ENTRIES_PER_DICT
from kvbm.core.store import INACTIVE, SAMPLE_DISTANCE, BlockStore, MutableBlocks, StoreCounts
from kvbm.errors import InvariantError
from kvbm.events import BlocksRemoved, BlocksStored, TierCleared
from kvbm.types import Tier


def names(text):
    """One 16-byte hash per letter."""
    return [letter.encode() * 16 for letter in text]


def letters(hashes):
    return "".join(sequence_hash[:1].decode() for sequence_hash in hashes)


def make_store(capacity, **options):
    return BlockStore(capacity, tier=Tier.HOST, **options)


def keep(store, text):
    """Register the blocks of `text` and leave them inactive."""
    store.allocate(len(text)).register(names(text)).release()


def filled(capacity, text):
    store = make_store(capacity)
    keep(store, text)
    return store


def evicted_letters(store, count):
    """Evict `count` blocks of a full store and say which, in order."""
    store.take_events()
    with store.allocate(count):
        return "".join(letters(event.hashes) for event in store.take_events())


# Handles


def test_released_handle_cannot_be_released_again():
    store = make_store(6)
    for handle in (
        store.allocate(2),
        store.allocate(2),
        store.allocate(1).register(names("c")),
    ):
        handle.release()
        before = store.counts()
        with pytest.raises(InvariantError, match="after it was consumed or released"):
            handle.release()
        assert store.counts() == before
        check_store(store)


def test_consumed_handle_refuses_every_use():
    store = make_store(4)
    mutable = store.allocate(2)
    pinned = mutable.register(names("ab"))
    for use in (
        lambda: mutable.slots,
        mutable.release,
        lambda: mutable.register(names("ab")),
        lambda: mutable.split([True]),
    ):
        with pytest.raises(InvariantError):
            use()
    with pytest.raises(InvariantError), mutable:
        pass
    pinned.release()
    for use in (lambda: pinned.slots, lambda: pinned.hashes, pinned.release):
        with pytest.raises(InvariantError):
            use()
    check_store(store)


def test_refused_transition_leaves_the_handle_as_it_was():
    store = make_store(3)
    mutable = store.allocate(3)
    for refused in (
        lambda: mutable.register(names("ab")),
        lambda: mutable.register([b"x" * 16, b"y" * 15, b"z" * 17]),
        lambda: mutable.split([True]),
    ):
        with pytest.raises(InvariantError):
            refused()
        assert list(mutable.slots) == [0, 1, 2]
        check_store(store)
    mutable.release()
    assert store.counts().free == 3


def test_context_manager_gives_back_what_was_not_consumed():
    store = make_store(3)
    with store.allocate(3):
        assert store.counts().mutable == 3
    with pytest.raises(KeyError), store.allocate(2):
        raise KeyError("the caller failed")
    with store.allocate(1) as mutable:
        mutable.register(names("a")).release()
    assert store.counts() == StoreCounts(free=2, mutable=0, pinned=0, inactive=1)
    check_store(store)


def test_split_by_mask_keeps_the_order_of_the_batch():
    store = make_store(4)
    chosen, others = store.allocate(4).split([False, True, False, True])
    assert (list(chosen.slots), list(others.slots)) == ([1, 3], [0, 2])
    chosen.release()
    others.release()


def test_dropped_handle_is_reported_and_its_slots_stay_taken():
    store = make_store(4)
    handle = store.allocate(2)
    assert isinstance(handle, MutableBlocks)
    del handle
    store.allocate(0)
    gc.collect()
    assert store.leaked() == ["MutableBlocks(2 blocks, slots [0, 1])"]
    assert store.leaked() == []
    assert store.counts() == StoreCounts(free=2, mutable=2, pinned=0, inactive=0)
    check_store(store)


# Allocation and eviction


def test_allocate_is_all_or_nothing():
    store = filled(4, "ab")
    held = store.pin(names("a"))
    store.take_events()
    assert store.allocate(4) is None
    assert store.match(names("ab")) == 2
    assert store.take_events() == []
    with store.allocate(3):
        assert store.match(names("ab")) == 1
    held.release()
    check_store(store)


def test_negative_count_is_refused():
    with pytest.raises(InvariantError):
        make_store(1).allocate(-1)


def test_store_without_capacity_serves_nothing_and_breaks_nothing():
    store = make_store(0)
    assert store.allocate(1) is None
    assert store.match(names("a")) == 0
    store.allocate(0).register([]).release()
    store.reset()
    check_store(store)


def test_free_slots_are_used_before_anything_is_evicted():
    store = filled(4, "ab")
    with store.allocate(2):
        assert store.match(names("ab")) == 2


def test_released_chain_is_evicted_from_its_tail():
    store = filled(6, "abc")
    keep(store, "xyz")
    assert evicted_letters(store, 4) == "cbaz"
    assert store.match(names("xyz")) == 2


def test_touch_makes_a_chain_newest_with_its_head_last():
    store = filled(6, "abc")
    keep(store, "xyz")
    store.touch(names("ab?c"))
    assert evicted_letters(store, 6) == "zyxcba"


def test_touched_twice_in_one_call_counts_once():
    store = filled(3, "abc")
    store.touch(names("cac"))
    check_store(store)
    assert evicted_letters(store, 3) == "bac"


def test_pinned_block_survives_full_allocation_and_is_newest_after_release():
    store = filled(4, "abcd")
    held = store.pin(names("ab"))
    assert evicted_letters(store, 2) == "dc"
    keep(store, "ef")
    held.release()
    assert evicted_letters(store, 4) == "feba"


def test_block_pinned_twice_is_evictable_only_after_both_releases():
    store = filled(2, "ab")
    first, second = store.pin(names("ab")), store.pin(names("a"))
    first.release()
    assert store.counts() == StoreCounts(free=0, mutable=0, pinned=1, inactive=1)
    assert store.allocate(2) is None
    second.release()
    assert evicted_letters(store, 2) == "ba"


def test_pin_is_all_or_nothing():
    store = filled(2, "ab")
    assert store.pin(names("abc")) is None
    assert store.counts().pinned == 0
    check_store(store)


def test_match_changes_neither_recency_nor_counts():
    store = filled(3, "abc")
    for start in range(3):
        assert store.match(names("abc"), start) == 3 - start
    assert store.match(names("axbc"), 1) == 0
    assert store.match([]) == 0
    assert evicted_letters(store, 3) == "cba"


# Registration


def test_registered_hash_keeps_its_first_slot_and_the_second_is_free_again():
    store = make_store(4)
    first = store.allocate(2).register(names("ab"))
    second = store.allocate(2).register(names("xa"))
    assert (list(first.slots), list(second.slots)) == ([0, 1], [2, 0])
    assert store.counts() == StoreCounts(free=1, mutable=0, pinned=3, inactive=0)
    assert [event.hashes for event in store.take_events()] == [tuple(names("ab")), tuple(names("x"))]
    first.release()
    assert store.counts().pinned == 2
    second.release()
    check_store(store)


def test_hash_that_stands_twice_in_one_batch_gets_one_slot():
    store = make_store(3)
    pinned = store.allocate(3).register(names("aba"))
    assert list(pinned.slots) == [0, 1, 0]
    assert store.take_events() == [BlocksStored(Tier.HOST, tuple(names("ab")))]
    check_store(store)
    pinned.release()
    assert store.counts() == StoreCounts(free=1, mutable=0, pinned=0, inactive=2)


def test_repeated_block_is_as_recent_as_its_first_place():
    store = make_store(3)
    store.allocate(3).register(names("aba")).release()
    keep(store, "c")
    assert evicted_letters(store, 3) == "bac"


def test_only_duplicates_announce_nothing():
    store = filled(4, "ab")
    store.take_events()
    keep(store, "ab")
    assert store.take_events() == []
    check_store(store)


def test_events_are_silent_when_they_are_switched_off():
    store = make_store(2, events=False)
    keep(store, "ab")
    store.forget(names("a"))
    keep(store, "cd")
    store.reset()
    assert store.take_events() == []


# Forgetting


def test_forgotten_pinned_block_is_invisible_and_free_after_the_last_release():
    store = filled(2, "ab")
    first, second = store.pin(names("ab")), store.pin(names("a"))
    store.take_events()
    store.forget(names("?aa"))
    assert store.take_events() == [BlocksRemoved(Tier.HOST, tuple(names("a")))]
    assert (store.contains(names("a")[0]), store.match(names("b"))) == (False, 1)
    store.touch(names("ab"))
    store.forget(names("a"))
    first.release()
    assert store.counts() == StoreCounts(free=0, mutable=0, pinned=1, inactive=1)
    second.release()
    assert store.counts() == StoreCounts(free=1, mutable=0, pinned=0, inactive=1)
    check_store(store)


def test_hash_that_was_forgotten_while_pinned_can_be_registered_in_another_slot():
    store = filled(2, "a")
    old = store.pin(names("a"))
    store.forget(names("a"))
    new = store.allocate(1).register(names("a"))
    assert list(old.slots) != list(new.slots)
    check_store(store)
    old.release()
    assert store.match(names("a")) == 1
    new.release()
    check_store(store)


def test_reset_leaves_handles_valid_and_their_slots_come_back():
    store = filled(8, "ab")
    pinned = store.pin(names("a"))
    mutable, written = store.allocate(2), store.allocate(2)
    store.take_events()
    store.reset()
    assert store.take_events() == [TierCleared(Tier.HOST)]
    assert store.counts() == StoreCounts(free=3, mutable=4, pinned=1, inactive=0)
    check_store(store)
    hidden = written.register(names("cd"))
    assert store.missing(names("abcd")) == [0, 1, 2, 3]
    assert list(hidden.slots) == [4, 5]
    for handle in (pinned, mutable, hidden):
        handle.release()
        check_store(store)
    assert store.counts().free == 8
    assert store.take_events() == []


def test_blocks_allocated_before_a_reset_never_become_findable():
    store = make_store(3)
    mutable, untouched = store.allocate(2).split([True, False])
    store.reset()
    with mutable.register(names("a")), untouched:
        assert store.match(names("a")) == 0
        keep(store, "a")
        assert store.match(names("a")) == 1
    check_store(store)
    assert store.counts() == StoreCounts(free=2, mutable=0, pinned=0, inactive=1)


# Hashes and size


def test_hash_of_another_length_is_refused():
    store = make_store(2, hash_bytes=32)
    with pytest.raises(InvariantError, match="32 bytes"):
        store.match([b"a" * 16])
    with pytest.raises(InvariantError, match="32 bytes"), store.allocate(1) as blocks:
        blocks.register([b"a" * 16])


@pytest.mark.parametrize(
    "make_hash",
    [
        lambda number: os.urandom(16),
        lambda number: number.to_bytes(16, "big"),
        lambda number: number.to_bytes(16, "little"),
        lambda number: number.to_bytes(32, "little") + bytes(4),
    ],
    ids=["random", "big-endian counter", "little-endian counter", "36 bytes with a constant end"],
)
def test_store_of_many_dicts_behaves_like_one(make_hash):
    capacity, batch = 3 * ENTRIES_PER_DICT, 4000
    hashes = [make_hash(number) for number in range(2 * capacity)]
    store = make_store(capacity, hash_bytes=len(hashes[0]), events=False)
    for start in range(0, len(hashes), batch):
        chain = hashes[start : start + batch]
        store.allocate(len(chain)).register(chain).release()
    check_store(store)
    assert max(map(len, store._index._dicts)) < 1.1 * ENTRIES_PER_DICT
    live = [sequence_hash for sequence_hash in hashes if store.contains(sequence_hash)]
    assert len(live) == capacity
    store.forget(live[: capacity // 2])
    check_store(store)
    assert store.missing(live) == list(range(capacity // 2))
    store.reset()
    check_store(store)
    assert store.counts().free == capacity
    assert store.missing(live[:9]) == list(range(9))


# The store's own check


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: store._states.__setitem__(0, 0),
        lambda store: store._states.__setitem__(3, 4),
        lambda store: store._states.__setitem__(3, 1),
        lambda store: store._extra_pins.__setitem__(0, 1),
        lambda store: store._index.remove([0]),
        lambda store: store._lists.remove([1]),
        lambda store: store._lists.take(store._lists.free, 1),
    ],
)
def test_check_notices_damage(damage):
    store = filled(4, "abc")
    check_store(store)
    damage(store)
    with pytest.raises(InvariantError):
        check_store(store)


def test_slices_of_check_notice_damage_only_where_it_is():
    store = filled(4, "abc")
    store._states[3] = INACTIVE
    store.check(0, 3)
    with pytest.raises(InvariantError, match="slot 3 is INACTIVE"):
        store.check(3, 1)


def test_restored_blocks_are_found_and_evicted_in_their_order():
    store = filled(5, "x")
    store.restore([4, 2, 3], names("abc"))
    assert store.match(names("abc")) == 3
    assert store.counts() == StoreCounts(free=1, mutable=0, pinned=0, inactive=4)
    check_store(store)
    assert letters(store.oldest(3)) == "xab"
    assert evicted_letters(store, 4) == "xab"


def test_blocks_are_restored_part_by_part_the_last_part_newest():
    store = make_store(6)
    store.restore([3, 4, 5], names("abc"))
    store.restore([], [])
    store.restore([1, 0], names("de"))
    check_store(store)
    with store.pin(names("abcde")) as pinned:
        assert list(pinned.slots) == [3, 4, 5, 1, 0]
    store.forget(names("b"))
    store.restore([4], names("f"))
    assert letters(store.oldest(6)) == "edcaf"  # the chain was released tail first
    check_store(store)


@pytest.mark.parametrize(("slots", "text"), [([0], "y"), ([1, 1], "yz"), ([1, 2], "yy"), ([1], "x"), ([1, 2], "y")])
def test_what_cannot_have_been_left_there_is_not_restored(slots, text):
    store = filled(4, "x")
    with pytest.raises((InvariantError, ValueError)):
        store.restore(slots, names(text))


# Chains


def numbered(first, last):
    return [number.to_bytes(16, "big") for number in range(first, last)]


def register(store, hashes):
    store.allocate(len(hashes)).register(hashes).release()


@pytest.mark.parametrize("present", [0, 1, 20, 99, 100])
def test_missing_blocks_of_a_chain_are_those_after_its_prefix(present):
    store, hashes = make_store(128), numbered(0, 100)
    register(store, hashes[:present])
    assert store.missing_of_chain(hashes) == store.missing(hashes) == list(range(present, 100))


@pytest.mark.parametrize("at", [3, 3 + SAMPLE_DISTANCE, 99])
def test_a_sampled_block_after_a_gap_in_a_chain_is_found(at):
    """The block is in slot 0, whose number is false."""
    store, hashes = make_store(128), numbered(0, 100)
    register(store, [hashes[at]])
    assert store.match([hashes[at]]) == 1
    register(store, hashes[:3])
    assert store.missing_of_chain(hashes) == [position for position in range(3, 100) if position != at]


def test_a_block_between_samples_counts_as_missing_and_is_registered_once():
    store, hashes = make_store(128), numbered(0, 100)
    register(store, [hashes[7]])
    assert store.missing_of_chain(hashes) == list(range(100))
    register(store, hashes)
    assert store.counts().inactive == 100
    check_store(store)


def test_every_block_of_a_short_chain_is_looked_up():
    store, hashes = make_store(128), numbered(0, 2 * SAMPLE_DISTANCE)
    register(store, [hashes[7]])
    assert 7 not in store.missing_of_chain(hashes)


def test_of_a_set_of_hashes_those_that_are_registered_are_found_in_every_dict():
    store = make_store(2 * ENTRIES_PER_DICT)
    hashes = [number.to_bytes(16, "big") for number in range(100)]
    store.allocate(100).register(hashes).release()
    assert store.registered_of({*hashes[::2], b"x" * 16}) == set(hashes[::2])
    store.forget(hashes[:50])
    assert store.registered_of(set(hashes)) == set(hashes[50:])
