"""A third policy is one module and one row of POLICIES: here, blocks leave in the order in which they were stored."""

from typing import get_args

import pytest

from kvbm.config.schema import DiskTierSection, HostTierSection
from kvbm.core.policies.lru import LeastRecent
from kvbm.core.policies.policy import Policy
from kvbm.core.policies.table import POLICIES
from kvbm.core.shadow_caches import SimulatedCache
from kvbm.core.store import BlockStore
from kvbm.types import Tier


class FirstStored(LeastRecent):
    def __init__(self, slot_count):
        super().__init__(slot_count)
        self._stored = [0] * slot_count
        self._count = 0

    def mark(self, slots, marks):
        for slot in slots:
            self._count += 1
            self._stored[slot] = self._count

    def first(self, count):
        return sorted(self.lists.walk(self.lists.inactive), key=self._stored.__getitem__)[:count]

    def take(self, count):
        taken = self.first(count)
        for slot in taken:
            self.lists.remove([slot])
        return taken


class Fifo(Policy):
    def __init__(self, capacity_blocks):
        self.order = FirstStored(capacity_blocks)


@pytest.fixture(autouse=True)
def _row(monkeypatch):
    monkeypatch.setitem(POLICIES, "fifo", Fifo)


def stored(store, name):
    store.allocate(1).register((name,)).release()


@pytest.mark.parametrize(("eviction", "left"), [("lru", b"b"), ("fifo", b"a")])
def test_a_store_evicts_by_the_name_of_its_policy(eviction, left):
    store = BlockStore(2, tier=Tier.HOST, hash_bytes=1, eviction=eviction)
    stored(store, b"a")
    stored(store, b"b")
    store.touch([b"a"])
    stored(store, b"c")
    assert [name for name in (b"a", b"b") if not store.contains(name)] == [left]
    store.check(0, 2)


def test_a_simulated_cache_takes_it_too():
    hits = {}
    for eviction in ("lru", "fifo"):
        cache = SimulatedCache(2, eviction)
        for name in "abacabac":
            cache.use(0.0, [name.encode() * 8], asked=1)
        hits[eviction] = cache.hit_blocks
    assert hits["fifo"] < hits["lru"]


@pytest.mark.parametrize("section", [HostTierSection, DiskTierSection])
def test_profiles_know_the_name_of_every_policy(section):
    named = get_args(section.model_fields["eviction"].annotation)
    assert set(named) == POLICIES.keys() - {"fifo"}
