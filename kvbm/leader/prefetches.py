"""Prefetches: reads blocks of lower tiers into host memory before they are promised to a request.

An engine that accepts no failed load is promised blocks in host memory only, because a read can fail. With such an
engine, a block in a lower tier is useful once it has been read ahead and verified:

    warm    at the start: the blocks that an earlier engine used last, from disk into free slots
    want    a lookup found these blocks in a lower tier only; a repeated request, or another one with the same prefix,
            finds them in host memory

What has been read stays in host memory, unpinned: Onboards releases what no load waits for. A read that fails costs a
hit only. The leader's thread owns it. Nothing here waits, except `warm`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvbm.tiers.lower_tier import AskedTier, OwnedTier

if TYPE_CHECKING:
    from kvbm.tiers.lower_tier import LowerTier, TierContext
    from kvbm.tiers.open_reads import Extent, Fetch

READS_AT_A_TIME = 4
SHARES_OF_G2 = 4  # one read takes at most this share of host memory
WARM_S = 10.0  # the start of an engine waits no longer for its first reads
POLL_S = 0.001

log = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """Blocks of one tenant, None if it is unknown, that are read at once. `extent` is what holds them."""

    hashes: tuple[bytes, ...]
    tenant: bytes | None
    extent: Extent | None = None


class Prefetches:
    def __init__(self, context: TierContext, tiers: Sequence[LowerTier]) -> None:
        self._host = context.host
        self._tiers = tiers
        self._clock = context.callbacks.clock
        self._size = max(1, min(context.settings.batch_blocks, self._host.capacity_blocks // SHARES_OF_G2))
        self._wanted: defaultdict[LowerTier, deque[_Wanted]] = defaultdict(deque)  # oldest first
        self._queued: set[bytes] = set()  # hashes, or names of extents, until their read has ended
        self._open: dict[Fetch, tuple[LowerTier, Sequence[bytes]]] = {}  # with what it takes from `_queued`

    def want(
        self, tier: LowerTier, hashes: Sequence[bytes], tenant: bytes | None, extents: Sequence[Extent] = ()
    ) -> None:
        """Queue blocks of a tenant, None if it is unknown. Beyond the capacity of host memory, blocks are dropped."""
        names = [extent.name for extent in extents] or hashes
        room = max(0, self._host.capacity_blocks - len(self._queued))
        fresh = [one for one in names if one not in self._queued][:room]
        self._queued.update(fresh)
        if extents:
            chosen = set(fresh)
            self._wanted[tier] += (_Wanted(one.hashes, tenant, one) for one in extents if one.name in chosen)
            return
        batches = (tuple(fresh[at : at + self._size]) for at in range(0, len(fresh), self._size))
        self._wanted[tier] += (_Wanted(batch, tenant) for batch in batches)

    def want_chain(self, hashes: Sequence[bytes], at: int, end: int, tenant: bytes) -> None:
        """Queue the blocks of `hashes[at:end]` that are in a lower tier, up to the first one that is in no tier."""
        chain = hashes[:end]
        while self._tiers and at < end:
            for tier in self._tiers:
                if count := tier.match(hashes, at, end):
                    extents = tier.extents_of(hashes, at, at + count) if isinstance(tier, AskedTier) else ()
                    self.want(tier, hashes[at : at + count], tenant, extents)
                    break
            else:
                if not (count := self._host.store.match(chain, at)):
                    return
            at += count

    def has_work(self) -> bool:
        """Whether a read is due or in flight, in a tier that is on."""
        return any(tier.is_on for tier, _ in self._open.values()) or any(
            wanted and tier.is_on for tier, wanted in self._wanted.items()
        )

    def step(self) -> None:
        """Start the next reads. Blocks that have arrived meanwhile, or have left their tier, are not read."""
        if not self._open and not self._wanted:
            return
        for ended in [one for one in self._open if one.has_ended]:
            self._queued.difference_update(self._open.pop(ended)[1])
        for tier, wanted in self._wanted.items():
            while wanted and len(self._open) < READS_AT_A_TIME and tier.reads.has_room(len(wanted[0].hashes)):
                hashes, tenant, extent = wanted.popleft()
                names = hashes if extent is None else (extent.name,)
                due = [hashes[index] for index in self._host.store.missing(hashes)]
                if extent is None:
                    due = [one for one in due if tier.contains(one)]
                if due and not tier.has_lost(due, extent) and (fetch := tier.fetch(due, tenant, extent)) is not None:
                    self._open[fetch] = tier, names
                else:
                    self._queued.difference_update(names)

    def reset(self) -> None:
        self._wanted.clear()
        self._queued.clear()

    def warm(self) -> None:
        """Read the blocks that were used last into the free slots, for at most WARM_S; later steps continue."""
        for tier in self._tiers:
            if isinstance(tier, OwnedTier):
                self._warm(tier)

    def _warm(self, tier: OwnedTier) -> None:
        newest = tier.store.oldest(tier.store.counts().inactive)[::-1][: self._host.store.free]
        if not newest:
            return
        began_s = self._clock()
        self.want(tier, newest[::-1], None)
        while (self._wanted[tier] or self._open) and tier.is_on and self._clock() - began_s < WARM_S:
            self.step()
            time.sleep(POLL_S)
            for fetch in tier.settle():
                if fetch.blocks is not None:
                    fetch.blocks.release()
        held = len(newest) - len(self._host.store.missing(newest))
        log.info("kvbm: read %d of %d blocks from disk into host memory before the start", held, len(newest))
