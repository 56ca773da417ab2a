"""Our events as vLLM's: which blocks lie in host memory, for a router that listens to the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvbm.events import BlocksStored, Event, TierCleared

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

    from kvbm.vllm_integration.cache_groups import CacheGroup

MEDIUM = "CPU"


def translate(events: Iterable[Event], groups: Sequence[CacheGroup], *, is_plain: bool) -> Iterator[KVCacheEvent]:
    """Blocks are named by vLLM's own hashes; unless `is_plain`, ours have the group behind them. Tokens and parents are
    unknown here: a listener has them from the engine's event for the same hash. A cleared tier needs no event, because
    the engine announces the reset itself."""
    for event in events:
        if isinstance(event, TierCleared):
            continue
        for group in groups:
            hashes = [h if is_plain else h[:-1] for h in event.hashes if is_plain or h[-1] == group.index]
            if hashes:
                yield _stored(hashes, group) if isinstance(event, BlocksStored) else _removed(hashes, group)


def _stored(hashes: list[bytes], group: CacheGroup) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=group.group.block_tokens,
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        group_idx=group.index,
    )


def _removed(hashes: list[bytes], group: CacheGroup) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=group.index)
