"""Settings of the leader: frozen values from the profile and from the engine, set at start-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvbm.core.groups import Group
from kvbm.metrics import WINDOW_REQUESTS
from kvbm.types import SegmentInfo

if TYPE_CHECKING:
    from kvbm.config.schema import ConnectorConfig, OffloadSection

HELD_SHARE_OF_G1 = 4  # offloads hold at most a quarter of the engine's blocks at a time
SLICE_BLOCKS = 4096  # of a long chain in a step; the work on them takes about a millisecond


@dataclass(frozen=True, slots=True)
class SpanNote:
    """Something that was done for a request: a `lookup`, a `load`, a `read` or a `copy` of it; or its `finish`. Times
    are read from the leader's clock. `facts` are attributes of the span."""

    request_id: str
    name: str
    began_s: float
    ended_s: float
    facts: Mapping[str, int | float | str]


class EvictionQueue(Protocol):
    """The blocks of G1 that no request uses, in the order in which the engine evicts them."""

    def contents_of(self, block_ids: Sequence[int]) -> Sequence[object]:
        """Return what the engine has in each block: another object each time that it fills the block."""
        ...

    def first(self, count: int, *, again: bool) -> Iterable[tuple[int, object]]:
        """Return those of the next `count` blocks that have a content, each with it, the one that is evicted first
        first. To be called once in each engine step, and with `again` after a step without a call, or if not all of
        the last ones were taken. Without it, nothing as long as the engine has evicted few of those that were examined
        last.
        """
        ...


