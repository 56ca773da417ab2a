"""LongMatch: the match of a chain with more blocks than one slice, made over several calls.

Each call handles one slice. What it finds stays pinned, in host memory and on disk, so that a later call continues
where the last one ended. When the match is complete, each further call costs the same, however long the chain is: the
pinned blocks cannot leave the cache, and only the first missing block is looked up again.

    |<-- pinned: spans in host memory and on disk -->|<-- not examined, or missing -->|
    start                                         position                           end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.core.blocks import PinnedBlocks
    from kvbm.core.store import BlockStore
    from kvbm.types import Tier

FIRST_LOOK = 256  # blocks: spans are often short where a chain is in both tiers


class LongMatch:
    """The blocks of one chain from `start` on that were found so far in the `stores`, the nearest one first. It ends
    with `take`."""

    def __init__(self, start: int, stores: Sequence[BlockStore]) -> None:
        self.start = self.position = start
        self.stores = tuple(stores)
        self.handles: list[tuple[BlockStore, PinnedBlocks]] = []  # in the order of the chain
        self._losses = self._count_losses()

    def is_for(self, start: int, stores: Sequence[BlockStore]) -> bool:
        """Whether it fits this call."""
        return self.start == start and self.stores == tuple(stores) and self.is_valid()

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
