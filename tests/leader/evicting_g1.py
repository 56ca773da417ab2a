"""The toy engine with a prefix cache in G1: blocks keep their bytes until they are evicted, the least recently used one
first. As in vLLM, the blocks of a request are released tail first, and a hit takes them out of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rig import G1, GARBAGE, PIECE_BYTES


@dataclass(frozen=True)
class Content:
    """What a block has since the engine filled it. A block that is filled again with the same gets an equal one."""

    name: bytes


class EvictingG1(G1):
    def __init__(self, block_count: int, rank_count: int, replicas: int = 1) -> None:
        super().__init__(block_count, rank_count, replicas)
        self.evictions = self
        self.queue = list(range(block_count))
        self.contents: dict[int, Content] = {}
        self.evicted: list[bytes] = []

    def allocate(self, count: int) -> list[int] | None:
        if len(self.queue) < count:
            return None
        taken = self.queue[:count]
        for block in taken:
            if (content := self.contents.pop(block, None)) is not None:
                self.evicted.append(content.name)
            self._fill(block, lambda rank, piece: np.full(PIECE_BYTES, GARBAGE, dtype=np.uint8))
        self.use(taken)
        return taken

    def use(self, block_ids: Sequence[int]) -> None:
        """Count a reference of a request."""
        for block in block_ids:
            if not self.references[block]:
                self.queue.remove(block)
            self.references[block] += 1

    hold = use  # of a load; copies to host memory hold nothing

    def release(self, block_ids: Sequence[int]) -> None:
        self.free(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        """What the end of a request does; the tail comes first."""
        for block in block_ids:
            assert self.references[block] > 0, f"block {block} was released more often than held"
            self.references[block] -= 1
            if not self.references[block]:
                self.queue.insert(len(self.queue) if block in self.contents else 0, block)

    def compute(self, block: int, block_hash: bytes) -> None:
        super().compute(block, block_hash)
        self.contents[block] = Content(block_hash)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of a hit in G1, now used."""
        known = {content.name: block for block, content in self.contents.items()}
        found = []
        for one in hashes:
            if one not in known:
                break
            found.append(known[one])
        self.use(found)
        return found

    def contents_of(self, block_ids: Sequence[int]) -> list[Content | None]:
        return [self.contents.get(block) for block in block_ids]

    def first(self, count: int, *, again: bool) -> list[tuple[int, Content]]:
        """It always looks; an engine may do that more seldom."""
        return [(block, self.contents[block]) for block in self.queue[:count] if block in self.contents]