@dataclass(frozen=True, slots=True)
class LeaderCallbacks:
    """Functions that the leader calls.

    `hold(block_ids)` and `release(block_ids)` count references in the engine's block pool: the engine does not reuse a
    held G1 block, whatever happens to its request. `tenant_of(request_id)` returns the tenant of a live request; it
    does not change while the request lives. `trace` gets the name and the values of each decision. `notes_of(hashes)`
    returns what is kept on disk next to each block, for the next start; empty for none. `clock` returns seconds.
    `hint_of(request_id)` returns the hint of a live request as its client wrote it, and the session that the engine
    knows; None for what it has not. `chain_of(token_ids, salt)` returns the hashes of the full blocks of a prompt; None
    if the engine has several chains for it.
    `spans` gets what was done for each request; None if spans are off. `ended` gets the chain of each request that has
    ended, and how many of its first blocks were looked up; None without `metrics.capacities`. With `evictions`, blocks
    are copied to host memory when the engine evicts them next; with `LeaderSettings.to_host: auto`, at once while host
    memory has free slots.
    """

    hold: Callable[[Sequence[int]], None]
    release: Callable[[Sequence[int]], None]
    tenant_of: Callable[[str], bytes] = lambda request_id: b""
    trace: Callable[..., None] | None = None
    notes_of: Callable[[Sequence[bytes]], Sequence[bytes]] | None = None
    clock: Callable[[], float] = time.monotonic
    spans: Callable[[SpanNote], None] | None = None
    ended: Callable[[Sequence[bytes], int], None] | None = None
    hint_of: Callable[[str], tuple[object, object]] = lambda request_id: (None, None)
    chain_of: Callable[[Sequence[int], str | None], Sequence[bytes] | None] = lambda token_ids, salt: None
    evictions: EvictionQueue | None = None


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Properties of the engine that the leader depends on.

    `block_tokens` is the number of tokens per block, `hash_bytes` the length of a sequence hash. `groups` are the KV
    cache groups, those with full attention first; an engine without groups has one. An engine that `gives_up_blocks`
    of a failed load computes in other blocks, so it need not wait for the end of an overdue load. One that
    `publishes_events` of host memory and disk calls `take_events` after each step.

    An engine that does not `accept_failed_loads` must get every block that it was promised. Therefore only blocks in
    host memory are promised, they stay pinned from `match` on, and no request waits for the load of another one. Blocks
    on disk are read into host memory ahead of their promise (prefetches.py).

    An engine that does not `name_whole_chains` asks for blocks without those before them. So each object in the shared
    tier has one block.
    """

    block_tokens: int
    hash_bytes: int = 16
    groups: tuple[Group, ...] = ()
    gives_up_blocks: bool = False
    accepts_failed_loads: bool = True
    publishes_events: bool = False
    names_whole_chains: bool = True

    @property
    def has_one_chain(self) -> bool:
        """Whether one chain names all blocks of a request, and the engine asks for the whole of it when it arrives."""
        groups = self.groups
        return self.names_whole_chains and len(groups) <= 1 and all(group.looks_back_over_all for group in groups)


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """Which blocks are written to a lower tier, and how long it may write at the end.

    `writes` is `frequency`, `always`, `on_evict` (the disk only) or `never` (the shared tier only).
    """

    writes: str = "frequency"
    frequency_threshold: int = 2
    frequency_decay_s: float = 600.0
    frequency_entries: int = 1_000_000
    drain_s: float = 0.0

    @classmethod
    def of(cls, offload: OffloadSection, writes: str, drain_s: float) -> TierPolicy:
        return cls(writes, offload.frequency_threshold, offload.frequency_decay_s, offload.frequency_entries, drain_s)


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """Settings of one leader.

    `block_bytes` is the payload of one block over all segments. Offloads hold at most `max_in_flight_blocks` G1 blocks
    at a time. The leader asks the workers for the result of a transfer every `overdue_steps` steps; while an onboard is
    older than that, or while a rank has been silent for `silence_s`, no further hit is promised. Hit rates cover the
    last `window_requests` requests. Longer chains than `slice_blocks` are handled in slices over several steps.

    Lower tiers are read in batches of at most `batch_blocks`. A load waits `read_timeout_s` for them at most. With
    `reads_always`, blocks are read even where computing them is faster. With `is_buffer`, host memory is not a tier:
    blocks only pass through it to the disk. `host_eviction` and `disk_eviction` are names of policies
    (docs/concepts/eviction.md). `to_host` says which blocks are copied to host memory: `auto`, `always` or
    `second_hit`; `on_evict` is `always` without LeaderCallbacks.evictions.
    `shared` is None unless the profile has the tier, which may be off anyway.
    """

    traits: EngineTraits
    block_bytes: int
    max_in_flight_blocks: int
    offload_generated: bool = True
    min_priority: int = 0
    overdue_steps: int = 2000
    silence_s: float = 2.0
    window_requests: int = WINDOW_REQUESTS
    slice_blocks: int = SLICE_BLOCKS
    batch_blocks: int = 16
    read_timeout_s: float = 30.0
    reads_always: bool = False
    is_buffer: bool = False
    host_eviction: str = "lru"
    disk_eviction: str = "lru"
    to_host: str = "auto"
    disk: TierPolicy = TierPolicy()
    shared: TierPolicy | None = None

    def __post_init__(self) -> None:
        assert self.overdue_steps > 1, "a transfer is one step old when its order goes out"

    @classmethod
    def of(
        cls, config: ConnectorConfig, segments: Sequence[SegmentInfo], traits: EngineTraits, *, g1_blocks: int
    ) -> LeaderSettings:
        """Return the settings for an engine with these segments and `g1_blocks` blocks of device memory."""
        offload, tiers = config.offload, config.tiers
        to_disk = "always" if tiers.host is None else offload.to_disk  # nothing can be hit in G2
        shared = None
        if tiers.shared is not None:
            shared = TierPolicy.of(offload, offload.to_shared if tiers.shared.write else "never", tiers.shared.drain_s)
        return cls(
            traits,
            block_bytes=sum(segment.block_bytes for segment in segments if segment.replica == 0),
            max_in_flight_blocks=max(1, g1_blocks // HELD_SHARE_OF_G1),
            offload_generated=offload.generated,
            min_priority=offload.min_priority,
            window_requests=config.metrics.window_requests,
            batch_blocks=config.transfer.batch_blocks,
            read_timeout_s=config.onboard.disk_timeout_s,
            reads_always=config.onboard.policy == "always",
            is_buffer=tiers.host is None,
            to_host=offload.to_host,
            host_eviction="lru" if tiers.host is None or not traits.has_one_chain else tiers.host.eviction,
            disk_eviction="lru" if tiers.disk is None or not traits.has_one_chain else tiers.disk.eviction,
            disk=TierPolicy.of(offload, to_disk, 0.0 if tiers.disk is None else tiers.disk.drain_s),
            shared=shared,
        )

    @property
    def groups(self) -> tuple[Group, ...]:
        """KV cache groups of the engine, at least one."""
        return self.traits.groups or (Group(self.traits.block_tokens),)

    @property
    def may_decline(self) -> bool:
        """Whether blocks may stay out of host memory: with `auto`, not if a lower tier takes every block from there."""
        if self.to_host != "auto":
            return self.to_host == "second_hit"
        return not any(tier is not None and tier.writes in ("always", "on_evict") for tier in (self.disk, self.shared))

    @property
    def can_cut_loads(self) -> bool:
        """Whether the engine can use the beginning of a load without the rest."""
        return self.traits.has_one_chain
