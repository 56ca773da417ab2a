"""KV events: translates kvbm's events into vLLM's, so that a router knows which blocks are in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvbm.events import BlocksStored, Event, TierCleared

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

    from kvbm.vllm_integration.cache_groups import TransferGroup

MEDIUM = "CPU"


def translate(events: Iterable[Event], groups: Sequence[TransferGroup], *, is_plain: bool) -> Iterator[KVCacheEvent]:
    """Translate events. Block names are those that vLLM publishes, by default integers.

    Unless `is_plain`, our hashes end with the group index. Tokens and parents are unknown here: a listener takes them
    from the engine's event with the same name. A cleared tier becomes AllBlocksCleared, because vLLM publishes a reset
    only if its own cache was cleared too.
    """
    for event in events:
        if isinstance(event, TierCleared):
            yield AllBlocksCleared()
            continue
        for group in groups:
            hashes = [h if is_plain else h[:-1] for h in event.hashes if is_plain or h[-1] == group.index]
            names = [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in hashes]
            if names:
                yield _stored(names, group) if isinstance(event, BlocksStored) else _removed(names, group)


def _stored(names: list[bytes | int], group: TransferGroup) -> BlockStored:
    return BlockStored(
        block_hashes=names,
        parent_block_hash=None,
        token_ids=[],
        block_size=group.group.block_tokens,
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        group_idx=group.index,
    )


def _removed(names: list[bytes | int], group: TransferGroup) -> BlockRemoved:
    return BlockRemoved(block_hashes=names, medium=MEDIUM, group_idx=group.index)
