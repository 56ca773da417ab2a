"""The contract of LowerTier, for each implementation, and for a third tier whose blocks are in a dict.

The leader uses the third tier through the Protocol alone.
"""

import pytest
from fake_store import FakeStore
from rig import Rig, disk_policy

from kvbm.tiers.host_tier import HostListener
from kvbm.tiers.lower_tier import Claim, LowerTier
from kvbm.tiers.open_reads import OpenReads
from kvbm.tiers.settings import TierPolicy
from kvbm.types import Tier


class DictTier(LowerTier, HostListener):
    """Blocks by hash; each write is done at once, each read ends at the next `settle`. Counted as blocks of G4."""

    kind = Tier.SHARED
    is_on = True

    def __init__(self, context):
        self.kept = {}
        self.damaged = set()
        self._host = context.host
        self.reads = OpenReads("the third tier", self, context.host, context.callbacks.clock)
        self._begun = {}

    def contains(self, sequence_hash):
        return sequence_hash in self.kept

    def match(self, hashes, start, end):
        return next((at for at in range(start, end) if hashes[at] not in self.kept), end) - start

    def claim(self, hashes, positions, extents):
        return Claim([((at,), None) for at in positions if hashes[at] in self.kept])

    def fetch(self, hashes, tenant, extent=None):
        ticket = len(self._begun)
        fetch = self.reads.begin(ticket, hashes, tenant)
        if fetch is not None:
            self._begun[ticket] = fetch
            for one, slot in zip(hashes, fetch.target.slots, strict=True):
                for shard, kept in zip(self._host.region.shards, self.kept[one], strict=True):
                    shard[slot] = kept
        return fetch

    def registered(self, hashes, slots):
        for one, slot in zip(hashes, slots, strict=True):
            self.kept[one] = [shard[slot].copy() for shard in self._host.region.shards]

    def settle(self):
        ended = [fetch for ticket in self._begun if (fetch := self.reads.end(ticket)) is not None]
        for fetch in ended:
            self.reads.arrive(fetch, [one not in self.damaged for one in fetch.hashes])
        return [fetch for fetch in ended if not fetch.is_abandoned]

    def is_busy(self):
        return not self.reads.are_ended

    def step(self, *, computes):
        pass

    def reset(self, *, ends_persistence):
        self.kept.clear()
        self.reads.void()

    def close(self):
        pass


TIERS = ["disk", "shared", "dict"]


def make(kind, *, slots=4, **options):
    """A leader with one lower tier. An extent of the shared tier is one block."""
    parts = {
        "disk": {"fake_disk": 32},
        "shared": {"store": FakeStore(1)},
        "dict": {"more_tiers": [DictTier]},
    }
    policy = {
        **disk_policy(writes="always", reads_always=True, batch_blocks=1),
        "shared": TierPolicy(writes="always"),
    }
    return Rig(slots=slots, blocks=32, **parts[kind], **policy, **options)


def evicted(rig, name="a", length=4):
    """A chain that has left host memory."""
    hashes = rig.fill(name, length)
    rig.settle_store()
    rig.leader.host.store.forget(hashes)
    (tier,) = rig.leader.lower_tiers
    assert tier.match(hashes, 0, length) == length
    return hashes


def damage(rig, block_hash):
    """Let the next read of this block bring other bytes."""
    if rig.disk is not None:
        (slot,) = [slot for slot, (name, _) in rig.disk.kept.items() if name == block_hash]
        rig.disk.kept[slot] = (b"other", rig.disk.kept[slot][1])
    elif rig.store is not None:
        del rig.store.kept[block_hash]
    else:
        rig.leader.lower_tiers[0].damaged.add(block_hash)


def settled(rig, steps=8):
    return rig.steps(steps)


def load(rig, hashes):
    blocks = rig.load("r", hashes)
    assert len(blocks) == len(hashes)
    assert [result.failed_block_ids for result in settled(rig)] == [()]
    assert all(map(rig.g1.holds, blocks, hashes))
    return blocks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", TIERS)
def test_blocks_of_a_lower_tier_come_back_to_g1(kind, ranks):
    rig = make(kind, ranks=ranks)
    hashes = evicted(rig)
    rig.finish("r", hashes, load(rig, hashes))
    below = rig.leader.lower_tiers[0].kind
    assert rig.leader.counters.of(below).onboard_blocks == 4
    assert rig.leader.counters.hit_rate(below) == 1.0


@pytest.mark.parametrize("kind", TIERS)
def test_a_block_that_a_lower_tier_has_damaged_is_no_hit(kind):
    rig = make(kind)
    hashes = evicted(rig)
    damage(rig, hashes[2])
    blocks = rig.load("r", hashes)
    (result,) = settled(rig)
    assert result.failed_block_ids in (tuple(blocks), tuple(blocks[2:]))
    assert all(map(rig.g1.holds, blocks[: 4 - len(result.failed_block_ids)], hashes))
    assert not rig.leader.host.store.contains(hashes[2])


@pytest.mark.parametrize("kind", TIERS)
def test_a_request_that_ends_during_a_read_leaves_no_slot_reserved(kind):
    rig = make(kind)
    hashes = evicted(rig)
    blocks = rig.load("r", hashes)
    rig.finish("r", hashes, blocks)
    assert settled(rig) == []
    assert rig.leader.blocks()[Tier.HOST]["moving"] == rig.leader.blocks()[Tier.HOST]["pinned"] == 0
    assert rig.leader.host.arriving_blocks == 0


@pytest.mark.parametrize("kind", TIERS)
def test_a_read_waits_while_host_memory_has_no_room(kind):
    rig = make(kind)
    hashes = evicted(rig)
    taken = rig.leader.host.reserve(4)
    (tier,) = rig.leader.lower_tiers
    extents = tier.extents_of(hashes, 0, 1) if kind == "shared" else ()
    assert tier.fetch(hashes[:1], b"", *extents) is None
    taken.release()
    assert tier.fetch(hashes[:1], b"", *extents) is not None


@pytest.mark.parametrize("kind", TIERS)
def test_an_engine_without_failed_loads_reads_a_lower_tier_ahead(kind):
    rig = make(kind, accepts_failed_loads=False)
    hashes = evicted(rig)
    assert rig.leader.match("r", hashes, 0) == 0
    settled(rig)
    load(rig, hashes)


@pytest.mark.parametrize("kind", TIERS)
def test_after_a_reset_a_lower_tier_gives_no_block(kind):
    rig = make(kind)
    hashes = evicted(rig)
    blocks = rig.load("r", hashes)
    rig.order()
    assert rig.leader.reset()
    results = rig.settle() + settled(rig)
    assert [result.failed_block_ids for result in results] == [tuple(blocks)]
    assert rig.leader.match("again", hashes, 0) == 0


def test_a_chain_lies_in_three_tiers_below_host_memory():
    policy = disk_policy(writes="always", reads_always=True)
    options = {"fake_disk": 2, "store": FakeStore(2), "more_tiers": [DictTier]}
    rig = Rig(slots=8, blocks=32, **policy, shared=TierPolicy(writes="always"), **options)
    disk, store, third = rig.leader.lower_tiers
    hashes = rig.fill("a", 6)
    rig.settle_store()
    del third.kept[hashes[0]]
    store.presence.erase(hashes[5])
    rig.leader.host.store.reset()
    spans = [tier.match(hashes, 0, 6) for tier in (disk, store, third)]
    assert max(spans) < 6, "no tier has all of it"
    load(rig, hashes)
