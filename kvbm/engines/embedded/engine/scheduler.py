"""Scheduler: decides how many tokens each request computes in a step, and allocates its blocks.

States of a request, and the blocks it holds:

    waiting ─────────▶ running ──▶ finished        waiting: no blocks
      │  ▲              ▲   │                      loading: blocks; the connector loads into them
      │  └── preempted ◀┼───┘                      running: blocks, KV up to num_computed_tokens
      └───▶ loading ────┘

Requests run in order of arrival; if blocks run out, the newest request is preempted. Running requests are scheduled
first: those that decode, then those that prefill, so that a long prompt does not delay the next token of others. A
request is admitted if the free blocks suffice for all of its tokens, for the missing tokens of admitted requests, and
for one more block of each. Therefore the oldest request always finishes.

The engine thread owns it. It copies no bytes, and its only time source is `time.monotonic`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from kvbm.engines.embedded.engine.block_pool import BlockPool
from kvbm.engines.embedded.engine.connector import ConnectorOutput, SchedulerConnector, Step
from kvbm.engines.embedded.engine.request import FinishReason, Request, RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_batched_tokens` per step over at most `max_requests` requests that hold blocks."""

    block_size: int
    max_batched_tokens: int
    max_requests: int
    prefix_caching: bool = True


@dataclass(slots=True)
class EngineCounters:
    """Counters since the start. Queries and hits are tokens, counted when a request is first admitted. The tokens of a
    failed load remain hits here; the request's own output does not count them.
    """

    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_cache_queries: int = 0
    external_cache_hits: int = 0


