"""BlockPool: reference counts, eviction order and prefix index of the G1 blocks.

The engine thread owns it. A block is in exactly one state:

    free         no references, no hash
    evictable    no references, its hash can be found; ordered by age, oldest evicted first
    in use       references > 0: request tables, and holds of a connector that copies from or to it

A block gets its hash only after its KV was computed or loaded. A hash names at most one block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvbm.errors import InvariantError


class BlockPool:
    """Manages `block_count` blocks."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self._references = [0] * block_count
        self._hash_of: list[bytes | None] = [None] * block_count
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(block_count - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def available_count(self) -> int:
        """Number of blocks that `allocate` can return now."""
        return len(self._free) + len(self._evictable)

    @property
    def used_count(self) -> int:
        return self.block_count - self.available_count

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None. Evicts the oldest blocks if too few are free."""
        if count > self.available_count:
            return None
        from_free = min(count, len(self._free))
        block_ids = [self._free.pop() for _ in range(from_free)]
        block_ids += [self._evict_oldest() for _ in range(count - from_free)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `hashes` in the index. Takes no reference."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def unreferenced_count(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks `available_count` includes."""
        return sum(1 for block_id in block_ids if not self._references[block_id])

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block: it is not reused before `release`, even if its request ends."""
        for block_id in block_ids:
            if not self._references[block_id] and block_id not in self._evictable:
                raise InvariantError(f"hold of block {block_id}, which is free")
            self._evictable.pop(block_id, None)
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one reference from each block; earlier blocks are evicted first."""
        for block_id in block_ids:
            if self._references[block_id] < 1:
                raise InvariantError(f"release of block {block_id}, which has no reference")
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self._hash_of[block_id] is None:
                self._free.append(block_id)
            else:
                self._evictable[block_id] = None

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Add a block with complete KV to the prefix index. A known hash keeps its first block."""
        if not self._references[block_id]:
            raise InvariantError(f"register of block {block_id}, which has no reference")
        if block_hash not in self._block_of and self._hash_of[block_id] is None:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def reset(self) -> None:
        """Clear the prefix index. Blocks in use stay in use."""
        self._free += self._evictable
        self._evictable.clear()
        self._block_of.clear()
        self._hash_of = [None] * self.block_count

    def _evict_oldest(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, f"evictable block {block_id} has no hash"
        del self._block_of[block_hash]
        self._hash_of[block_id] = None
        return block_id
