"""Snapshots: where vLLM has a valid state of a request, in models with states (Mamba, gated delta nets).

A snapshot is the state after a whole number of blocks: one block of each state group. vLLM says of a new one, in the
step that completes it, in which blocks it is (`KVConnectorBlockState`). Its block tables do not: they contain blocks
that are being changed, and lose others without a message. Only the snapshot of a hit in G1 is taken from a table, and
only if vLLM itself has the block under the name of that position.

Which positions get a snapshot is decided by vLLM (`--prefix-cache-retention-interval`), by default two: the last whole
block before the end of a prompt, and the position where a request leaves a prefix that another one has stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm.core.groups import StateGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvbm.engines.vllm.cache_groups import TransferGroup


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a request after `tokens` tokens. `block_ids` are in the order of the state groups."""

    request_id: str
    tokens: int
    block_ids: tuple[int, ...]


class Snapshots:
    """Finds the snapshots of one engine, of which at least one group has states."""

    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        self._groups = tuple(group for group in groups if isinstance(group.group, StateGroup))
        self._unit = math.lcm(*(group.group.block_tokens for group in groups))

    def handed_over(self, output: SchedulerOutput) -> Iterator[Snapshot]:
        """Yield the snapshots that the next forward pass completes. States inside a block are left out: no hit ends
        there."""
        state = getattr(output, "kv_connector_block_state", None)  # absent before 0.29, where kvbm is disabled
        offers: Mapping[str, list[tuple[int, int, int]]] = {} if state is None else state.boundary_state_offloads
        for request_id, offered in offers.items():
            found: dict[int, dict[int, int]] = {}
            for index, block_id, tokens in offered:
                found.setdefault(tokens, {})[index] = block_id
            for tokens, blocks in found.items():
                is_whole = all(group.index in blocks for group in self._groups)
                if is_whole and tokens and tokens % self._unit == 0:
                    yield Snapshot(request_id, tokens, tuple(blocks[group.index] for group in self._groups))

    def in_g1(self, request: Request, tables: Sequence[Sequence[int]], tokens: int, pool: BlockPool) -> Snapshot | None:
        """Return the snapshot at the end of a hit of `tokens` in G1, None if vLLM has it no longer."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        if not tokens or tokens % self._unit:
            return None
        name, block_ids = request.block_hashes[tokens // pool.hash_block_size - 1], []
        for group in self._groups:
            table, column = tables[group.index], tokens // group.group.block_tokens - 1
            if column >= len(table):
                return None
            block = pool.blocks[table[column]]
            if block.block_hash != make_block_hash_with_group_id(name, group.index):
                return None
            block_ids.append(block.block_id)
        return Snapshot(request.request_id, tokens, tuple(block_ids))

    def useful_tokens(self, prompt_tokens: int, snapshot_tokens: int) -> int:
        """Return how many tokens of a request a later hit can have: it ends at a snapshot.

        The first snapshot is the last whole block before the last token of the prompt, which vLLM computes in any case.
        The deepest one that is known so far is at `snapshot_tokens`.
        """
        return max((prompt_tokens - 1) // self._unit * self._unit, snapshot_tokens)