class Scheduler:
    """Schedules requests. Per step: `schedule`, the forward pass, `update`."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, connector: SchedulerConnector | None) -> None:
        self._pool = pool
        self._limits = limits
        self._connector = connector
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._running: list[Request] = []
        self._arrivals = 0
        self.counters = EngineCounters()

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival_index = self._arrivals
        self._requests[request.request_id] = request
        self._waiting.append(request)
        if self._connector is not None:
            self._connector.on_new_request(request)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def finish(self, request: Request) -> None:
        """End a request in any state: notify the connector once, then free its blocks."""
        self._leave_queue(request)
        del self._requests[request.request_id]
        if self._connector is not None:
            self._connector.request_finished(request)
        self._release(request.block_ids)
        request.block_ids = []

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache in G1 and in the connector. Running requests continue and register no more blocks."""
        self._pool.reset()
        for request in self._requests.values():
            request.may_register = not request.block_ids
        return self._connector is None or self._connector.reset_cache()

    @property
    def has_work(self) -> bool:
        """Whether a request needs another step, or the connector, even if no request is left."""
        return bool(self._requests) or (self._connector is not None and self._connector.has_pending_work())

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._requests) - len(self._running)

    def schedule(self) -> Step:
        step = Step(self._limits.max_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        return step

    def _schedule_running(self, step: Step) -> None:
        decoding = [request for request in self._running if request.num_uncomputed_tokens == 1]
        prefilling = [request for request in self._running if request.num_uncomputed_tokens != 1]
        for request in chain(decoding, prefilling):
            count = min(request.num_uncomputed_tokens, step.budget)
            if count and request not in step.preempted and self._grow(request, count, step):
                self._compute(request, count, step)

    def _compute(self, request: Request, token_count: int, step: Step) -> None:
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
        step.add(request, token_count)

    def _grow(self, request: Request, token_count: int, step: Step) -> bool:
        """Allocate blocks for the next tokens of a running request. Preempts the newest request, possibly this one."""
        while not self._extend_table(request, request.num_computed_tokens + token_count):
            victim = max(self._running, key=lambda other: other.arrival_index)
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, step: Step) -> None:
        self._leave_queue(victim)
        step.remove(victim)
        step.preempted.append(victim)
        self._release(victim.block_ids)
        self._return_to_waiting(victim)
        self.counters.preemptions += 1

    def _return_to_waiting(self, request: Request) -> None:
        """Insert the request by order of arrival, without computed tokens or blocks."""
        request.block_ids = []
        request.num_computed_tokens = 0
        request.registered_blocks = 0
        request.may_register = True
        request.failed_block_ids.clear()
        place = sum(1 for other in self._waiting if other.arrival_index < request.arrival_index)
        self._waiting.insert(place, request)

    def _admit_waiting(self, step: Step) -> None:
        """Admit requests in order of arrival. One that lacks free blocks delays those behind it; a lookup does not."""
        unclaimed = self._pool.available_count - sum(map(self._claimed_blocks, self._holders()))
        for request in list(self._waiting):
            is_full = len(self._running) + len(self._loading) >= self._limits.max_requests
            if is_full or (step.budget == 0 and self._connector is None):
                return
            local_ids = self._local_hit(request)
            external = self._external_hit(request, local_ids)
            if external is None:
                continue
            if step.budget == 0 and not external:
                return
            needed = self._blocks_for(request.num_tokens) - len(local_ids) + self._pool.unreferenced_count(local_ids)
            if needed > unclaimed:
                return
            unclaimed -= needed + 1
            self._waiting.remove(request)
            self._admit(request, local_ids, external, step)

    def _admit(self, request: Request, local_ids: list[int], external: int, step: Step) -> None:
        """Admit a request. Nothing may fail from here on: there are enough blocks for all of its tokens."""
        local = len(local_ids) * self._limits.block_size
        self._pool.hold(local_ids)
        request.block_ids = list(local_ids)
        request.registered_blocks = len(local_ids)
        self._count_admission(request, local, external)
        request.num_computed_tokens = local + external
        if external:
            self._begin_load(request, external)
            return
        count = min(request.num_uncomputed_tokens, step.budget)
        self._must_extend(request, local + count)
        self._running.append(request)
        self._compute(request, count, step)

    def _begin_load(self, request: Request, external: int) -> None:
        assert self._connector is not None, "only a connector loads"
        self._must_extend(request, request.num_computed_tokens)
        self._loading[request.request_id] = request
        self._connector.update_state_after_alloc(request, list(request.block_ids), external)

    def _local_hit(self, request: Request) -> list[int]:
        """Return the cached G1 blocks of this request, except the one with its last token, which must be computed."""
        if not self._limits.prefix_caching:
            return []
        return self._pool.match(request.block_hashes[: (request.num_tokens - 1) // self._limits.block_size])

    def _external_hit(self, request: Request, local_ids: list[int]) -> int | None:
        """Return how many tokens beyond the local hit the connector can load; None if that is not known yet."""
        if self._connector is None:
            return 0
        return self._connector.get_num_new_matched_tokens(request, len(local_ids) * self._limits.block_size)

    def _count_admission(self, request: Request, local: int, external: int) -> None:
        if request.was_admitted:
            return
        request.was_admitted = True
        request.num_cached_tokens, request.num_external_tokens = local, external
        self.counters.prefix_cache_queries += request.num_tokens
        self.counters.prefix_cache_hits += local
        if self._connector is not None:
            self.counters.external_cache_queries += request.num_tokens - local
            self.counters.external_cache_hits += external

    def update(
        self,
        step: Step,
        sampled: list[tuple[int, TokenLogprobs | None]],
        stop_token_ids: frozenset[int],
        connector_output: ConnectorOutput,
    ) -> list[tuple[Request, RequestOutput]]:
        """Process the step's results: `sampled[i]` is the token of `step.sampled[i]`. Returns outputs for clients."""
        tokens = dict(zip(step.sampled, sampled, strict=True))
        outputs = []
        for request, count in step.scheduled.items():
            request.num_computed_tokens += count
            self._register_computed(request)
            if request in tokens:
                outputs.append((request, self._take_token(request, *tokens[request], stop_token_ids)))
        for request in self._loading.values():
            request.failed_block_ids |= connector_output.failed_block_ids.intersection(request.block_ids)
        for request_id in sorted(connector_output.finished_recving & self._loading.keys()):
            self._end_load(self._loading.pop(request_id))
        return outputs

    def _take_token(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None, stop_token_ids: frozenset[int]
    ) -> RequestOutput:
        request.append(token_id)
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        details = None if logprobs is None else [logprobs]
        reason = _finish_reason(request, token_id, stop_token_ids)
        if reason is None:
            return RequestOutput(request.request_id, [token_id], details)
        request.finish_reason = reason
        self.finish(request)
        return request.last_output(reason, new_token_ids=[token_id], logprobs=details)

    def _register_computed(self, request: Request) -> None:
        """Register full blocks, whose KV is complete, in the prefix cache."""
        full = request.num_computed_tokens // self._limits.block_size
        if self._limits.prefix_caching and request.may_register:
            for index in range(request.registered_blocks, full):
                self._pool.register(request.block_ids[index], request.block_hashes[index])
        request.registered_blocks = max(request.registered_blocks, full)

    def _end_load(self, request: Request) -> None:
        """End a load: keep the blocks before the first failed one, and compute the rest in other blocks.

        The connector may hold the failed ones, because a copy that it has given up can still write to them.
        """
        are_failed = [block_id in request.failed_block_ids for block_id in request.block_ids]
        kept = are_failed.index(True) if any(are_failed) else len(are_failed)
        self._release(request.block_ids[kept:])
        del request.block_ids[kept:]
        request.failed_block_ids.clear()
        request.registered_blocks = min(request.registered_blocks, kept)
        computed = min(request.num_computed_tokens, kept * self._limits.block_size, request.num_tokens - 1)
        request.num_computed_tokens = computed
        if request.first_token_time is None:
            loaded = max(0, computed - request.num_cached_tokens)
            request.num_external_tokens = min(request.num_external_tokens, loaded)
        if computed == 0:
            self._release(request.block_ids)
            self._return_to_waiting(request)
            return
        self._register_computed(request)
        if self._connector is not None:
            request.num_disk_tokens, request.num_shared_tokens = self._connector.lower_tier_tokens(request)
        self._running.append(request)

    def _blocks_for(self, token_count: int) -> int:
        return -(-token_count // self._limits.block_size)

    def _claimed_blocks(self, request: Request) -> int:
        return max(0, self._blocks_for(request.num_tokens) - len(request.block_ids)) + 1

    def _extend_table(self, request: Request, token_count: int) -> bool:
        missing = self._blocks_for(token_count) - len(request.block_ids)
        if missing <= 0:
            return True
        block_ids = self._pool.allocate(missing)
        if block_ids is None:
            return False
        request.block_ids += block_ids
        return True

    def _must_extend(self, request: Request, token_count: int) -> None:
        extended = self._extend_table(request, token_count)
        assert extended, (request.request_id, token_count, len(request.block_ids), self._pool.available_count)

    def _release(self, block_ids: list[int]) -> None:
        """Release the tail first: it is evicted before the head, without which it is useless."""
        self._pool.release(reversed(block_ids))

    def _holders(self) -> Iterator[Request]:
        return chain(self._running, self._loading.values())

    def _leave_queue(self, request: Request) -> None:
        self._loading.pop(request.request_id, None)
        for queue in (self._running, self._waiting):
            if request in queue:
                queue.remove(request)


def _finish_reason(request: Request, token_id: int, stop_token_ids: frozenset[int]) -> FinishReason | None:
    params, count = request.params, len(request.output_token_ids)
    if token_id in stop_token_ids and not params.ignore_eos and count >= params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if count >= request.max_output_tokens else None
