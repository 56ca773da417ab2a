"""EngineBlocks: the blocks of one vLLM engine, whichever requests computed them.

It owns the leader, and what is true of all blocks: their identity, their weights, and their events. The leader is
created when all ranks have sent their segments and vLLM has bound its block pool, and stays until the engine ends.

The invariant: no request finds a block of former weights, in a tier or in vLLM's prefix cache. So everything that can
change the weights calls `_forget`, and no block of a request for which `is_stale` is true is offloaded.
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
from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.opening import EngineAtStart, open_leader
from kvbm.engines.vllm import idle_engine
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.announcer import Announcer
from kvbm.engines.vllm.cache_groups import is_plain
from kvbm.engines.vllm.descriptions import forms_of
from kvbm.engines.vllm.eviction_queue import VllmEvictionQueue
from kvbm.engines.vllm.former_weights import FormerWeights
from kvbm.engines.vllm.placement import PD_CONNECTORS
from kvbm.engines.vllm.request import VllmRequest, hint_of, prompt_hashes
from kvbm.engines.vllm.telemetry import KvbmStats, StatsSource
from kvbm.engines.vllm.worker_side import Handshake, progress_log
from kvbm.errors import EnvironmentProblem
from kvbm.hashing import tenant
from kvbm.host.processes import boot_id
from kvbm.identity.description import Description, describe
from kvbm.leader.late_offloads import SMALL_HOST, reason_to_copy_at_once
from kvbm.observe.telemetry import Telemetry
from kvbm.text.outside import shown
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from kvbm.config.schema import ConnectorConfig
    from kvbm.engines.vllm.block_tables import GroupedTables
    from kvbm.engines.vllm.engine_facts import VllmFacts
    from kvbm.leader.guarded import GuardedLeader

RESET_PATIENCE_S = 2.0
RESET_POLL_S = 0.0005

log = logging.getLogger(__name__)


class EngineBlocks:
    """See the module's text. `identity` returns what blocks on disk must match, and why they must not outlive the
    engine, empty if they may. *Borrows* `requests`: those that may use the cache, which SchedulerSide tracks."""

    def __init__(
        self,
        config: ConnectorConfig,
        facts: VllmFacts,
        identity: Callable[[], tuple[dict[str, object], str]],
        tables: GroupedTables,
        requests: Mapping[str, VllmRequest],
    ) -> None:
        self._config = config
        self._facts = facts
        self._telemetry = Telemetry(
            config.metrics, engine=facts.index, control_directory=os.environ.get(CONTROL_VARIABLE)
        )
        self._identity = identity
        self._tables = tables
        self._requests = requests
        self._announcer: Announcer | None = None
        self._handshakes: list[Handshake] = []
        self._stats = StatsSource()
        self._adapters = Adapters()
        self._keeps_blocks = False  # for the next start, or for other engines
        self._former = FormerWeights()
        self._sibling = ""  # another connector, which may load KV for any request
        self.doubt = ""  # why blocks must not outlive the engine, besides what its identity says
        self.pool: BlockPool | None = None
        self.boundary = Boundary()
        self.leader: GuardedLeader | None = None

    def bind_block_pool(self, pool: BlockPool) -> None:
        self.pool = pool
        self._former.bind(pool)
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
        if self.pool is None or not self._handshakes:
            return
        segments = [handshake.segment for handshake in self._handshakes]
        traits = EngineTraits(
            block_tokens=self._tables.groups[0].group.block_tokens,
            hash_bytes=self._facts.hash_bytes + self._tables.suffix_bytes,
            groups=tuple(group.group for group in self._tables.groups),
            gives_up_blocks=self._facts.gives_up_blocks,
            publishes_events=self._facts.publishes_events,
        )
        if self._facts.publishes_events:
            forms = forms_of(self._tables.groups, self._facts.hash_bytes)
            self._announcer = Announcer(
                self.boundary, self._config.events, forms, expected_blocks=len(self.pool.blocks)
            )
            self._tables.announcer = self._announcer
        notes_of = None if self._announcer is None else self._announcer.notes_of
        to_host, reason = self._to_host(self.pool, min(segment.slot_count for segment in segments))
        evictions = VllmEvictionQueue(self.pool) if to_host == "on_evict" else None
        progress = progress_log("of disk space")
        self.leader = open_leader(
            self.boundary,
            self._config,
            EngineAtStart(
                segments,
                traits,
                len(self.pool.blocks),
                self._described,
                progress,
                {**self._facts.info, "to_host": f"{to_host} ({reason})" if reason else to_host},
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

    def _to_host(self, pool: BlockPool, host_blocks: int) -> tuple[str, str]:
        """Return the `offload.to_host` that applies, and why if the profile leaves it open."""
        to_host, unable = self._config.offload.to_host, ""
        if self._tables.snapshots is not None:
            unable = "the model has states"
        elif not pool.enable_caching:
            unable = "vLLM's prefix caching is off"
        if to_host == "on_evict" and unable:
            log.warning("kvbm: %s: `offload.to_host: on_evict` has no effect, all computed blocks are copied", unable)
            return "always", unable
        if to_host != "auto":
            return to_host, ""
        if any(handshake.is_of_pair for handshake in self._handshakes):
            unable = "this engine prefills or decodes for another one"
        g1_blocks = len(pool.blocks)
        reason = unable or reason_to_copy_at_once(self._config.tiers, host_blocks=host_blocks, g1_blocks=g1_blocks)
        if reason:
            return "auto", f"when computed: {reason}"
        why = f"it has {host_blocks:,} blocks, less than {SMALL_HOST} times the {g1_blocks:,} of G1"
        return "on_evict", f"auto, once host memory is full: {why}"

    def _described(self) -> Future[Description]:
        """Return the identity for the tiers below host memory: what decides the bytes and hashes of a block, and why
        that may be in doubt. Note whether a tier keeps blocks after the engine has ended."""
        facts, doubt = self._identity()
        groups = [[one.index, repr(one.group), *filter(None, [one.state_form])] for one in self._tables.groups]
        described = describe({**facts, "groups": groups, "ranks": self._facts.rank_count}, doubt or self.doubt)
        is_doubtful = described.done() and bool(described.result()[1])  # known already
        self._keeps_blocks = self._config.tiers.outlive_engine and not is_doubtful
        return described

    def _tenant_of(self, request_id: str) -> bytes:
        tracked = self._requests.get(request_id)
        return b"" if tracked is None else tenant(tracked.request.cache_salt)

    def _hint_of(self, request_id: str) -> tuple[object, object]:
        tracked = self._requests.get(request_id)
        return (None, None) if tracked is None else hint_of(tracked.request)

    def _trace_headers_of(self, request_id: str) -> Mapping[str, str] | None:
        """Return the trace context of a request; vLLM has it if its own spans are on."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else getattr(tracked.request, "trace_headers", None)

    def _chain_of(self, token_ids: Sequence[int], salt: str | None) -> Sequence[bytes] | None:
        """Return the hashes of a prompt of plain tokens, if one chain names its blocks."""
        if not is_plain(self._tables.groups):
            return None
        return prompt_hashes(token_ids, salt, self._tables.groups[0].group.block_tokens, self._facts.hash_algorithm)

    def _hold(self, block_ids: Sequence[int]) -> None:
        assert self.pool is not None
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def _release(self, block_ids: Sequence[int]) -> None:
        assert self.pool is not None
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in block_ids])

    def begin(self, request: Request) -> bool:
        """Note a request that arrives. Return whether its blocks may be cached."""
        self._former.begin(request)
        adapter = request.lora_request
        if adapter is None:
            return True
        if self._adapters.use(adapter):
            self._forget(f"adapter `{shown(adapter.lora_name)}` changed")
        return self._adapters.is_certain(adapter)

    def end(self, request: Request) -> None:
        self._former.end(request.request_id)

    @contained(list)
    def take_events(self) -> list[KVCacheEvent]:
        """Return which blocks were added to and removed from each tier. Many of them come over several steps."""
        if self._announcer is None or self.leader is None:
            return []
        return self._announcer.take(self.leader.take_events())

    def has_events(self) -> bool:
        """Whether a step is needed to publish events: vLLM takes them in steps only."""
        announcer, leader = self._announcer, self.leader
        return announcer is not None and leader is not None and (announcer.has_work() or leader.has_events())

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
        if self._keeps_blocks:
            self._keeps_blocks = False
            log.warning("kvbm: %s: no block of this engine will stay on disk after it exits", why)
        if self._sibling and not self._former.has_changed:
            log.warning(
                "kvbm: %s: no block is offloaded any more: `%s` may load blocks of former weights", why, self._sibling
            )
        self._former.change()
        self.leader.reset(ends_persistence=True)  # it logs a tier that is off until its blocks are deleted

    def is_stale(self, request: Request) -> bool:
        """Return whether no block of a request may be offloaded any more."""
        return self._former.is_stale(request) or (self._former.has_changed and bool(self._sibling))

    def inherit(self, tracked: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        """Note with which blocks of the prefix cache a request begins."""
        if self._former.has_changed:
            self._former.inherit(tracked.request, [block_id for table in tables for block_id in table])

    def close(self) -> None:
        """Write blocks that are only in host memory to disk. The ranks have ended; their memory is still mapped."""
        if self.leader is not None:
            self.leader.close()
        self.boundary.attempt("close", self._telemetry.close)

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
        if self.leader is None or self.pool is None:
            return
        references = sum(block.ref_cnt for block in self.pool.blocks if not block.is_null)
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
