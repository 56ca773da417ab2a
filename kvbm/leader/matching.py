"""Matching: how much of a chain a request can load now, in any tier. Starts nothing, except what is read ahead.

A lookup walks along a chain: through host memory, and where that lacks a block, through the lower tiers. A long chain
is examined in slices over several steps (long_chains.py). An engine that accepts no failed load is promised blocks in
host memory only, which stay pinned until it loads them (prefetches.py reads the others ahead).

The leader's thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm.core.groups import StateGroup, longest_hit, needed_blocks
from kvbm.leader.long_chains import LongMatches, Slices
from kvbm.tiers.lower_tier import AskedTier, OwnedTier
from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.leader.onboards import Onboards
    from kvbm.leader.prefetches import Prefetches
    from kvbm.leader.request import LiveRequest
    from kvbm.tiers.lower_tier import LowerTier, TierContext


@dataclass(slots=True)
class _Search:
    """A lookup of `hashes[start:end]` in host memory and in these tiers. `spans` have been found, up to `at`."""

    request: LiveRequest
    hashes: Sequence[bytes]
    at: int
    end: int
    tiers: Sequence[LowerTier]
    spans: list[tuple[Tier, int]] = field(default_factory=list)

    def add(self, kind: Tier, count: int) -> bool:
        """Add a span; False if it is empty."""
        if count:
            self.spans.append((kind, count))
            self.at += count
        return count > 0

    def count_of(self, kind: Tier) -> int:
        return sum(count for where, count in self.spans if where is kind)


class Matching:
    def __init__(
        self,
        context: TierContext,
        tiers: Sequence[LowerTier],
        slices: Slices,
        onboards: Onboards,
        prefetches: Prefetches,
    ) -> None:
        self._host = context.host
        self._rates = context.rates
        self._counters = context.counters
        self._accepts_failed_loads = context.settings.traits.accepts_failed_loads
        self._groups = groups = context.settings.groups
        self._with_kv = [index for index, group in enumerate(groups) if not isinstance(group, StateGroup)]
        self._unit = math.lcm(*(group.block_tokens for group in groups))  # a hit ends at a multiple of it
        self._tiers = tiers
        self._slices = slices
        self._onboards = onboards
        self._prefetches = prefetches
        self.long_matches = LongMatches(context.host, tiers, slices)
        self._promises = 0  # requests with a promise: each needs a lane

    def match(self, request: LiveRequest, hashes: Sequence[bytes], start: int, end: int) -> int | None:
        """Return how many blocks of `hashes[start:end]` can be loaded now. None: ask again at the next step."""

        def search(tiers: Sequence[LowerTier]) -> int | None:
            found = _Search(request, hashes, start, end, tiers)
            if self._accepts_failed_loads and self.long_matches.may_match(request, end - start):
                long_match = self.long_matches.advance(request, hashes, start, end, tiers)
                if long_match is None:
                    return None
                for kind, count in long_match.spans():
                    found.add(kind, count)
            else:
                self.long_matches.end(request.request_id)
            return self._match_further(found)

        first = hashes[start] if start < end else None
        blocks = self._match(request, first, end - start, lambda: hashes[:start], search)
        if not self._accepts_failed_loads:
            promised = start + (blocks or 0)
            self._promise(request, hashes[start:promised])
            if not self._counters.disabled:
                self._prefetches.want_chain(hashes, promised, end, request.tenant)  # for a later request
        return blocks

    def match_groups(self, request: LiveRequest, chains: Sequence[Sequence[bytes]], start: int, end: int) -> int | None:
        """Return how many tokens from `start` to `end` can be loaded now, in all KV cache groups."""

        def search(tiers: Sequence[LowerTier]) -> int:
            def is_present(sequence_hash: bytes) -> bool:
                return self._host.store.contains(sequence_hash) or any(tier.contains(sequence_hash) for tier in tiers)

            if len(self._with_kv) in (0, len(self._groups)):
                return longest_hit(is_present, self._groups, chains, start=start, end=end) - start
            groups, with_kv = [self._groups[i] for i in self._with_kv], [chains[i] for i in self._with_kv]
            reach = longest_hit(is_present, groups, with_kv, start=start, end=end)
            hit = longest_hit(is_present, self._groups, chains, start=start, end=reach)
            request.lost_state_tokens = max(0, reach // self._unit * self._unit - hit)
            return hit - start

        request.lost_state_tokens = 0  # a retry after a failed load searches for nothing
        begin, count = start // self._groups[0].block_tokens, len(chains[0])
        first = chains[0][begin] if begin < count else None
        return self._match(request, first, count - begin, lambda: needed_blocks(self._groups, chains, start), search)

    def end(self, request: LiveRequest) -> None:
        """Release what was promised to a request."""
        if request.promised is not None:
            request.promised.release()
            request.promised = None
            self._promises -= 1
        self.long_matches.end(request.request_id)

    def _match(
        self,
        request: LiveRequest,
        first: bytes | None,
        count: int,
        local: Callable[[], Sequence[bytes]],
        search: Callable[[Sequence[LowerTier]], int | None],
    ) -> int | None:
        """Return what `search` finds, 0 if the request may not load, None if it waits for another one's load of the
        `first` of `count` blocks. `local` returns the blocks of all groups that it uses in G1."""
        in_device = local() if self._tiers and not request.has_probed else ()
        for tier in self._tiers:
            if self._accepts_failed_loads:  # else the next step refreshes
                tier.refresh()
            self._slices.run(tier.hit, in_device)
        request.has_probed = True
        request.probed_blocks = max(request.probed_blocks, count)
        if not request.may_onboard or self._counters.disabled or not self._onboards.can_begin(self._promises):
            self.long_matches.end(request.request_id)
            return 0
        arriving = self._onboards.arriving.get(first) if first and self._accepts_failed_loads else None
        if arriving is not None and request.awaited in (None, arriving):
            request.is_waiting, request.awaited = True, arriving
            return None
        if request.is_waiting:
            request.is_waiting = False
            request.may_read_lower &= request.awaited is None or not request.awaited.is_given_up  # waited long enough
            self._counters.onboard_shared_requests += 1
        request.extents = {}
        may_read_lower = request.may_read_lower and self._accepts_failed_loads
        return search(self._tiers if may_read_lower else ())

    def _match_further(self, found: _Search) -> int | None:
        """Return how many blocks to load, after what has been found. None: ask again.

        A chain may be in several tiers in turn.
        """
        hashes, end = found.hashes, found.end
        examined = hashes if end == len(hashes) or found.spans else hashes[:end]
        while found.at < end:
            count = min(self._host.store.match(examined, found.at), end - found.at)
            if not found.add(Tier.HOST, count) and not any(self._find_in(tier, found) for tier in found.tiers):
                break
        if found.at < end and any(
            isinstance(tier, AskedTier) and tier.must_wait(found.request.request_id, hashes, found.at, end)
            for tier in found.tiers
        ):
            return None
        return self._rates.worthwhile(found.spans)

    def _find_in(self, tier: LowerTier, found: _Search) -> bool:
        """Add the span that is in this tier. One that cannot pin blocks gives at most a slice to one request."""
        at = found.at
        limit = found.end
        if not isinstance(tier, OwnedTier):
            limit = min(limit, at + self._slices.size - found.count_of(tier.kind))
        count = tier.match(found.hashes, at, limit)
        if count and isinstance(tier, AskedTier):
            found.request.extents.setdefault(tier, []).extend(tier.extents_of(found.hashes, at, at + count))
        return found.add(tier.kind, count)

    def _promise(self, request: LiveRequest, hashes: Sequence[bytes]) -> None:
        """Pin the blocks that `match` promises, in place of those that it promised before."""
        self.end(request)
        if hashes:
            request.promised = self._host.store.pin(hashes)
            assert request.promised is not None, "blocks that were just found can be pinned"
            self._promises += 1
            self._host.labels.own(request.promised.slots, request.tenant)
            for listener in self._host.listeners:
                listener.adopt(hashes)
