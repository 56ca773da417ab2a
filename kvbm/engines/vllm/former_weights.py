"""FormerWeights: which blocks of G1 have KV of weights that the engine has no more, and keeps them from being found.

A block belongs to the weights with which every token of its prefix was computed:

    change     every block that is allocated or has a name is stale, and every request that has KV
    register   vLLM gives no name to a block of a stale request or of a table with a stale block, which are stale then
    hand out   a block that the pool hands out again is not stale any more
    preempt    a request that lost its blocks computes them again: it is stale only if it finds a stale block

vLLM registers blocks and looks for them within one call of `schedule`, before it calls the connector. So this must
happen where the block pool registers them. The methods of the pool are replaced at the first change; until then, this
costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvbm.engines.vllm.media import is_computed_elsewhere

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

WITHOUT_BLOCKS = ("WAITING", "PREEMPTED")  # states in which a request without computed tokens has no blocks


class FormerWeights:
    """See the module's text. The thread of vLLM's scheduler owns it."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._live: dict[str, Request] = {}  # all of them, also those that bypass the cache
        self._blocks: set[int] = set()  # stale
        self._requests: dict[str, int] = {}  # stale, with how often they had been preempted then
        self.has_changed = False

    def bind(self, pool: BlockPool) -> None:
        """Watch this pool. Called before the weights can change."""
        self._pool = pool

    def begin(self, request: Request) -> None:
        self._live[request.request_id] = request
        if self.has_changed and is_computed_elsewhere(request.kv_transfer_params):
            self._taint(request)

    def change(self) -> None:
        """Note that the weights change now, and remove all blocks from the prefix cache."""
        pool = self._pool
        assert pool is not None
        if not self.has_changed:
            self.has_changed = True
            self._replace_methods(pool)
        for request in self._live.values():
            if _has_kv(request):
                self._taint(request)
        named = {block.block_id for block in pool.blocks if block.block_hash is not None}
        self._blocks |= named.union(block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null)
        pool.evict_blocks(named)

    def _taint(self, request: Request) -> None:
        """Note that a request has KV of other weights, until it is preempted."""
        self._requests[request.request_id] = request.num_preemptions

    def is_stale(self, request: Request) -> bool:
        return self._requests.get(request.request_id) == request.num_preemptions if self._requests else False

    def inherit(self, request: Request, block_ids: Iterable[int]) -> None:
        """Taint a request that begins with stale blocks."""
        if self._blocks and not self._blocks.isdisjoint(block_ids):
            self._taint(request)

    def end(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._requests.pop(request_id, None)

    def _replace_methods(self, pool: BlockPool) -> None:
        methods = vars(pool)
        methods["get_new_blocks"] = self._noting_reuse(pool.get_new_blocks)
        methods["cache_full_blocks"] = self._of_fresh(pool.cache_full_blocks)
        if hasattr(pool, "cache_partial_block"):
            partial_block = self._of_fresh(lambda request, blocks, **keys: partial(request, blocks[0], **keys))
            partial = pool.cache_partial_block
            methods["cache_partial_block"] = lambda request, block, **keys: partial_block(request, [block], **keys)

    def _noting_reuse(self, hand_out: Callable[..., list[KVCacheBlock]]) -> Callable[..., list[KVCacheBlock]]:
        def get_new_blocks(*arguments: Any, **keys: Any) -> list[KVCacheBlock]:
            blocks = hand_out(*arguments, **keys)
            if self._blocks:
                self._blocks.difference_update([block.block_id for block in blocks])
            return blocks

        return get_new_blocks

    def _of_fresh(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Return `register` for requests and tables that have nothing stale. It returns None for others."""

        def register_fresh(request: Request, blocks: list[KVCacheBlock], *arguments: Any, **keys: Any) -> Any:
            if not self._requests and not self._blocks:
                return register(request, blocks, *arguments, **keys)
            ids = [block.block_id for block in blocks if not block.is_null]
            self.inherit(request, ids)
            if not self.is_stale(request):
                return register(request, blocks, *arguments, **keys)
            self._blocks.update(ids)
            return None

        return register_fresh


def _has_kv(request: Request) -> bool:
    """Return whether a request may have blocks; one that waits for a load has them."""
    return request.num_computed_tokens > 0 or request.status.name not in WITHOUT_BLOCKS
