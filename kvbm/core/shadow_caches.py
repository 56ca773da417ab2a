"""Shadow caches: block stores without bytes, which show the hit rate of caches that do not exist.

A request looks for its chain, uses the blocks that are there, and keeps the others as far as the store has room for
them. The blocks of a running request are held. There is no device memory above the cache, and transfers take no time.

`SimulatedCache` is one of them; `kvbm plan --trace` simulates traces with it. `ShadowCaches` are several of them, with
other sizes and other evictions than the host memory of a running engine. They get only blocks whose hash is below a
limit, so that all of them together have at most TRACKED_BLOCKS places. A chain is evicted from its tail, so its sampled
blocks are, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbm.core.policies.table import POLICIES
from kvbm.core.store import BlockStore
from kvbm.types import Tier

NAME_BYTES = 8  # of a block in these stores
TRACKED_BLOCKS = 32_768
EVICTIONS = tuple(POLICIES)
LRU, ADAPTIVE = "lru", "adaptive"
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the shadow caches, as multiples of the size of the cache that exists
KEPT = 1 - 1 / 5000  # weight of what was before a request: a request counts half as much after 3500 others


class SimulatedCache:
    """A store without bytes. `hit_blocks` of `asked_blocks` were found."""

    def __init__(self, capacity_blocks: int, eviction: str) -> None:
        self.store = BlockStore(capacity_blocks, tier=Tier.HOST, hash_bytes=NAME_BYTES, events=False, eviction=eviction)
        self.hit_blocks = self.asked_blocks = 0

    def use(self, at_s: float, chain: Sequence[bytes], *, asked: int) -> None:
        """Serve a request whose prompt has the first `asked` blocks of `chain`; it leaves all of them."""
        store = self.store
        arrival = store.arrive(chain, at_s)
        marks = b"" if arrival is None else arrival.marks(0, len(chain))
        with store.pin_prefix(chain) as held:
            self.hit_blocks += min(asked, len(held.slots))
            self.asked_blocks += asked
            store.touch(chain, marks)
            self._keep(chain, marks)
        store.touch(chain)

    def _keep(self, chain: Sequence[bytes], marks: bytes) -> None:
        store = self.store
        missing = store.missing(chain)
        of_missing = bytes(map(marks.__getitem__, missing)) if marks else bytes(len(missing))
        kept = missing[: store.room(of_missing)]
        target = store.allocate(len(kept))
        assert target is not None, (len(kept), store.counts())
        blocks = target.register([chain[at] for at in kept], of_missing[: len(kept)] if marks else b"")
        blocks.release()


class ShadowCaches:
    """Caches of all SIZES and EVICTIONS, for the requests of one with `capacity_blocks`."""

    def __init__(self, capacity_blocks: int) -> None:
        self._share = min(1.0, TRACKED_BLOCKS / (sum(SIZES) * len(EVICTIONS) * max(1, capacity_blocks)))
        self._limit = min((1 << 64) - 1, int(self._share * (1 << 64))).to_bytes(NAME_BYTES, "big")
        self._caches = {
            (eviction, size): SimulatedCache(max(1, round(capacity_blocks * size * self._share)), eviction)
            for eviction in EVICTIONS
            for size in SIZES
        }
        self._misses = dict.fromkeys(self._caches, 0.0)
        self._asked_blocks = 0.0

    def use(self, at_s: float, chain: Sequence[bytes], *, asked: int) -> Iterator[None]:
        """Serve a request, in pieces: yields after each cache. `chain` are the hashes of its blocks."""
        names = [block[:NAME_BYTES] for block in chain]
        limit = self._limit
        sampled = [name for name in names if name <= limit]
        sampled_asked = sum(name <= limit for name in names[:asked])
        self._asked_blocks = KEPT * self._asked_blocks + asked
        for key, cache in self._caches.items():
            before = cache.hit_blocks
            if sampled:
                cache.use(at_s, sampled, asked=sampled_asked)
            self._misses[key] = KEPT * self._misses[key] + sampled_asked - (cache.hit_blocks - before)
            yield

    def hit_rates(self) -> dict[tuple[str, float], float]:
        """Return the hit rate by eviction and size, of the last requests; empty before the first one.

        The misses are counted and the uses are known: a block that nearly all requests use has few misses, whether it
        is in the sample or not, but many hits.
        """
        asked = self._share * self._asked_blocks
        return {key: max(0.0, 1 - misses / asked) for key, misses in self._misses.items()} if asked else {}
