"""Consistency check of a leader: what is in flight, what is held and what is registered must agree."""

from kvbm.host.control_words import LANES
from kvbm.leader.disk_tier import DiskTier
from kvbm.leader.shared_tier import SharedTier


def check_leader(leader):
    """Raise InvariantError or AssertionError unless the whole bookkeeping is consistent. Slow at scale."""
    leader._host.store.check()
    check_offloads(leader._offloads)
    check_onboards(leader._onboards)
    checks = {DiskTier: check_disk_tier, SharedTier: check_shared_tier}
    for tier in leader.lower_tiers:
        if type(tier) in checks:
            checks[type(tier)](tier)


def check_offloads(offloads):
    collected = (*offloads._collected.hashes, *offloads._snapshots.hashes)
    held = sum(len(flight.order.block_ids) for flight in offloads.in_flight.values() if flight.is_held)
    assert held + len(collected) == offloads._held_blocks, (held, len(collected), offloads._held_blocks)
    expected = {h for flight in offloads.in_flight.values() for h in flight.wanted()}.union(collected)
    assert expected == offloads._departing, (len(expected), len(offloads._departing))


def check_onboards(onboards):
    copies, fetches = onboards.in_flight.values(), onboards._fetches.values()
    assert len(onboards._lanes) + len(copies) == LANES, (len(onboards._lanes), len(copies))
    in_parts = dict.fromkeys([*onboards._reading, *onboards._in_slices])
    live = {copy.load.number for copy in copies} | {load.number for load in in_parts}
    assert set(onboards._arriving.values()) <= live, (onboards._arriving, live)
    for load in in_parts:
        fetching = sum(other is load for other, _ in fetches)
        copying = sum(copy.load is load for copy in copies)
        assert load.open_parts == fetching + copying, (load, fetching, copying)
        assert load.open_parts or load.waiting or load.slices, load
        assert (load in onboards._in_slices) == bool(load.slices), load


def check_disk_tier(disk):
    disk.store.check()
    written = {h for write in disk._writes.values() if not write.is_void for h in write.source.hashes}
    assert written == disk._departing, (len(written), len(disk._departing))


def check_shared_tier(shared):
    assert {write.extent.name for write in shared._writes.values()} == shared._departing
    assert not shared._departing & shared._queue.keys(), "an extent is due that is being written"
    assert not (shared._has_ended and (shared._queue or shared._used or len(shared.presence)))


def tier_of(leader, kind):
    """Return the lower tier of this kind, None if there is none."""
    return next((tier for tier in leader.lower_tiers if tier.kind is kind), None)
