"""Long chains of blocks, handled in parts over several engine steps: Slices of any work, and LongMatches.

A request of a million tokens has 62,500 blocks. Work on all of them at once would stop all other requests for tens of
milliseconds. So a chain of more than `settings.slice_blocks` blocks is handled one slice per step: the match, the
copies of a load, the first offload, and what happens at the end of a request. Shorter chains are handled at once.

What a call of a match finds stays pinned, in host memory and on disk, so that a later call continues where the last one
ended. When the match is complete, each further call costs the same, however long the chain is: the pinned blocks cannot
leave the cache, and only the first missing block is looked up again.

    |<-- pinned: spans in host memory and on disk -->|<-- not examined, or missing -->|
    start                                         position                           end

LongMatches knows how much all of them pin, and when they end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from kvbm.tiers.lower_tier import OwnedTier

if TYPE_CHECKING:
    from kvbm.core.store import BlockStore, PinnedBlocks
    from kvbm.leader.request import LiveRequest
    from kvbm.tiers.host_tier import HostTier
    from kvbm.tiers.lower_tier import LowerTier
    from kvbm.types import Tier

LARGE_BACKLOG = 64  # entries; with each of so many more, a step does the work of one slice more
PINNED_SHARE = 0.75  # of host memory that several matches may pin together
RESTARTS = 2  # of a match; then the whole chain is examined in each call
FIRST_LOOK = 256  # blocks: spans are often short where a chain is in both tiers


class Slices:
    """Work that may be done in a later step. `size` is the number of blocks of a slice. The leader's thread owns it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()  # (blocks, action)
        self._releases: deque[PinnedBlocks] = deque()

    def run(
        self, action: Callable[[Sequence[bytes]], object], hashes: Sequence[bytes], *, order: Literal[1, -1] = -1
    ) -> None:
        """Call `action` with `hashes`, in slices over the next steps if there are many. The tail comes first; with the
        `order` 1, the head."""
        if len(hashes) <= self.size:
            action(hashes)
            return
        for begin in range(0, len(hashes), self.size)[::order]:
            part = hashes[begin : begin + self.size]
            self._waiting.append((len(part), partial(action, part)))

    def release(self, blocks: PinnedBlocks) -> None:
        """Unpin blocks in a later step."""
        self._releases.append(blocks)

    def has_work(self) -> bool:
        """Whether something is left to do."""
        return bool(self._releases or self._waiting)

    def step(self) -> None:
        """Do the work on about one slice of blocks; releases come first, because others may need the room."""
        backlog = len(self._releases) + len(self._waiting)
        left = self.size * (1 + backlog // LARGE_BACKLOG)
        while self._releases and left > 0:
            blocks = self._releases.popleft()
            left -= len(blocks.slots)
            blocks.release()
        while self._waiting and left > 0:
            count, action = self._waiting.popleft()
            left -= count
            action()


class LongMatch:
    """The blocks of one chain from `start` on that were found so far in the `stores`, the nearest one first. It ends
    with `take`."""

    def __init__(self, start: int, stores: tuple[BlockStore, ...]) -> None:
        self.start = self.position = start
        self.stores = stores
        self.handles: list[tuple[BlockStore, PinnedBlocks]] = []  # in the order of the chain
        self._losses = self._count_losses()

    def is_valid(self) -> bool:
        """Whether no block was forgotten since it began."""
        return self._losses == self._count_losses()

    def advance(self, hashes: Sequence[bytes], end: int, limit_blocks: int) -> bool:
        """Examine at most `limit_blocks` more of `hashes[:end]`; return whether the match is complete."""
        limit = min(end, self.position + limit_blocks)
        while self.position < limit:
            before = self.position
            for store in self.stores:
                self._pin(store, hashes, limit)
            if self.position == before:
                return True
        return self.position >= end or not any(store.contains(hashes[self.position]) for store in self.stores)

    def spans(self) -> list[tuple[Tier, int]]:
        """Return (where, block count) of each part, in the order of the chain."""
        return [(store.tier, len(blocks.slots)) for store, blocks in self.handles]

    def take(self) -> list[tuple[BlockStore, PinnedBlocks]]:
        """Consumes. The caller owns the handles."""
        handles, self.handles = self.handles, []
        return handles

    def _pin(self, store: BlockStore, hashes: Sequence[bytes], limit: int) -> None:
        """Pin the next span that is in this store."""
        for end in (min(limit, self.position + FIRST_LOOK), limit):
            if self.position < end and store.contains(hashes[self.position]):
                blocks = store.pin_prefix(hashes[self.position : end])
                self.handles.append((store, blocks))
                self.position += len(blocks.slots)

    def _count_losses(self) -> int:
        return sum(store.losses for store in self.stores)


class LongMatches:
    """The long matches of all requests. In one step they examine one slice together. The leader's thread owns it."""

    def __init__(self, host: HostTier, tiers: Sequence[LowerTier], slices: Slices) -> None:
        self._host = host
        self._owned = [tier for tier in tiers if isinstance(tier, OwnedTier)]
        self._slices = slices
        self._unexamined = slices.size  # blocks that may be examined in this step
        self._matches: dict[str, LongMatch] = {}  # by request id

    def may_match(self, request: LiveRequest, blocks: int) -> bool:
        """Whether a match of so many blocks is made in slices, with pins.

        Not for a request whose match had to begin again twice, because its hit in G1 moves or blocks are being
        forgotten: it would wait for ever. And not if the matches of several requests would pin most of G2.
        """
        if blocks <= self._slices.size:
            return False
        if self._matches and request.request_id not in self._matches:
            pinned = sum(other.position - other.start for other in self._matches.values())
            if pinned + blocks > self._host.capacity_blocks * PINNED_SHARE:
                return False
        return request.match_restarts <= RESTARTS

    def advance(
        self, request: LiveRequest, hashes: Sequence[bytes], start: int, end: int, tiers: Sequence[LowerTier]
    ) -> LongMatch | None:
        """Examine the next slice of `hashes[start:end]` in host memory and in these tiers; return the match if it is
        complete."""
        owned = (tier for tier in tiers if tier.is_on and isinstance(tier, OwnedTier))
        stores = (self._host.store, *(tier.store for tier in owned))
        found = self._matches.get(request.request_id)
        if found is None or (found.start, found.stores) != (start, stores) or not found.is_valid():
            request.match_restarts += found is not None
            self.end(request.request_id)
            found = self._matches[request.request_id] = LongMatch(start, stores)
        before = found.position
        is_complete = found.advance(hashes, end, self._unexamined)
        self._unexamined -= found.position - before
        if is_complete and found.position == start:
            self.end(request.request_id)
        return found if is_complete else None

    def take(self, request_id: str) -> LongMatch | None:
        """Return the match of a request, which ends here; the caller owns its handles."""
        return self._matches.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Unpin what was found for a request."""
        if (found := self.take(request_id)) is not None:
            for _, blocks in found.take():
                self._slices.release(blocks)

    def step(self) -> None:
        """Begin a step. If a tier is off, its next process begins when no block of the last one is pinned."""
        self._unexamined = self._slices.size
        if self._matches:
            off = {tier.store for tier in self._owned if not tier.is_on}
            for request_id, found in list(self._matches.items()):
                if not off.isdisjoint(found.stores):
                    self.end(request_id)
