"""Block tables of vLLM: translates them, and the hashes of their blocks, into those of the leader.

PlainTables      one group that looks back over the whole prompt: no gaps, and vLLM's hashes are ours
GroupedTables    all other models: a table per group in our order, with gaps, and the group at the end of each hash
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.core.groups import StateGroup
from kvbm.leader.offloads import NO_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from kvbm.leader.guarded import GuardedLeader
    from kvbm.vllm_integration.cache_groups import TransferGroup
    from kvbm.vllm_integration.request import VllmRequest


class GroupedTables:
    """See the module's text. `suffix_bytes` are behind vLLM's hash in ours. Of a hit of a whole prompt, vLLM computes
    the last `recomputed_tokens` again, with a window that may start in a block that was evicted."""

    suffix_bytes = 1
    recomputed_tokens = 1

    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        self._groups = groups
        self._hash_tokens = 0  # tokens per block hash of vLLM; set by its block pool
        self._null_block_id = 0

    def bind(self, pool: BlockPool) -> None:
        self._hash_tokens, self._null_block_id = pool.hash_block_size, pool.null_block.block_id

    def chains(self, tracked: VllmRequest) -> Sequence[list[bytes]]:
        """Return the hashes of a request's blocks per group.

        With media, each list ends where blocks have no name, and what is behind the first medium has another hash.
        """
        if not tracked.chains:
            tracked.chains = [[] for _ in self._groups]
        hashes, media = tracked.request.block_hashes, tracked.media
        named = tracked.named_tokens(len(hashes) * self._hash_tokens) // self._hash_tokens
        for cache_group, chain in zip(self._groups, tracked.chains, strict=True):
            suffix = bytes((cache_group.index,))[: self.suffix_bytes]
            size = cache_group.group.block_tokens
            span = size // self._hash_tokens
            begin = len(chain) + 1
            more = [bytes(one) for one in hashes[span * begin - 1 : named : span]]
            if media is not None:
                more = [media.name(one, (begin + index) * size) for index, one in enumerate(more)]
            chain += [one + suffix for one in more] if suffix else more
        return tracked.chains

    def match(self, leader: GuardedLeader, tracked: VllmRequest, end: int) -> int | None:
        """Return how many tokens up to `end` the leader can load after those in G1; None if that is not known yet."""
        return leader.match_groups(tracked.request.request_id, self.chains(tracked), tracked.start, end)

    def to_load(
        self, tracked: VllmRequest, tables: Sequence[list[int]], end: int
    ) -> tuple[list[bytes], list[int]] | None:
        """Return hashes and block ids of a load up to `end`; None if the request would continue with the state of
        another one."""
        hashes: list[bytes] = []
        block_ids: list[int] = []
        for cache_group, chain in zip(self._groups, self.chains(tracked), strict=True):
            size, table = cache_group.group.block_tokens, tables[cache_group.index]
            for index in range(tracked.start // size, end // size):
                if table[index] != self._null_block_id:
                    hashes.append(chain[index])
                    block_ids.append(table[index])
                elif isinstance(cache_group.group, StateGroup) and (index + 1) * size == end:
                    return None
        return hashes, block_ids

    def own(self, block_ids: Sequence[list[int]] | None) -> list[list[int]]:
        """Return vLLM's tables in our order of groups."""
        null = self._null_block_id
        return [
            [NO_BLOCK if block_id == null else block_id for block_id in (block_ids[group.index] if block_ids else ())]
            for group in self._groups
        ]

    def extend(self, tracked: VllmRequest, block_ids: Sequence[list[int]]) -> None:
        """Note new blocks of a running request."""
        for table, more in zip(tracked.block_ids, self.own(block_ids), strict=True):
            table += more


class PlainTables(GroupedTables):
    """See the module's text. Each of vLLM's hashes covers one block."""

    suffix_bytes = 0
    recomputed_tokens = 0

    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        super().__init__(groups)
        (group,) = groups
        self._index, self._size = group.index, group.group.block_tokens

    def chains(self, tracked: VllmRequest) -> Sequence[list[bytes]]:
        return (tracked.request.block_hashes,) if tracked.media is None else super().chains(tracked)

    def match(self, leader: GuardedLeader, tracked: VllmRequest, end: int) -> int | None:
        size, chain = self._size, self.chains(tracked)[0]
        blocks = leader.match(tracked.request.request_id, chain, tracked.start // size, end // size)
        return None if blocks is None else blocks * size

    def to_load(
        self, tracked: VllmRequest, tables: Sequence[list[int]], end: int
    ) -> tuple[list[bytes], list[int]] | None:
        loaded = slice(tracked.start // self._size, end // self._size)
        return self.chains(tracked)[0][loaded], tables[self._index][loaded]

    def own(self, block_ids: Sequence[list[int]] | None) -> list[list[int]]:
        return [list(block_ids[self._index]) if block_ids else []]

    def extend(self, tracked: VllmRequest, block_ids: Sequence[list[int]]) -> None:
        tracked.block_ids[0] += block_ids[self._index]


def is_plain(groups: Sequence[TransferGroup]) -> bool:
    """Whether hashes of vLLM are ours: there is one group, which looks back over the whole prompt."""
    return len(groups) == 1 and groups[0].group.looks_back_over_all
