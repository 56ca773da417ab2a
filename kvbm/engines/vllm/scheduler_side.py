"""Scheduler side of the connector: translates vLLM's scheduler hooks into calls of the leader.

It runs in the process of vLLM's scheduler and sees no bytes. The leader is created when all ranks have sent their
segments and vLLM has bound its block pool; until then every hook does nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from kvbm.boundary import Boundary, contained, hook
from kvbm.core.groups import StateGroup
from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.vllm import idle_engine
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.announcer import Announcer
from kvbm.engines.vllm.block_tables import tables_of
from kvbm.engines.vllm.cache_groups import is_plain
from kvbm.engines.vllm.descriptions import forms_of
from kvbm.engines.vllm.eviction_queue import VllmEvictionQueue
from kvbm.engines.vllm.former_weights import FormerWeights
from kvbm.engines.vllm.media import Media, is_computed_elsewhere
from kvbm.engines.vllm.placement import PD_CONNECTORS
from kvbm.engines.vllm.request import UNLIMITED, VllmRequest, prompt_hashes
from kvbm.engines.vllm.snapshots import Snapshot, Snapshots
from kvbm.engines.vllm.telemetry import KvbmStats, StatsSource
from kvbm.engines.vllm.worker_side import NOTHING, Handshake, StepOrders, progress_log
from kvbm.errors import EnvironmentProblem
from kvbm.hashing import tenant
from kvbm.host.processes import boot_id
from kvbm.identity.description import Description, describe
from kvbm.leader.opening import EngineAtStart, open_leader
from kvbm.leader.request import LoadResult
from kvbm.observe.telemetry import Telemetry
from kvbm.text.outside import shown
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvbm.config.schema import ConnectorConfig
    from kvbm.engines.vllm.cache_groups import TransferGroup
    from kvbm.engines.vllm.engine_facts import VllmFacts
    from kvbm.leader.guarded import GuardedLeader

RESET_PATIENCE_S = 2.0
RESET_POLL_S = 0.0005

log = logging.getLogger(__name__)


class SchedulerSide:
    """Hooks of one engine's scheduler. `identity` returns what blocks on disk must match, and why they must not outlive
    the engine, empty if they may."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: Sequence[TransferGroup],
        facts: VllmFacts,
        identity: Callable[[], tuple[dict[str, object], str]],
    ) -> None:
        self._config = config
        self._facts = facts
        self._telemetry = Telemetry(
            config.metrics, engine=facts.index, control_directory=os.environ.get(CONTROL_VARIABLE)
        )
        self._identity = identity
        self._groups = groups
        self._announcer: Announcer | None = None
        self._snapshots = Snapshots(groups) if any(isinstance(one.group, StateGroup) for one in groups) else None
        self._tables = tables_of(groups, self._snapshots)
        self._due_tokens = self._tables.due_tokens
        self._pool: BlockPool | None = None
        self._handshakes: list[Handshake] = []
        self._requests: dict[str, VllmRequest] = {}
        self._failed_loads: list[LoadResult] = []
        self._prefills: dict[str, PrefillStats] = {}  # what vLLM reports as a request's usage
        self._loading: set[str] = set()  # requests whose load belongs to the step being scheduled
        self._step = (0, 0.0)  # tokens of the current step, and when it was scheduled
        self._stats = StatsSource()
        self._adapters = Adapters()
        self._media = Media(facts.hash_bytes, encodes_here=facts.encodes_here)
        self._keeps_blocks = False  # for the next start, or for other engines
        self._description: Future[Description] | None = None
        self._live: dict[str, Request] = {}  # all of them
        self._former: FormerWeights | None = None
        self.doubt = ""  # why blocks must not outlive the engine, besides what its identity says
        self._sibling = ""  # another connector, which may load KV for any request
        self.boundary = Boundary()
        self.leader: GuardedLeader | None = None

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool, self._former = pool, FormerWeights(pool)
        vars(pool)["reset_prefix_cache"] = partial(self._reset_pool, pool.reset_prefix_cache)
        self._tables.bind(pool)
        self._create_leader()

    def accept_handshakes(self, handshakes: Iterable[Handshake]) -> None:
        """Create the leader. Raises EnvironmentProblem unless all ranks are on this machine with equal configurations.

        vLLM may repeat the handshakes after a sleep. The leader then stays: the segments contain its generations.
        """
        ours = [handshake for handshake in handshakes if isinstance(handshake, Handshake)]
        if not ours:
            log.warning("kvbm is disabled for this engine: vLLM requested no handshake from its ranks")
            return
        if len(ours) != self._facts.rank_count:
            raise EnvironmentProblem(f"only {len(ours)} of {self._facts.rank_count} ranks sent a handshake")
        known, self._handshakes = self._handshakes, ours
        if self.leader is not None:
            if known != self._handshakes:
                raise EnvironmentProblem("ranks returned different segments after a sleep", hint="restart the engine")
            return
        for name, expected in (("config_digest", self._config.digest()), ("boot_id", boot_id())):
            names = {getattr(handshake, name) for handshake in self._handshakes}
            if names - {expected}:
                raise EnvironmentProblem(
                    f"the ranks have different values of `{name}`: {sorted(names | {expected})}",
                    hint="set the same DYN_KVBM_* variables for every process, or put the configuration into "
                    "`kv_connector_extra_config`",
                )
        if sibling := ours[0].sibling:
            self.doubt = f"`{sibling}` may load blocks of other weights"
            self._sibling = "" if sibling in PD_CONNECTORS else sibling
        self._create_leader()

    def _create_leader(self) -> None:
        if self._pool is None or not self._handshakes:
            return
        segments = [handshake.segment for handshake in self._handshakes]
        traits = EngineTraits(
            block_tokens=self._groups[0].group.block_tokens,
            hash_bytes=self._facts.hash_bytes + self._tables.suffix_bytes,
            groups=tuple(group.group for group in self._groups),
            gives_up_blocks=self._facts.gives_up_blocks,
            publishes_events=self._facts.publishes_events,
        )
        if self._facts.publishes_events:
            forms = forms_of(self._groups, self._facts.hash_bytes)
            self._announcer = Announcer(
                self.boundary, self._config.events, forms, expected_blocks=len(self._pool.blocks)
            )
            self._tables.announcer = self._announcer
        notes_of = None if self._announcer is None else self._announcer.notes_of
        evictions = self._evictions(self._pool)
        progress = progress_log("of disk space")
        self.leader = open_leader(
            self.boundary,
            self._config,
            EngineAtStart(
                segments, traits, len(self._pool.blocks), self._identity_of_blocks, progress, self._facts.info
            ),
            LeaderCallbacks(
                self._hold,
                self._release,
                self._tenant_of,
                self._telemetry.trace,
                notes_of,
                spans=self._telemetry.spans(self._trace_headers_of),
                ended=self._telemetry.ended,
                hint_of=self._hint_of,
                chain_of=self._chain_of,
                evictions=evictions,
            ),
        )
        self._telemetry.watch(self.leader, idle_engine.wake)
        log.info("kvbm: %d blocks in host memory over %d ranks", self.leader.region.slot_count, len(segments))

    def _evictions(self, pool: BlockPool) -> VllmEvictionQueue | None:
        """Return which blocks vLLM evicts next, if the profile needs it; None, with a warning, if that is not known."""
        if self._config.offload.to_host != "on_evict":
            return None
        if self._snapshots is None and pool.enable_caching:
            return VllmEvictionQueue(pool)
        reason = "the model has states" if pool.enable_caching else "vLLM's prefix caching is off"
        log.warning("kvbm: %s: `offload.to_host: on_evict` has no effect, all computed blocks are copied", reason)
        return None

    def _identity_of_blocks(self) -> Future[Description]:
        """Return the identity for the tiers below host memory, and note whether one of them keeps blocks."""
        identity = self._described()
        is_doubtful = identity.done() and bool(identity.result()[1])  # known already
        self._keeps_blocks = self._config.tiers.outlive_engine and not is_doubtful
        return identity

    def _described(self) -> Future[Description]:
        """Return what decides the bytes and hashes of a block, and why that may be in doubt."""
        if self._description is None:
            facts, doubt = self._identity()
            groups = [[group.index, repr(group.group), *filter(None, [group.state_form])] for group in self._groups]
            facts = {**facts, "groups": groups, "ranks": self._facts.rank_count}
            self._description = describe(facts, doubt or self.doubt)
        return self._description

    def _tenant_of(self, request_id: str) -> bytes:
        tracked = self._requests.get(request_id)
        return b"" if tracked is None else tenant(tracked.request.cache_salt)

    def _chain_of(self, token_ids: Sequence[int], salt: str | None) -> Sequence[bytes] | None:
        """Return the hashes of a prompt of plain tokens, if one chain names its blocks."""
        if not is_plain(self._groups):
            return None
        return prompt_hashes(token_ids, salt, self._groups[0].group.block_tokens, self._facts.hash_algorithm)

    def _hint_of(self, request_id: str) -> tuple[object, object]:
        tracked = self._requests.get(request_id)
        return (None, None) if tracked is None else (tracked.hint(), getattr(tracked.request, "session_id", None))

    def _trace_headers_of(self, request_id: str) -> Mapping[str, str] | None:
        """Return the trace context of a request; vLLM has it if its own spans are on."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else getattr(tracked.request, "trace_headers", None)

    def _hold(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def _release(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    @hook()
    def add_request(self, request: Request) -> None:
        self._live[request.request_id] = request
        if self._former is not None and self._former.has_changed and is_computed_elsewhere(request.kv_transfer_params):
            self._former.taint(request)
        media = self._media.add(request)
        adapter = request.lora_request
        if adapter is not None and self._adapters.use(adapter):
            self._forget(f"adapter `{shown(adapter.lora_name)}` changed")
        if adapter is not None and not self._adapters.is_certain(adapter):
            return
        self._due_tokens[request.request_id] = 0
        self._requests[request.request_id] = VllmRequest.of(request, media)

    @hook((0, False))
    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        tracked = self._requests.get(request.request_id)
        if self.leader is None or tracked is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        tracked.start, tracked.loaded = local_tokens, 0
        if tracked.media is not None and tracked.media.is_waiting(self._media.now_s()):
            return None, False
        most = min(request.num_tokens - self._tables.recomputed_tokens, tracked.max_load_tokens)
        found = self._tables.match(self.leader, tracked, tracked.named_tokens(most))
        if self._snapshots is not None and found is not None:
            self._ask_for_snapshot(request, local_tokens, found)
        if found and not self._facts.continues_prompts and local_tokens + found < request.num_tokens - 1:
            found = 0
        return found, bool(found)

    def _ask_for_snapshot(self, request: Request, local_tokens: int, found_tokens: int) -> None:
        """Let vLLM keep a snapshot where the request leaves a prefix that another one has stored.

        vLLM itself knows only the prefixes in G1. Without a snapshot there, no later request could resume from it. If
        host memory has that snapshot, vLLM would load it and not keep it for other requests.
        """
        assert self.leader is not None
        found_tokens += self.leader.lost_state_tokens(request.request_id)
        if found_tokens and hasattr(request, "shared_prefix_boundary"):
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, local_tokens + found_tokens)

    @hook(when_off=True)
    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if self.leader is None:
            return
        if (prefill := getattr(request, "prefill_stats", None)) is not None:
            self._prefills[request.request_id] = prefill
        if not external_tokens:
            self._offload_hit_in_g1(request, blocks)
        elif not self._onboard(request, blocks, external_tokens):
            assert self._pool is not None
            null = self._pool.null_block.block_id
            table = [block_id for group in blocks.get_block_ids() for block_id in group if block_id != null]
            self.leader.fail_load(request.request_id, table)

    @hook()
    def _offload_hit_in_g1(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Offload the snapshot of a hit in G1, if host memory has lost it: vLLM hands over only new ones."""
        tracked = self._requests.get(request.request_id)
        if self._snapshots is not None and self._pool is not None and tracked is not None:
            found = self._snapshots.in_g1(request, blocks.get_block_ids(), tracked.start, self._pool)
            if found is not None:
                self._offload_snapshot(tracked, found)

    def _offload_snapshot(self, tracked: VllmRequest, snapshot: Snapshot) -> None:
        is_generated = snapshot.tokens > tracked.request.num_prompt_tokens
        is_wanted = self._config.offload.generated or not is_generated
        if is_wanted and not self._is_stale(tracked.request):
            assert self.leader is not None
            self._tables.offload_snapshot(self.leader, tracked, snapshot)

    @hook(False)
    def _onboard(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> bool:
        """Start the load that the engine waits for. False if that is not possible."""
        tracked = self._requests.get(request.request_id)
        if self.leader is None or tracked is None:
            return False
        tables, end = blocks.get_block_ids(), tracked.start + external_tokens
        load = self._tables.to_load(tracked, tables, end)
        if load is None:
            return False
        chains = () if self._announcer is None else self._tables.chains(tracked)
        for position, chain in enumerate(chains):
            size = self._groups[position].group.block_tokens
            assert self._announcer is not None
            self._announcer.describe(request, position, chain, tracked.start // size, end // size)
        self.leader.onboard(request.request_id, load[0], 0, load[1], tokens=external_tokens)
        self._loading.add(request.request_id)
        tracked.loaded = external_tokens
        return True

    @contained((0, 0))
    def lower_tier_tokens(self, request: Request) -> tuple[int, int]:
        """Return how many tokens of the request's last hit are on disk and in the shared tier."""
        return (0, 0) if self.leader is None else self.leader.lower_tier_tokens(request.request_id)

    @hook(when_off=True)
    def end_request(self, request: Request) -> None:
        self._media.end(request)
        self._count_prompt(request)
        tracked = self._requests.pop(request.request_id, None)
        self._due_tokens.pop(request.request_id, None)
        self._live.pop(request.request_id, None)
        if self._former is not None:
            self._former.end(request.request_id)
        if self.leader is not None and tracked is not None:
            self.leader.finish(request.request_id, *self._tables.chains(tracked))

    @contained()
    def _count_prompt(self, request: Request) -> None:
        """Count the prompt as vLLM does in the usage. If a stop string ends a request, vLLM's engine sees an abort."""
        if self.leader is None:
            return
        prefill = self._prefills.pop(request.request_id, None)
        reason = request.get_finished_reason()
        if prefill is None or reason is None or reason.name in ("ABORT", "ERROR"):
            self.leader.counters.prompt_aborted_tokens += request.num_prompt_tokens
            return
        disk, shared = self.leader.lower_tier_tokens(request.request_id)
        self.leader.counters.count_prompt(
            request.num_prompt_tokens,
            device=prefill.num_local_cached_tokens,
            external=prefill.num_external_cached_tokens,
            disk=disk,
            shared=shared,
        )

    @hook(NOTHING, when_off=True)
    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        if self.leader is None:
            return NOTHING
        self._finish_and_offload(output)
        failed, self._failed_loads = tuple(self._failed_loads), []
        return StepOrders(self.leader.step(), failed, self.leader.needs_settle())

    @hook()
    def _finish_and_offload(self, output: SchedulerOutput) -> None:
        assert self.leader is not None
        for request_id in (output.preempted_req_ids or set()) - self._loading:  # a load starts after a preemption
            self._forget_preempted(request_id)
        self._loading.clear()
        self._media.look_again()
        for snapshot in self._snapshots.handed_over(output) if self._snapshots is not None else ():
            if (tracked := self._requests.get(snapshot.request_id)) is not None:
                self._offload_snapshot(tracked, snapshot)
        requests, cached = self._requests, output.scheduled_cached_reqs
        self._note_origins(output)
        for new in output.scheduled_new_reqs:
            if (tracked := requests.get(new.req_id)) is not None:
                tracked.block_ids = self._tables.own(new.block_ids)
                self._inherit(tracked, new.block_ids)
                if not self._is_stale(tracked.request):
                    self._tables.offload(self.leader, [(tracked, new.num_computed_tokens)], output)
        resumed, extend = cached.resumed_req_ids, self._tables.extend
        scheduled, due_tokens, due = output.num_scheduled_tokens, self._due_tokens.get, []
        running = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, computed in running:  # hundreds, of which few complete a block
            if block_ids is not None and (tracked := requests.get(request_id)) is not None:
                if request_id in resumed:  # it has only these blocks
                    tracked.block_ids = self._tables.own(block_ids)
                    self._inherit(tracked, block_ids)
                else:
                    extend(tracked, block_ids)
            if computed + scheduled[request_id] >= due_tokens(request_id, UNLIMITED):
                due.append((requests[request_id], computed))
        due = [one for one in due if not self._is_stale(one[0].request)]
        self._tables.offload(self.leader, due, output)
        self._step = output.total_num_scheduled_tokens, time.monotonic()

    @hook(when_off=True)
    def settle(self, output: KVConnectorOutput) -> None:
        """Report loads that succeeded. The workers must report failures, one step later."""
        if self.leader is None:
            return
        tokens, began_s = self._step
        self.leader.note_step(tokens, time.monotonic() - began_s)
        results = self.leader.settle()
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
        if self.leader is None:
            return bool(self._failed_loads)
        return bool(self._failed_loads) or self.leader.has_pending() or self._has_events()

    @contained(list)
    def take_events(self) -> list[KVCacheEvent]:
        """Return which blocks were added to and removed from each tier. Many of them come over several steps."""
        if self._announcer is None or self.leader is None:
            return []
        return self._announcer.take(self.leader.take_events())

    def _has_events(self) -> bool:
        """Whether a step is needed to publish events: vLLM takes them in steps only."""
        assert self.leader is not None
        return self._announcer is not None and (self._announcer.has_work() or self.leader.has_events())

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
            if tokens >= tracked.start + tracked.loaded + max(group.group.block_tokens for group in self._groups):
                tracked.media.distrust()

    @contained()
    def take_stats(self) -> KvbmStats | None:
        return None if self.leader is None else self._stats.take(self.leader, has_requests=bool(self._requests))

    @hook(False, when_off=True)
    def reset(self) -> bool:
        """Forget every block. vLLM also calls this after a change of the weights, and does not say so.

        True also if a disk deletes its blocks later: vLLM would answer 500 to `/pause` and `/sleep`, and no engine
        finds one of them.
        """
        self._forget("the cache was reset, possibly because the weights change")
        return True

    @hook(when_off=True)
    def weights_may_change(self, cause: str) -> None:
        self._forget(f"{cause} can change the weights")

    @hook(when_off=True)
    def adapter_is_loaded(self, adapter: LoRARequest) -> None:
        if self._adapters.load(adapter):
            self._forget(f"adapter `{shown(adapter.lora_name)}` was loaded again")

    def _forget(self, why: str) -> None:
        """Forget every block in every tier and in vLLM's prefix cache; keep no later one for the next start.

        Requests that have KV of the former weights continue with it. Their blocks are never offloaded, and vLLM's
        prefix cache never gets them, or else other requests would bring them back to us.
        """
        if self.leader is None:
            return
        assert self._former is not None
        if self._keeps_blocks:
            self._keeps_blocks = False
            log.warning("kvbm: %s: no block of this engine will stay on disk after it exits", why)
        if self._sibling and not self._former.has_changed:
            log.warning(
                "kvbm: %s: no block is offloaded any more: `%s` may load blocks of former weights", why, self._sibling
            )
        self._former.change(self._live.values())
        self.leader.reset(ends_persistence=True)  # it logs a tier that is off until its blocks are deleted

    def _is_stale(self, request: Request) -> bool:
        former = self._former
        return former is not None and (former.is_stale(request) or (former.has_changed and bool(self._sibling)))

    def _inherit(self, tracked: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        if self._former is not None and self._former.has_changed:
            self._former.inherit(tracked.request, [block_id for table in tables for block_id in table])

    def close(self) -> None:
        """Write blocks that are only in host memory to disk. The ranks have ended; their memory is still mapped."""
        if self.leader is not None:
            self.leader.close()
        self.boundary.attempt("close", self._telemetry.close)
        self._media.close()

    def _reset_pool(self, reset: Callable[[], bool]) -> bool:
        """Reset vLLM's prefix cache, which refuses while a block is in use, after offloads have released their blocks.

        Replaces the method of vLLM's block pool, because vLLM calls the connector only after this one.
        """
        self._end_offloads()
        is_reset = reset()
        if is_reset and self._announcer is not None:  # vLLM publishes AllBlocksCleared, which means every tier
            self._announcer.announce_again()
        return is_reset

    @hook()
    def _end_offloads(self) -> None:
        """Give the offloads RESET_PATIENCE_S to end, unless others use blocks too, and drop those that have not ended.

        Between two steps nothing else makes them release their blocks, and an engine inside the user's process runs no
        steps after its last request. Those that hold no blocks must end too: before 0.33, vLLM does not say that it
        sleeps, and unmaps the KV cache after a reset.
        """
        if self.leader is None or self._pool is None:
            return
        references = sum(block.ref_cnt for block in self._pool.blocks if not block.is_null)
        if references != self.leader.held_references():
            return
        deadline_s = time.monotonic() + RESET_PATIENCE_S
        while are_running := self.leader.settle_offloads():
            if time.monotonic() > deadline_s:
                break
            time.sleep(RESET_POLL_S)
        if are_running:
            log.warning("kvbm: copies to host memory did not end within %g s; dropping them", RESET_PATIENCE_S)
            self.leader.abandon_offloads()

    def _forget_preempted(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            assert self.leader is not None
            self.leader.finish(request_id, *self._tables.chains(tracked), is_preempted=True)
            tracked.block_ids = []
            tracked.described = []
            self._due_tokens[request_id] = 0
