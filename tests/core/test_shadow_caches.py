"""Shadow caches of other sizes: what they find is what caches of these sizes find."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from kvbm.core import shadow_caches
from kvbm.core.shadow_caches import ADAPTIVE, EVICTIONS, LRU, SIZES, TRACKED_BLOCKS, ShadowCaches, SimulatedCache

CAPACITY = 400


def chain(document: int, length: int) -> list[bytes]:
    return [blake2b(f"{document}/{block}".encode(), digest_size=16).digest() for block in range(length)]


def workload(requests: int, documents: int, seed: int = 1, first: int = 0) -> list[tuple[list[bytes], int]]:
    """(all blocks, how many of them are the prompt): few documents are popular."""
    choice = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(documents)]
    found = []
    for document in choice.choices(range(first, first + documents), weights, k=requests):
        length = choice.randrange(10, 40)
        found.append((chain(document, length + 2), length))
    return found


def drive(caches: ShadowCaches, requests: list[tuple[list[bytes], int]]) -> None:
    for number, (blocks, asked) in enumerate(requests):
        for _ in caches.use(float(number), blocks, asked=asked):
            pass


def exact(capacity: int, eviction: str, requests: list[tuple[list[bytes], int]]) -> float:
    cache = SimulatedCache(capacity, eviction)
    for number, (blocks, asked) in enumerate(requests):
        cache.use(float(number), [block[:8] for block in blocks], asked=asked)
    return cache.hit_blocks / cache.asked_blocks


@pytest.fixture
def no_decay(monkeypatch):
    monkeypatch.setattr(shadow_caches, "KEPT", 1.0)


def test_without_a_sample_each_rate_is_that_of_a_cache_of_its_size(no_decay):
    requests = workload(600, 300)
    caches = ShadowCaches(CAPACITY)
    drive(caches, requests)
    rates = caches.hit_rates()
    assert set(rates) == {(eviction, size) for eviction in EVICTIONS for size in SIZES}
    for (eviction, size), rate in rates.items():
        assert rate == pytest.approx(exact(round(size * CAPACITY), eviction, requests))
    for eviction in (LRU, ADAPTIVE):
        assert rates[eviction, 0.25] < rates[eviction, 1.0] < rates[eviction, 4.0]


def test_a_sample_is_close_and_bounded(no_decay, monkeypatch):
    requests = workload(3000, 900)
    exact_rates = {size: exact(round(size * 6000), LRU, requests) for size in SIZES}
    monkeypatch.setattr(shadow_caches, "TRACKED_BLOCKS", 32_000)
    caches = ShadowCaches(6000)
    drive(caches, requests)
    places = sum(cache.store.capacity_blocks for cache in caches._caches.values())
    assert places <= 32_000 + len(SIZES) * len(EVICTIONS)
    for size, rate in exact_rates.items():
        assert caches.hit_rates()[LRU, size] == pytest.approx(rate, abs=0.05)


def test_the_places_do_not_grow_with_the_cache():
    for capacity in (0, 1, 10_000, 4_000_000):
        caches = ShadowCaches(capacity)
        places = sum(cache.store.capacity_blocks for cache in caches._caches.values())
        assert places <= TRACKED_BLOCKS + len(SIZES) * len(EVICTIONS)


def test_a_new_workload_replaces_the_old_rates(monkeypatch):
    monkeypatch.setattr(shadow_caches, "KEPT", 0.99)
    caches = ShadowCaches(CAPACITY)
    drive(caches, workload(600, 10))
    assert caches.hit_rates()[LRU, 1.0] > 0.8
    drive(caches, [(chain(1000 + number, 30), 30) for number in range(600)])
    assert caches.hit_rates()[LRU, 1.0] < 0.05


def test_there_are_no_rates_before_the_first_request():
    caches = ShadowCaches(CAPACITY)
    assert caches.hit_rates() == {}
    drive(caches, [([], 0)])
    assert caches.hit_rates() == {}
