"""A third lower tier, whose blocks are in a dict: the leader uses it through LowerTier alone."""

import pytest
from bookkeeping import tier_of
from fake_store import FakeStore
from rig import Rig, chain

from kvbm.leader.lower_tier import Claim, LowerTier
from kvbm.leader.open_reads import OpenReads
from kvbm.leader.settings import DiskPolicy, SharedPolicy
from kvbm.types import Tier


class DictTier(LowerTier):
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

    def registered(self, hashes, slots, tenant):
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


def make(slots=4, **options):
    policy = DiskPolicy(to_disk="always", reads_always=True)
    return Rig(slots=slots, blocks=32, more_tiers=[DictTier], disk=policy, **options)


def evicted(rig, length=4):
    """A chain that has left host memory."""
    hashes = rig.fill("a", length)
    rig.fill("other", rig.leader._host.capacity_blocks)
    assert rig.leader._host.store.missing(hashes) == list(range(length))
    return hashes


def load(rig, hashes):
    blocks = rig.load("r", hashes)
    results = [result for _ in range(8) for result in rig.step()]
    assert [result.failed_block_ids for result in results] == [()]
    assert all(map(rig.g1.holds, blocks, hashes))
    return blocks


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_a_third_tier_come_back_to_g1(ranks):
    rig = make(ranks=ranks)
    hashes = evicted(rig)
    assert rig.leader.match("r", hashes, 0) == 4
    rig.finish("r", hashes, load(rig, hashes))
    assert rig.leader.counters.onboard_shared_blocks == 4
    assert rig.leader.counters.hits() == (0, 0, 4, 4)
    rig.close()


def test_a_block_that_a_third_tier_has_damaged_is_no_hit():
    rig = make()
    hashes = evicted(rig)
    tier_of(rig.leader, Tier.SHARED).damaged.add(hashes[2])
    blocks = rig.load("r", hashes)
    (result,) = [result for _ in range(8) for result in rig.step()]
    assert result.failed_block_ids == tuple(blocks[2:])
    assert all(map(rig.g1.holds, blocks[:2], hashes))
    rig.close()


def test_a_chain_lies_in_three_tiers_below_host_memory():
    rig = make(fake_disk=2, store=FakeStore(2), shared=SharedPolicy(to_shared="always"))
    disk, store, third = rig.leader.lower_tiers
    hashes = rig.fill("a", 6)
    rig.settle_store()
    del third.kept[hashes[0]]
    store.presence.erase(hashes[5])
    rig.leader._host.store.reset()
    spans = [tier.match(hashes, 0, 6) for tier in (disk, store, third)]
    assert max(spans) < 6, "no tier has all of it"
    load(rig, hashes)
    rig.close()


def test_an_engine_without_failed_loads_reads_a_third_tier_ahead():
    rig = make(accepts_failed_loads=False)
    hashes = evicted(rig)
    assert rig.leader.match("r", hashes, 0) == 0
    for _ in range(4):
        rig.step()
    load(rig, hashes)
    rig.close()


def test_after_a_reset_a_third_tier_gives_no_block():
    rig = make()
    hashes = evicted(rig)
    blocks = rig.load("r", hashes)
    rig.order()
    assert rig.leader.reset()
    (result,) = rig.settle()
    assert result.failed_block_ids == tuple(blocks)
    assert rig.leader.match("again", chain("a", 4), 0) == 0
    rig.close()
