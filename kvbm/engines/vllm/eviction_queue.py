"""VllmEvictionQueue: the free blocks of vLLM's pool in the order in which it evicts them, for `to_host: on_evict`.

The content of a block is its `block_hash`: a new bytes object each time that vLLM caches the block, None if it has not.
vLLM evicts a cached block by giving it to a request, which changes its hash at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, FreeKVCacheBlockQueue, KVCacheBlock


PROBE_SHARE = 8  # blocks are examined again when this part of them was evicted


class VllmEvictionQueue:
    """See the module's text. Changes nothing in the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._probe: KVCacheBlock | None = None  # one of the first blocks that were examined last

    def contents_of(self, block_ids: Sequence[int]) -> list[BlockHashWithGroupId | None]:
        blocks = self._pool.blocks
        return [blocks[block_id].block_hash for block_id in block_ids]

    def first(self, count: int, *, again: bool) -> Iterator[tuple[int, BlockHashWithGroupId]]:
        """See `kvbm.tiers.settings.EvictionQueue`.

        A request uses its blocks until the end of a step at least, and this is called in the middle of each step. So a
        probe that is free at each call has neither been evicted nor used again.
        """
        if not again and self._probe is not None and self._probe.ref_cnt == 0:
            return
        queue: FreeKVCacheBlockQueue = self._pool.free_block_queue
        count = min(count, queue.num_free_blocks)
        block, self._probe = queue.fake_free_list_head.next_free_block, None
        for position in range(count):
            if position == count // PROBE_SHARE:
                self._probe = block
            if (content := block.block_hash) is not None:
                yield block.block_id, content
            block = block.next_free_block
