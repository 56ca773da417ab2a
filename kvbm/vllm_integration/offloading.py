"""Offloading: which blocks of vLLM's requests are offloaded in a step, and when a request has more of them.

PlainOffloading      for PlainTables: the blocks of all requests in one call of the leader
GroupedOffloading    all other models: a call per request and group. With states, only blocks before a snapshot
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.core.groups import StateGroup
from kvbm.vllm_integration.block_tables import GroupedTables, PlainTables, is_plain
from kvbm.vllm_integration.request import UNLIMITED, VllmRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvbm.leader.guarded import GuardedLeader
    from kvbm.vllm_integration.announcer import Announcer
    from kvbm.vllm_integration.cache_groups import TransferGroup
    from kvbm.vllm_integration.snapshots import Snapshot, Snapshots

Due = Sequence[tuple[VllmRequest, int]]  # requests, and their computed tokens


class GroupedOffloading:
    """See the module's text. `due_tokens`: for each tracked request, the number of tokens below which there is nothing
    to offload. The `announcer`, if there is one, gets the descriptions of the blocks."""

    def __init__(self, groups: Sequence[TransferGroup], snapshots: Snapshots | None) -> None:
        self._groups = groups
        self._snapshots = snapshots
        self.tables: GroupedTables = GroupedTables(groups)
        self.due_tokens: dict[str, int] = {}
        self.announcer: Announcer | None = None

    def offload(self, leader: GuardedLeader, due: Due, output: SchedulerOutput) -> None:
        """Offload the blocks that the next forward pass completes."""
        for tracked, computed_tokens in due:
            self._offload_groups(leader, tracked, _tokens_after(tracked, computed_tokens, output))

    def offload_snapshot(self, leader: GuardedLeader, tracked: VllmRequest, snapshot: Snapshot) -> None:
        if snapshot.tokens > tracked.named_tokens(tracked.max_offload_tokens):
            return
        hashes = []
        for position, (group, chain) in enumerate(zip(self._groups, self.tables.chains(tracked), strict=True)):
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
        if self._snapshots is not None:
            useful = self._snapshots.useful_tokens(prompt_tokens, tracked.snapshot_tokens)
            if useful > tracked.max_offload_tokens:  # the snapshot there is not offloaded
                useful = tracked.snapshot_tokens
        due = UNLIMITED
        for position, (cache_group, chain) in enumerate(zip(self._groups, self.tables.chains(tracked), strict=True)):
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


class PlainOffloading(GroupedOffloading):
    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        super().__init__(groups, None)
        self.tables = PlainTables(groups)

    def offload(self, leader: GuardedLeader, due: Due, output: SchedulerOutput) -> None:
        size, completed, chains = self._groups[0].group.block_tokens, [], self.tables.chains
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


def offloading_of(groups: Sequence[TransferGroup], snapshots: Snapshots | None) -> GroupedOffloading:
    return PlainOffloading(groups) if is_plain(groups) else GroupedOffloading(groups, snapshots)


def _tokens_after(tracked: VllmRequest, computed_tokens: int, output: SchedulerOutput) -> int:
    """Return how many tokens of a request may be offloaded after this step. Speculative tokens do not count."""
    request_id = tracked.request.request_id
    tokens: int = computed_tokens + output.num_scheduled_tokens[request_id]
    if output.scheduled_spec_decode_tokens:
        tokens -= len(output.scheduled_spec_decode_tokens.get(request_id, ()))
    return tracked.named_tokens(min(tokens, tracked.max_offload_tokens))
