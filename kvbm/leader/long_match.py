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


class LongMatch:
    """The blocks of one chain from `start` on that were found so far. `on_disk` is None if the request may not read
    from disk. It ends with `take`."""

    def __init__(self, start: int, in_host: BlockStore, on_disk: BlockStore | None, *, slice_blocks: int) -> None:
        self._slice_blocks = slice_blocks
        self.start = self.position = start
        self.handles: list[tuple[bool, PinnedBlocks]] = []  # (is it on disk, blocks), in the order of the chain
        self._in_host = in_host
        self._on_disk = on_disk
        self._losses = self._count_losses()

    def is_for(self, start: int, on_disk: BlockStore | None) -> bool:
        """Whether it fits this call."""
        return self.start == start and self._on_disk is on_disk and self.is_valid()

    def is_valid(self) -> bool:
        """Whether no block was forgotten since it began."""
        return self._losses == self._count_losses()

    def advance(self, hashes: Sequence[bytes], end: int) -> bool:
        """Examine the next slice of `hashes[:end]`; return whether the match is complete."""
        limit = min(end, self.position + self._slice_blocks)
        while self.position < limit:
            before = self.position
            self._pin(self._in_host, hashes, limit)
            if self._on_disk is not None:
                self._pin(self._on_disk, hashes, limit)
            if self.position == before:
                return True
        return self.position >= end

    def spans(self) -> list[tuple[bool, int]]:
        """Return (is it on disk, block count) of each part, in the order of the chain."""
        return [(is_on_disk, len(blocks.slots)) for is_on_disk, blocks in self.handles]

    def take(self) -> list[tuple[bool, PinnedBlocks]]:
        """Consumes. The caller owns the handles."""
        handles, self.handles = self.handles, []
        return handles

    def _pin(self, store: BlockStore, hashes: Sequence[bytes], limit: int) -> None:
        if self.position < limit and store.contains(hashes[self.position]):
            blocks = store.pin_prefix(hashes[self.position : limit])
            self.handles.append((store is self._on_disk, blocks))
            self.position += len(blocks.slots)

    def _count_losses(self) -> int:
        return self._in_host.losses + (0 if self._on_disk is None else self._on_disk.losses)
