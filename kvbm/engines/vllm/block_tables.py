"""Block tables of vLLM: translates them, and the hashes of their blocks, into those of the leader, and says which of
the blocks are offloaded in a step.

PlainTables      one group that looks back over the whole prompt: no gaps, and vLLM's hashes are ours. The blocks of all
                 requests are offloaded in one call of the leader
GroupedTables    all other models: a table per group in our order, with gaps, and the group at the end of each hash. A
                 call of the leader per request and group. With states, only blocks before a snapshot are offloaded
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.core.groups import StateGroup
from kvbm.engines.vllm.cache_groups import is_plain
from kvbm.engines.vllm.request import UNLIMITED, VllmRequest
from kvbm.engines.vllm.snapshots import Snapshots
from kvbm.leader.offloads import NO_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvbm.engines.vllm.announcer import Announcer
    from kvbm.engines.vllm.cache_groups import TransferGroup
    from kvbm.engines.vllm.snapshots import Snapshot
    from kvbm.leader.guarded import GuardedLeader

Due = Sequence[tuple[VllmRequest, int]]  # requests, and their computed tokens


class GroupedTables:
    """See the module's text. `suffix_bytes` are behind vLLM's hash in ours. Of a hit of a whole prompt, vLLM computes
    the last `recomputed_tokens` again, with a window that may start in a block that was evicted.

    `due_tokens`: for each tracked request, the number of tokens below which there is nothing to offload. The
    `announcer`, if there is one, gets the descriptions of the blocks."""

    suffix_bytes = 1
    recomputed_tokens = 1

    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        self.groups = groups
        self.snapshots = Snapshots(groups) if any(isinstance(one.group, StateGroup) for one in groups) else None
        self.due_tokens: dict[str, int] = {}
        self.announcer: Announcer | None = None
        self._hash_tokens = 0  # tokens per block hash of vLLM; set by its block pool
        self._null_block_id = 0

    def bind(self, pool: BlockPool) -> None:
        self._hash_tokens, self._null_block_id = pool.hash_block_size, pool.null_block.block_id

    def chains(self, tracked: VllmRequest) -> Sequence[list[bytes]]:
        """Return the hashes of a request's blocks per group.

        With media, each list ends where blocks have no name, and what is behind the first medium has another hash.
        """
        if not tracked.chains:
            tracked.chains = [[] for _ in self.groups]
        hashes, media = tracked.request.block_hashes, tracked.media
        named = tracked.named_tokens(len(hashes) * self._hash_tokens) // self._hash_tokens
        for cache_group, chain in zip(self.groups, tracked.chains, strict=True):
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
        for cache_group, chain in zip(self.groups, self.chains(tracked), strict=True):
            size, table = cache_group.group.block_tokens, tables[cache_group.index]
            for index in range(tracked.start // size, end // size):
                if table[index] != self._null_block_id:
                    hashes.append(chain[index])
                    block_ids.append(table[index])
                elif isinstance(cache_group.group, StateGroup) and (index + 1) * size == end:
                    return None
        return hashes, block_ids

    def without_gaps(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """Return all blocks in vLLM's tables of a request."""
        return [block_id for table in tables for block_id in table if block_id != self._null_block_id]

    def own(self, block_ids: Sequence[list[int]] | None) -> list[list[int]]:
        """Return vLLM's tables in our order of groups."""
        null = self._null_block_id
        return [
            [NO_BLOCK if block_id == null else block_id for block_id in (block_ids[group.index] if block_ids else ())]
            for group in self.groups
        ]

    def extend(self, tracked: VllmRequest, block_ids: Sequence[list[int]]) -> None:
        """Note new blocks of a running request."""
        for table, more in zip(tracked.block_ids, self.own(block_ids), strict=True):
            table += more

    def offload(self, leader: GuardedLeader, due: Due, output: SchedulerOutput) -> None:
        """Offload the blocks that the next forward pass completes."""
        for tracked, computed_tokens in due:
            for cache_group, table in zip(self.groups, tracked.block_ids, strict=True):
                if not isinstance(cache_group.group, StateGroup):
                    _give_up(table, cache_group.group.first_needed_block(computed_tokens))
            self._offload_groups(leader, tracked, _tokens_after(tracked, computed_tokens, output))

    def describe(self, tracked: VllmRequest, end: int) -> None:
        """Describe the blocks of a load up to `end` to the announcer, if there is one."""
        if self.announcer is None:
            return
        for position, (group, chain) in enumerate(zip(self.groups, self.chains(tracked), strict=True)):
            size = group.group.block_tokens
            self.announcer.describe(tracked.request, position, chain, tracked.start // size, end // size)

    def offload_snapshot(self, leader: GuardedLeader, tracked: VllmRequest, snapshot: Snapshot) -> None:
        if snapshot.tokens > tracked.named_tokens(tracked.max_offload_tokens):
            return
        hashes = []
        for position, (group, chain) in enumerate(zip(self.groups, self.chains(tracked), strict=True)):
            if isinstance(group.group, StateGroup):
                end = snapshot.tokens // group.group.block_tokens
                hashes.append(chain[end - 1])
                if self.announcer is not None:
                    self.announcer.describe(tracked.request, position, chain, end - 1, end)
        if leader.offload_snapshot(snapshot.request_id, hashes, snapshot.block_ids):
            tracked.snapshot_tokens = max(tracked.snapshot_tokens, snapshot.tokens)
            self.due_tokens[snapshot.request_id] = 0

    def _offload_groups(self, leader: GuardedLeader, tracked: VllmRequest, tokens: int) -> None:
        request_id, prompt_tokens, useful = tracked.request.request_id, tracked.request.num_prompt_tokens, UNLIMITED
        if self.snapshots is not None:
            useful = self.snapshots.useful_tokens(prompt_tokens, tracked.snapshot_tokens)
            if useful > tracked.max_offload_tokens:  # the snapshot there is not offloaded
                useful = tracked.snapshot_tokens
        due = UNLIMITED
        for position, (cache_group, chain) in enumerate(zip(self.groups, self.chains(tracked), strict=True)):
            if isinstance(cache_group.group, StateGroup):
                continue
            size = cache_group.group.block_tokens
            considered = leader.offload(
                request_id,
                chain,
                tracked.block_ids[position],
                computed_blocks=min(tokens, useful) // size,
                prompt_blocks=prompt_tokens // size,
                group=position,
            )
            if self.announcer is not None:
                self.announcer.describe_up_to(tracked, position, chain, considered)
            if (considered + 1) * size <= useful:
                due = min(due, (considered + 1) * size)
        self.due_tokens[request_id] = due


class PlainTables(GroupedTables):
    """See the module's text. Each of vLLM's hashes covers one block."""

    suffix_bytes = 0
    recomputed_tokens = 0

    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        super().__init__(groups)
        (group,) = groups
        self._size = group.group.block_tokens

    def chains(self, tracked: VllmRequest) -> Sequence[list[bytes]]:
        return (tracked.request.block_hashes,) if tracked.media is None else super().chains(tracked)

    def match(self, leader: GuardedLeader, tracked: VllmRequest, end: int) -> int | None:
        size, chain = self._size, self.chains(tracked)[0]
        blocks = leader.match(tracked.request.request_id, chain, tracked.start // size, end // size)
        return None if blocks is None else blocks * size

    def offload(self, leader: GuardedLeader, due: Due, output: SchedulerOutput) -> None:
        size, completed, chains = self._size, [], self.chains
        for tracked, computed_tokens in due:
            request = tracked.request
            blocks = _tokens_after(tracked, computed_tokens, output) // size
            prompt_blocks = request.num_prompt_tokens // size
            completed.append((request.request_id, chains(tracked)[0], tracked.block_ids[0], blocks, prompt_blocks))
        due_tokens = self.due_tokens
        ends = leader.offload_all(completed)
        for entry, considered in zip(completed, ends, strict=False):
            due_tokens[entry[0]] = (considered + 1) * size
        if self.announcer is not None:
            for (tracked, _), considered in zip(due, ends, strict=False):
                self.announcer.describe_up_to(tracked, 0, chains(tracked)[0], considered)


def tables_of(groups: Sequence[TransferGroup]) -> GroupedTables:
    return (PlainTables if is_plain(groups) else GroupedTables)(groups)


def _give_up(table: list[int], end: int) -> None:
    """Remove the blocks before `end`, which vLLM may have given to others, and does not report. They are offloaded in
    the step that completes them, but not if their names become certain later."""
    index = min(end, len(table)) - 1
    while index >= 0 and table[index] != NO_BLOCK:
        table[index] = NO_BLOCK
        index -= 1


def _tokens_after(tracked: VllmRequest, computed_tokens: int, output: SchedulerOutput) -> int:
    """Return how many tokens of a request may be offloaded after this step. Speculative tokens do not count."""
    request_id = tracked.request.request_id
    tokens: int = computed_tokens + output.num_scheduled_tokens[request_id]
    if output.scheduled_spec_decode_tokens:
        tokens -= len(output.scheduled_spec_decode_tokens.get(request_id, ()))
    return tracked.named_tokens(min(tokens, tracked.max_offload_tokens))
