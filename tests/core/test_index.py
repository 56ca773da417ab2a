"""A prefix is found by comparing bytes of consecutive slots; it must be what a lookup per block would find."""

import hashlib
from itertools import pairwise

from bookkeeping import check_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.core.index import ascending_runs
from kvbm.core.store import BlockStore
from kvbm.types import Tier

BLOCKS = 300


def chain(name):
    return [hashlib.sha256(f"{name} {number}".encode()).digest()[:16] for number in range(BLOCKS)]


ONE, OTHER = chain("one"), chain("other")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batches=st.lists(st.sampled_from([1, 2, 3, 15, 16, 17, 33, 64, 130]), min_size=1, max_size=8),
    holes=st.sets(st.integers(0, BLOCKS - 1), max_size=3),
    reused=st.integers(0, 40),
    starts=st.lists(st.integers(0, BLOCKS), min_size=1, max_size=4),
)
def test_prefix_is_what_a_lookup_per_block_would_find(batches, holes, reused, starts):
    store = BlockStore(2 * BLOCKS - 20, tier=Tier.HOST)
    for hashes in two_growing_chains(batches):
        store.allocate(len(hashes)).register(hashes).release()
    store.forget([ONE[hole] for hole in holes])
    # Some slots now hold bytes that were overwritten, others bytes that no longer count.
    with store.allocate(reused).register(chain("new")[:reused]):
        known = [store.contains(sequence_hash) for sequence_hash in ONE]
        for start in starts:
            length = [*known[start:], False].index(False)
            assert store.match(ONE, start) == length
            assert store.pin(ONE[start : start + length + 1]) is None or start + length == BLOCKS
            with store.pin(ONE[start : start + length]) as pinned:
                found = store._index.hashes_of(pinned.slots)
            assert list(found) == ONE[start : start + length]
        check_store(store)


def two_growing_chains(batches):
    """Yield batches of both chains in turn, with sizes that repeat, until both are whole."""
    position = turn = 0
    while position < BLOCKS:
        end = min(BLOCKS, position + batches[turn % len(batches)])
        yield ONE[position:end]
        yield OTHER[position:end]
        position, turn = end, turn + 1


@given(
    gaps=st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 2, 50]), max_size=200),
    swaps=st.lists(st.tuples(st.integers(0, 199), st.integers(0, 199)), max_size=2),
)
def test_runs_are_the_slots_in_their_order(gaps, swaps):
    slots = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    for one, other in swaps:
        if max(one, other) < len(slots):
            slots[one], slots[other] = slots[other], slots[one]
    runs = ascending_runs(slots)
    assert [slot for run in runs for slot in run] == slots
    for before, after in pairwise(runs):
        if isinstance(before, range) and isinstance(after, range):
            assert before.stop != after.start, "a run ends where the slots are not consecutive"


def test_long_runs_are_ranges():
    assert ascending_runs(list(range(7, 107))) == [range(7, 107)]
    assert ascending_runs([*range(100), *range(200, 300)]) == [range(100), range(200, 300)]
    assert ascending_runs([*range(100), *range(200, 210), *range(300, 310)]) == [
        range(100),
        [*range(200, 210), *range(300, 310)],
    ]
    assert ascending_runs(list(range(0, 200, 2))) == [list(range(0, 200, 2))]
    assert ascending_runs([*range(100, 200), *range(100)]) == [[*range(100, 200), *range(100)]]
