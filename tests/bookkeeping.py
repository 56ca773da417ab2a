"""Consistency check of a leader: what is in flight, what is held and what is registered must agree.

It compares private books with each other and with what is public: nothing else tells that one of them is wrong.
"""

from itertools import chain

from kvbm.core.policies.ranking import CLASS_MASK
from kvbm.core.store import FREE, INACTIVE, MUTABLE, ORPHANED, PINNED, BlockState, StoreCounts
from kvbm.errors import InvariantError
from kvbm.host.control_words import LANES
from kvbm.tiers.disk.tier import DiskTier
from kvbm.tiers.shared.tier import SharedTier


def check_leader(leader):
    """Raise InvariantError or AssertionError unless the whole bookkeeping is consistent. Slow at scale."""
    check_store(leader.host.store)
    check_offloads(leader._offloads)  # a private book
    check_onboards(leader._onboards)  # a private book
    checks = {DiskTier: check_disk_tier, SharedTier: check_shared_tier}
    for tier in leader.lower_tiers:
        if type(tier) in checks:
            checks[type(tier)](tier)


def check_offloads(offloads):
    collected = (*offloads._collected.hashes, *offloads._snapshots.hashes)  # private books
    held_blocks, departing = offloads._held_blocks, offloads._departing  # private books
    held = sum(len(flight.order.block_ids) for flight in offloads.in_flight.values() if flight.is_held)
    assert held + len(collected) == held_blocks, (held, len(collected), held_blocks)
    expected = {h for flight in offloads.in_flight.values() for h in flight.wanted()}.union(collected)
    assert expected == departing, (len(expected), len(departing))


def check_onboards(onboards):
    copies, lanes, in_slices = onboards.in_flight.values(), onboards._lanes, onboards._in_slices  # private books
    assert len(lanes) + len(copies) == LANES, (len(lanes), len(copies))
    in_parts = dict.fromkeys([*onboards._reading, *in_slices])  # a private book
    live = {copy.load for copy in copies} | set(in_parts)
    assert set(onboards.arriving.values()) <= live, (onboards.arriving, live)
    assert onboards._fetches == {fetch: load for load in in_parts for fetch in load.reads}  # a private book
    for load in in_parts:
        copying = sum(copy.load is load for copy in copies)
        assert load.open_parts == len(load.reads) + copying, (load, copying)
        assert load.open_parts or load.waiting or load.slices, load
        assert (load in in_slices) == bool(load.slices), load


def check_disk_tier(disk):
    check_store(disk.store)
    writes, departing = disk._writes.values(), disk._departing  # private books
    written = {h for write in writes if not write.is_void for h in write.source.hashes}
    assert written == departing, (len(written), len(departing))


def check_shared_tier(shared):
    writes, departing, queue = shared._writes.values(), shared._departing, shared._queue  # private books
    assert {write.extent.name for write in writes} == departing
    assert not departing & queue.keys(), "an extent is due that is being written"
    assert not (shared._has_ended and (queue or shared._used or len(shared.presence)))  # private books


def check_store(store):
    """Raise InvariantError, with slots, states and counts, if the metadata of a store is inconsistent."""
    store.check(0, store.capacity_blocks)
    counts, states, hashed = store.counts(), store._states, len(store._index)  # private books
    pinned, orphaned = states.count(PINNED), states.count(ORPHANED)
    counted = StoreCounts(
        free=states.count(FREE),
        mutable=states.count(MUTABLE),
        pinned=pinned + orphaned,
        inactive=states.count(INACTIVE),
    )
    if counts != counted:
        raise InvariantError(f"counts are {counts}, counted in the slots: {counted}")
    if hashed != counts.inactive + pinned:
        raise InvariantError(f"{hashed} hashes for {counts.inactive} inactive and {pinned} pinned slots")
    lists, order = store._lists, store._order  # private books
    _check_list(store, lists.walk(lists.free), FREE, counts.free)
    nodes = getattr(order, "_nodes", [lists.inactive])
    _check_list(store, chain.from_iterable(map(lists.walk, nodes)), INACTIVE, counts.inactive)
    for node in nodes[: len(nodes) * (store.policy.knows_uses)]:
        of_class = list(lists.walk(node))
        if {order.marks[slot] & CLASS_MASK for slot in of_class} - {node - lists.inactive}:
            raise InvariantError(f"the list of class {node - lists.inactive} has slots of other classes: {of_class}")
        if (used := [order.used_s(slot) for slot in of_class]) != sorted(used):
            raise InvariantError(f"the list of class {node - lists.inactive} is not in the order of use")


def _check_list(store, slots, state, expected):
    length = 0
    for slot in slots:
        length += 1
        if (found := store._states[slot]) != state or length > expected:  # a private book
            raise InvariantError(
                f"the list of {expected} {BlockState(state).name} slots has slot {slot} at place {length}, "
                f"which is {BlockState(found).name}"
            )
    if length != expected:
        raise InvariantError(f"the list of {BlockState(state).name} slots has {length}, expected {expected}")


def tier_of(leader, kind):
    """Return the lower tier of this kind, None if there is none."""
    return next((tier for tier in leader.lower_tiers if tier.kind is kind), None)
