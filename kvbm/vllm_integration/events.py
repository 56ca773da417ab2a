"""KV events: makes vLLM's events of the blocks in each tier, so that a router finds them.

    tier             medium     locality
    G2 (host)        CPU        LOCAL
    G3 (disk)        STORAGE    LOCAL
    G4 (shared)      never announced, see announcer.py

Each event describes its blocks completely, as vLLM's own events of device memory do. vLLM encodes and publishes them;
fields that the installed version does not have are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvbm.types import Tier
from kvbm.vllm_integration.descriptions import Descriptions

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

PLACES = {Tier.HOST: ("CPU", "LOCAL"), Tier.DISK: ("STORAGE", "LOCAL")}
STORED_FIELDS = frozenset(inspect.signature(BlockStored).parameters)
REMOVED_FIELDS = frozenset(inspect.signature(BlockRemoved).parameters)


def stored(
    tier: Tier, hashes: Sequence[bytes], descriptions: Sequence[bytes], form: Descriptions
) -> Iterator[KVCacheEvent]:
    """Yield the events of blocks of one group that became findable, one per extent."""
    group = form.group
    medium, locality = PLACES[tier]
    facts: dict[str, Any] = {
        "block_size": form.block_tokens,
        "medium": medium,
        "group_idx": group.index,
        "kv_cache_spec_kind": group.kind,
        "kv_cache_spec_sliding_window": group.sliding_window,
        "locality": locality,
    }
    facts = {name: value for name, value in facts.items() if name in STORED_FIELDS}
    for extent in form.extents(hashes, descriptions):
        yield BlockStored(
            block_hashes=extent.names,
            parent_block_hash=extent.parent,
            token_ids=extent.tokens,
            lora_id=extent.adapter_id,
            lora_name=extent.adapter,
            extra_keys=extent.keys,
            **facts,
        )


def removed(tier: Tier, hashes: Sequence[bytes], form: Descriptions) -> KVCacheEvent:
    """Return the event of blocks of one group that are no longer findable."""
    medium, locality = PLACES[tier]
    facts = {"locality": locality} if "locality" in REMOVED_FIELDS else {}
    return BlockRemoved(block_hashes=form.names(hashes), medium=medium, group_idx=form.group.index, **facts)
