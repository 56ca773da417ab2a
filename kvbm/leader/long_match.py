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

from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.core.blocks import PinnedBlocks
    from kvbm.core.store import BlockStore

FIRST_LOOK = 256  # blocks: spans are often short where a chain is in both tiers


class LongMatch:
    """The blocks of one chain from `start` on that were found so far. `on_disk` is None if the request may not read
    from disk. It ends with `take`."""

    def __init__(self, start: int, in_host: BlockStore, on_disk: BlockStore | None) -> None:
        self.start = self.position = start
        self.handles: list[tuple[bool, PinnedBlocks]] = []  # (is it on disk, blocks), in the order of the chain
        self.on_disk = on_disk
        self._in_host = in_host
        self._losses = self._count_losses()

    def is_for(self, start: int, on_disk: BlockStore | None) -> bool:
        """Whether it fits this call."""
        return self.start == start and self.on_disk is on_disk and self.is_valid()

    def is_valid(self) -> bool:
        """Whether no block was forgotten since it began."""
        return self._losses == self._count_losses()

    def advance(self, hashes: Sequence[bytes], end: int, limit_blocks: int) -> bool:
        """Examine at most `limit_blocks` more of `hashes[:end]`; return whether the match is complete."""
        limit = min(end, self.position + limit_blocks)
        while self.position < limit:
            before = self.position
            self._pin(self._in_host, hashes, limit)
            if self.on_disk is not None:
                self._pin(self.on_disk, hashes, limit)
            if self.position == before:
                return True
        return self.position >= end or not self._is_present(hashes[self.position])

    def spans(self) -> list[tuple[Tier, int]]:
        """Return (where, block count) of each part, in the order of the chain."""
        return [(Tier.DISK if is_on_disk else Tier.HOST, len(blocks.slots)) for is_on_disk, blocks in self.handles]

    def take(self) -> list[tuple[bool, PinnedBlocks]]:
        """Consumes. The caller owns the handles."""
        handles, self.handles = self.handles, []
        return handles

    def _pin(self, store: BlockStore, hashes: Sequence[bytes], limit: int) -> None:
        """Pin the next span that is in this store."""
        for end in (min(limit, self.position + FIRST_LOOK), limit):
            if self.position < end and store.contains(hashes[self.position]):
                blocks = store.pin_prefix(hashes[self.position : end])
                self.handles.append((store is self.on_disk, blocks))
                self.position += len(blocks.slots)

    def _is_present(self, sequence_hash: bytes) -> bool:
        return self._in_host.contains(sequence_hash) or (
            self.on_disk is not None and self.on_disk.contains(sequence_hash)
        )

    def _count_losses(self) -> int:
        return self._in_host.losses + (0 if self.on_disk is None else self.on_disk.losses)
