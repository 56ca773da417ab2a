"""The deciding half of the connector: vLLM's scheduler hooks, translated into calls of the leader.

It lives in the process of vLLM's scheduler and knows nothing of bytes. The leader exists as soon as the ranks have told
where their segments lie and vLLM has bound its block pool; until then every hook does nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbm.errors import EnvironmentProblem
from kvbm.hashing import tenant
from kvbm.host.region import Region
from kvbm.leader.disk_tier import open_disk
from kvbm.leader.leader import Leader, LoadResult
from kvbm.leader.offloads import NO_BLOCK
from kvbm.leader.settings import EngineTraits, LeaderCallbacks, LeaderSettings
from kvbm.observe.telemetry import Telemetry
from kvbm.vllm_integration.cache_groups import boot_id
from kvbm.vllm_integration.events import translate
from kvbm.vllm_integration.messages import NOTHING, Handshake, StepOrders
from kvbm.vllm_integration.progress import progress_log
from kvbm.vllm_integration.telemetry import KvbmStats, StatsSource

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvbm.config.schema import ConnectorConfig
    from kvbm.disk.service.supervisor import DiskSupervisor
    from kvbm.types import SegmentInfo
    from kvbm.vllm_integration.cache_groups import CacheGroup

UNLIMITED = 1 << 62

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """A live request of vLLM's: its block table per group as the workers have it, and limits of the client's."""

    request: Request
    max_load_tokens: int
    max_offload_tokens: int
    block_ids: list[list[int]] = field(default_factory=list)
    chains: list[list[bytes]] = field(default_factory=list)
    start: int = 0
    due_tokens: int = 0  # with fewer computed tokens than these there is nothing to offload


class SchedulerSide:
    """Hooks of one engine's scheduler. `hash_bytes`: length of vLLM's block hashes; `continues_prompts`: whether the
    engine can compute the rest of a prompt, or only its last token, on top of a hit; `gives_up_blocks`: whether it
    computes what could not be loaded in other blocks; `identity` tells what blocks on disk must agree in, and whether
    the next start will; `engine` is its number in a data-parallel server."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: Sequence[CacheGroup],
        *,
        rank_count: int,
        hash_bytes: int,
        continues_prompts: bool,
        gives_up_blocks: bool,
        identity: Callable[[], tuple[dict[str, object], bool]],
        engine: int = 0,
    ) -> None:
        self._config = config
        self._telemetry = Telemetry(config.metrics, engine=engine)
        self._identity = identity
        self._groups = groups
        self._rank_count = rank_count
        self._continues_prompts = continues_prompts
        self._gives_up_blocks = gives_up_blocks
        self._is_plain = len(groups) == 1 and groups[0].group.looks_back_over_all
        self._hash_bytes = hash_bytes if self._is_plain else hash_bytes + 1
        self._hash_tokens = 0  # what one of vLLM's block hashes covers; its pool knows
        self._pool: BlockPool | None = None
        self._handshakes: list[Handshake] = []
        self._region: Region | None = None
        self._requests: dict[str, _Tracked] = {}
        self._failed_loads: list[LoadResult] = []
        self._loading: set[str] = set()  # of the step that is being scheduled
        self._step = (0, 0.0)  # tokens of the step under way, and when it was scheduled
        self._stats = StatsSource()
        self.leader: Leader | None = None

    # -- start-up ------------------------------------------------------------------------------------------------------

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hash_tokens = pool.hash_block_size
        self._create_leader()

    def accept_handshakes(self, handshakes: Iterable[Handshake]) -> None:
        """EnvironmentProblem unless all ranks are on this machine and were given the same configuration.

        vLLM may repeat them, after a sleep. The leader stays the one whose generations the segments carry.
        """
        ours = [handshake for handshake in handshakes if isinstance(handshake, Handshake)]
        if not ours:
            log.warning("kvbm stays out of this engine: its ranks were not asked where their memory lies")
            return
        if len(ours) != self._rank_count:
            raise EnvironmentProblem(f"{len(ours)} of {self._rank_count} ranks have told where their memory lies")
        told, self._handshakes = self._handshakes, ours
        if self.leader is not None:
            if told != self._handshakes:
                raise EnvironmentProblem("ranks came back with other segments", hint="start the engine again")
            return
        for name, expected in (("config_digest", self._config.digest()), ("boot_id", boot_id())):
            names = {getattr(handshake, name) for handshake in self._handshakes}
            if names - {expected}:
                raise EnvironmentProblem(
                    f"ranks disagree on {name}: {sorted(names | {expected})}",
                    hint="give every process the same DYN_KVBM_* variables, or the configuration in "
                    "`kv_connector_extra_config`",
                )
        self._create_leader()

    def _create_leader(self) -> None:
        if self._pool is None or not self._handshakes:
            return
        segments = [handshake.segment for handshake in self._handshakes]
        self._region = Region.map(segments)
        traits = EngineTraits(
            block_tokens=self._groups[0].group.block_tokens,
            hash_bytes=self._hash_bytes,
            groups=tuple(group.group for group in self._groups),
            gives_up_blocks=self._gives_up_blocks,
        )
        settings = LeaderSettings.of(self._config, segments, traits, g1_blocks=len(self._pool.blocks))
        self.leader = Leader(
            self._region,
            settings,
            LeaderCallbacks(self._hold, self._release, self._tenant_of, self._telemetry.trace),
            disk=self._open_disk(segments),
        )
        self._telemetry.watch(self.leader)
        log.info("kvbm: %d blocks in host memory over %d ranks", self._region.slot_count, len(segments))

    def _open_disk(self, segments: Sequence[SegmentInfo]) -> DiskSupervisor | None:
        if self._config.tiers.disk is None:
            return None
        facts, is_stable = self._identity()
        groups = [[group.index, repr(group.group)] for group in self._groups]
        return open_disk(
            self._config,
            segments,
            identity={**facts, "groups": groups, "ranks": self._rank_count},
            is_stable=is_stable,
            hash_bytes=self._hash_bytes,
            progress=progress_log("of disk space"),
        )

    def _tenant_of(self, request_id: str) -> bytes:
        tracked = self._requests.get(request_id)
        return b"" if tracked is None else tenant(tracked.request.cache_salt)

    def _hold(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def _release(self, block_ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        limits = request.kv_transfer_params or {}
        self._requests[request.request_id] = _Tracked(
            request,
            max_load_tokens=_limit(limits, "max_load_tokens"),
            max_offload_tokens=_limit(limits, "max_offload_tokens"),
        )

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        tracked = self._requests.get(request.request_id)
        if self.leader is None or tracked is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        # Of a hit of everything vLLM computes the last token again, whose window may begin in a block that is gone.
        end = min(request.num_tokens - (not self._is_plain), tracked.max_load_tokens)
        chains = self._chains(tracked)
        tracked.start = local_tokens
        if self._is_plain:
            size = self._groups[0].group.block_tokens
            blocks = self.leader.match(request.request_id, chains[0][: end // size], local_tokens // size)
            found = None if blocks is None else blocks * size
        else:
            found = self.leader.match_groups(request.request_id, chains, local_tokens, end)
        if found and not self._continues_prompts and local_tokens + found < request.num_tokens - 1:
            found = 0
        return found, bool(found)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        tracked = self._requests.get(request.request_id)
        if self.leader is None or tracked is None or not external_tokens:
            return
        tables, chains = blocks.get_block_ids(), self._chains(tracked)
        end = tracked.start + external_tokens
        hashes: list[bytes] = []
        block_ids: list[int] = []
        for cache_group, chain in zip(self._groups, chains, strict=True):
            size, table = cache_group.group.block_tokens, tables[cache_group.index]
            for index in range(tracked.start // size, end // size):
                if table[index] != self._null_block_id:
                    hashes.append(chain[index])
                    block_ids.append(table[index])
        self.leader.onboard(request.request_id, hashes, 0, block_ids, tokens=external_tokens)
        self._loading.add(request.request_id)

    def disk_tokens(self, request: Request) -> int:
        """Of the tokens that this request was last promised, those on disk."""
        return 0 if self.leader is None else self.leader.disk_tokens(request.request_id)

    def end_request(self, request: Request) -> None:
        tracked = self._requests.pop(request.request_id, None)
        if self.leader is not None and tracked is not None:
            self.leader.finish(request.request_id, *self._chains(tracked))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def build_orders(self, output: SchedulerOutput) -> StepOrders:
        if self.leader is None:
            return NOTHING
        for request_id in (output.preempted_req_ids or set()) - self._loading:  # a load is younger than a preemption
            self._forget_progress(request_id)
        self._loading.clear()
        scheduled, requests = output.num_scheduled_tokens, self._requests
        for new in output.scheduled_new_reqs:
            if (tracked := requests.get(new.req_id)) is not None:
                tracked.block_ids = self._tables(new.block_ids)
                self._offload(tracked, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tracked = requests.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = self._tables(block_ids)
            elif block_ids is not None:
                for table, more in zip(tracked.block_ids, self._tables(block_ids), strict=True):
                    table += more
            if computed + scheduled[request_id] >= tracked.due_tokens:
                self._offload(tracked, computed, output)
        self._step = output.total_num_scheduled_tokens, time.monotonic()
        failed, self._failed_loads = tuple(self._failed_loads), []
        return StepOrders(self.leader.step(), failed, self.leader.has_unreported())

    def settle(self, output: KVConnectorOutput) -> None:
        """Loads that have ended well go on at the next step. Failures must come from the workers, one step later."""
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

    def has_pending(self) -> bool:
        return bool(self._failed_loads) or (self.leader is not None and self.leader.has_pending())

    def take_events(self) -> Iterator[KVCacheEvent]:
        """What has come to host memory and gone from it since the last call."""
        events = self.leader.take_events() if self.leader is not None else []
        return translate(events, self._groups, is_plain=self._is_plain)

    def take_stats(self) -> KvbmStats | None:
        return None if self.leader is None else self._stats.take(self.leader)

    def reset(self) -> bool:
        return self.leader.reset() if self.leader is not None else True

    def close(self) -> None:
        """What only host memory has goes to disk. vLLM has ended its ranks; their memory is still mapped here."""
        if self.leader is not None:
            self.leader.close()
        self._telemetry.close()
        if self._region is not None:
            self._region.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _null_block_id(self) -> int:
        assert self._pool is not None
        null_block_id: int = self._pool.null_block.block_id
        return null_block_id

    def _chains(self, tracked: _Tracked) -> Sequence[list[bytes]]:
        """The names of a request's blocks, per group: vLLM's hash of the last tokens, and which group it is."""
        if self._is_plain:  # then a hash covers a block
            return (tracked.request.block_hashes,)
        if not tracked.chains:
            tracked.chains = [[] for _ in self._groups]
        hashes = tracked.request.block_hashes
        for cache_group, chain in zip(self._groups, tracked.chains, strict=True):
            suffix, span = bytes((cache_group.index,)), cache_group.group.block_tokens // self._hash_tokens
            chain += [bytes(hashes[end]) + suffix for end in range(span * (len(chain) + 1) - 1, len(hashes), span)]
        return tracked.chains

    def _forget_progress(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            assert self.leader is not None
            self.leader.finish(request_id, *self._chains(tracked))
            tracked.block_ids, tracked.due_tokens = [], 0

    def _tables(self, block_ids: Sequence[list[int]] | None) -> list[list[int]]:
        """vLLM's block ids per group as ours, in our order of groups."""
        null = self._null_block_id
        return [
            [NO_BLOCK if block_id == null else block_id for block_id in (block_ids[group.index] if block_ids else ())]
            for group in self._groups
        ]

    def _offload(self, tracked: _Tracked, computed_tokens: int, output: SchedulerOutput) -> None:
        """What the coming forward pass completes. Tokens that are only guessed do not count."""
        request_id = tracked.request.request_id
        guessed = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        tokens = computed_tokens + output.num_scheduled_tokens[request_id] - guessed
        tokens = min(tokens, tracked.max_offload_tokens)
        prompt_tokens = tracked.request.num_prompt_tokens
        tracked.due_tokens = UNLIMITED
        assert self.leader is not None
        for position, (cache_group, chain) in enumerate(zip(self._groups, self._chains(tracked), strict=True)):
            size = cache_group.group.block_tokens
            considered = self.leader.offload(
                request_id,
                chain,
                tracked.block_ids[position],
                computed_blocks=tokens // size,
                prompt_blocks=prompt_tokens // size,
                group=position,
            )
            tracked.due_tokens = min(tracked.due_tokens, (considered + 1) * size)


def _limit(limits: dict[str, Any], name: str) -> int:
    """A client's limit in tokens. What is no number limits nothing and is said in the log."""
    value = limits.get(name)
    if value is None:
        return UNLIMITED
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    log.warning("kvbm: `kv_transfer_params.%s` must be a number of tokens, not `%s`: it is ignored", name, value)
    return UNLIMITED
