"""Scheduler side of the connector: translates vLLM's scheduler hooks of requests and steps into calls of the leader.

It owns the requests that may use the cache, from their arrival until their end: their block tables, their loads, and
what a step offloads. It runs in the process of vLLM's scheduler and sees no bytes. What is true of all blocks, and the
leader itself, is in `blocks` (engine_blocks.py). Until there is a leader, the hooks only track requests.

The invariant: these hooks name a block only while vLLM has it in the table of a tracked request, or hands it over as a
snapshot. A preempted request has no blocks until it is scheduled again, or loads some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvbm.boundary import contained, hook
from kvbm.engines.vllm.block_tables import tables_of
from kvbm.engines.vllm.engine_blocks import EngineBlocks
from kvbm.engines.vllm.media import Media
from kvbm.engines.vllm.request import UNLIMITED, VllmRequest
from kvbm.engines.vllm.snapshots import Snapshot
from kvbm.engines.vllm.worker_side import NOTHING, StepOrders
from kvbm.leader.request import LoadResult

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvbm.config.schema import ConnectorConfig
    from kvbm.engines.vllm.cache_groups import TransferGroup
    from kvbm.engines.vllm.engine_facts import VllmFacts
    from kvbm.leader.guarded import GuardedLeader


class SchedulerSide:
    """Hooks of one engine's scheduler. `identity`: see EngineBlocks."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: Sequence[TransferGroup],
        facts: VllmFacts,
        identity: Callable[[], tuple[dict[str, object], str]],
    ) -> None:
        self._offloads_generated = config.offload.generated
        self._continues_prompts = facts.continues_prompts
        self._tables = tables_of(groups)
        self._due_tokens = self._tables.due_tokens
        self._requests: dict[str, VllmRequest] = {}
        self._failed_loads: list[LoadResult] = []
        self._prefills: dict[str, PrefillStats] = {}  # what vLLM reports as a request's usage
        self._loading: set[str] = set()  # requests whose load belongs to the step being scheduled
        self._step = (0, 0.0)  # tokens of the current step, and when it was scheduled
        self._media = Media(facts.hash_bytes, encodes_here=facts.encodes_here)
        self.blocks = EngineBlocks(config, facts, identity, self._tables, self._requests)
        self.boundary = self.blocks.boundary

    @hook()
    def add_request(self, request: Request) -> None:
        may_use_cache, media = self.blocks.begin(request), self._media.add(request)
        if may_use_cache:
            self._due_tokens[request.request_id] = 0
            self._requests[request.request_id] = VllmRequest.of(request, media)

    @hook((0, False))
    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        leader, tracked = self.blocks.leader, self._requests.get(request.request_id)
        if leader is None or tracked is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        tracked.start, tracked.loaded = local_tokens, 0
        if tracked.media is not None and tracked.media.is_waiting(self._media.now_s()):
            return None, False
        most = min(request.num_tokens - self._tables.recomputed_tokens, tracked.max_load_tokens)
        found = self._tables.match(leader, tracked, tracked.named_tokens(most))
        if self._tables.snapshots is not None and found is not None:
            _ask_for_snapshot(request, local_tokens, found + leader.lost_state_tokens(request.request_id))
        if found and not self._continues_prompts and local_tokens + found < request.num_tokens - 1:
            found = 0
        return found, bool(found)

    @hook(when_off=True)
    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        leader = self.blocks.leader
        if leader is None:
            return
        if (prefill := getattr(request, "prefill_stats", None)) is not None:
            self._prefills[request.request_id] = prefill
        if not external_tokens:
            self._offload_hit_in_g1(request, blocks)
        elif not self._onboard(request, blocks, external_tokens):
            leader.fail_load(request.request_id, self._tables.without_gaps(blocks.get_block_ids()))

    @hook()
    def _offload_hit_in_g1(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Offload the snapshot of a hit in G1, if host memory has lost it: vLLM hands over only new ones."""
        tracked, pool, snapshots = self._requests.get(request.request_id), self.blocks.pool, self._tables.snapshots
        if snapshots is not None and pool is not None and tracked is not None:
            found = snapshots.in_g1(request, blocks.get_block_ids(), tracked.start, pool)
            if found is not None:
                self._offload_snapshot(tracked, found)

    def _offload_snapshot(self, tracked: VllmRequest, snapshot: Snapshot) -> None:
        is_generated = snapshot.tokens > tracked.request.num_prompt_tokens
        is_wanted = self._offloads_generated or not is_generated
        if is_wanted and not self.blocks.is_stale(tracked.request):
            assert self.blocks.leader is not None
            self._tables.offload_snapshot(self.blocks.leader, tracked, snapshot)

    @hook(False)
    def _onboard(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> bool:
        """Start the load that the engine waits for. False if that is not possible."""
        leader, tracked = self.blocks.leader, self._requests.get(request.request_id)
        if leader is None or tracked is None:
            return False
        tables, end = blocks.get_block_ids(), tracked.start + external_tokens
        load = self._tables.to_load(tracked, tables, end)
        if load is None:
            return False
        self._tables.describe(tracked, end)
        leader.onboard(request.request_id, load[0], 0, load[1], tokens=external_tokens)
        self._loading.add(request.request_id)
        tracked.loaded = external_tokens
        return True

    @contained((0, 0))
    def lower_tier_tokens(self, request: Request) -> tuple[int, int]:
        """Return how many tokens of the request's last hit are on disk and in the shared tier."""
        leader = self.blocks.leader
        return (0, 0) if leader is None else leader.lower_tier_tokens(request.request_id)

    @hook(when_off=True)
    def end_request(self, request: Request) -> None:
        self._media.end(request)
        self._count_prompt(request)
        tracked = self._requests.pop(request.request_id, None)
        self._due_tokens.pop(request.request_id, None)
        self.blocks.end(request)
        if self.blocks.leader is not None and tracked is not None:
            self.blocks.leader.finish(request.request_id, *self._tables.chains(tracked))

    @contained()
    def _count_prompt(self, request: Request) -> None:
        """Count the prompt as vLLM does in the usage. If a stop string ends a request, vLLM's engine sees an abort."""
        leader = self.blocks.leader
        if leader is None:
            return
        prefill = self._prefills.pop(request.request_id, None)
        reason = request.get_finished_reason()
        if prefill is None or reason is None or reason.name in ("ABORT", "ERROR"):
            leader.counters.prompt_aborted_tokens += request.num_prompt_tokens
            return
        disk, shared = leader.lower_tier_tokens(request.request_id)
        leader.counters.count_prompt(
            request.num_prompt_tokens,
            device=prefill.num_local_cached_tokens,
            external=prefill.num_external_cached_tokens,
            disk=disk,
            shared=shared,
        )

    @hook(NOTHING, when_off=True)
    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        leader = self.blocks.leader
        if leader is None:
            return NOTHING
        self._finish_and_offload(leader, output)
        failed, self._failed_loads = tuple(self._failed_loads), []
        return StepOrders(leader.step(), failed, leader.needs_settle())

    @hook()
    def _finish_and_offload(self, leader: GuardedLeader, output: SchedulerOutput) -> None:
        for request_id in (output.preempted_req_ids or set()) - self._loading:  # a load starts after a preemption
            self._forget_preempted(leader, request_id)
        self._loading.clear()
        self._media.look_again()
        snapshots = self._tables.snapshots
        for snapshot in snapshots.handed_over(output) if snapshots is not None else ():
            if (tracked := self._requests.get(snapshot.request_id)) is not None:
                self._offload_snapshot(tracked, snapshot)
        requests, cached = self._requests, output.scheduled_cached_reqs
        self._note_origins(output)
        for new in output.scheduled_new_reqs:
            if (tracked := requests.get(new.req_id)) is not None:
                tracked.block_ids = self._tables.own(new.block_ids)
                self.blocks.inherit(tracked, new.block_ids)
                if not self.blocks.is_stale(tracked.request):
                    self._tables.offload(leader, [(tracked, new.num_computed_tokens)], output)
        resumed, extend = cached.resumed_req_ids, self._tables.extend
        scheduled, due_tokens, due = output.num_scheduled_tokens, self._due_tokens.get, []
        running = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, computed in running:  # hundreds, of which few complete a block
            if block_ids is not None and (tracked := requests.get(request_id)) is not None:
                if request_id in resumed:  # it has only these blocks
                    tracked.block_ids = self._tables.own(block_ids)
                    self.blocks.inherit(tracked, block_ids)
                else:
                    extend(tracked, block_ids)
            if computed + scheduled[request_id] >= due_tokens(request_id, UNLIMITED):
                due.append((requests[request_id], computed))
        due = [one for one in due if not self.blocks.is_stale(one[0].request)]
        self._tables.offload(leader, due, output)
        self._step = output.total_num_scheduled_tokens, time.monotonic()

    def _note_origins(self, output: SchedulerOutput) -> None:
        """Notice requests with media that start with KV of another connector: it may be the KV of other contents."""
        cached = output.scheduled_cached_reqs
        begun = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        if cached.resumed_req_ids:
            known = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            begun += [(request_id, tokens) for request_id, tokens in known if request_id in cached.resumed_req_ids]
        for request_id, tokens in begun:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.media is None:
                continue
            if tokens >= tracked.start + tracked.loaded + max(
                group.group.block_tokens for group in self._tables.groups
            ):
                tracked.media.distrust()

    @hook(when_off=True)
    def settle(self, output: KVConnectorOutput) -> None:
        """Report loads that succeeded. The workers must report failures, one step later."""
        leader = self.blocks.leader
        if leader is None:
            return
        tokens, began_s = self._step
        leader.note_step(tokens, time.monotonic() - began_s)
        results = leader.settle()
        if not results:
            return
        ended = {
            result.request_id
            for result in results
            if not result.failed_block_ids or result.request_id not in self._requests
        }
        output.finished_recving = (output.finished_recving or set()) | ended
        self._failed_loads += [result for result in results if result.request_id not in ended]

    @hook(False, when_off=True)
    def has_pending(self) -> bool:
        leader = self.blocks.leader
        if leader is None:
            return bool(self._failed_loads)
        return bool(self._failed_loads) or leader.has_pending() or self.blocks.has_events()

    def close(self) -> None:
        """Write what is only in host memory to disk. The ranks have ended; their memory is still mapped."""
        self.blocks.close()
        self._media.close()

    def _forget_preempted(self, leader: GuardedLeader, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            leader.finish(request_id, *self._tables.chains(tracked), is_preempted=True)
            tracked.block_ids = []
            tracked.described = []
            self._due_tokens[request_id] = 0


def _ask_for_snapshot(request: Request, local_tokens: int, found_tokens: int) -> None:
    """Let vLLM keep a snapshot where the request leaves a prefix that another one has stored.

    vLLM itself knows only the prefixes in G1. Without a snapshot there, no later request could resume from it. If host
    memory has that snapshot, vLLM would load it and not keep it for other requests.
    """
    if found_tokens and hasattr(request, "shared_prefix_boundary"):
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, local_tokens + found_tokens)
