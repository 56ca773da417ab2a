"""Opening: creates the leader of an engine, when all ranks have their host memory. Starts the processes of its tiers.
The leader knows of a tier what tiers/lower_tier.py says; a tier is a folder in tiers/ and a row of TIERS.

    segments of the ranks ──▶ Region ─────────────────────┐
    profile and traits ─────▶ LeaderSettings ─────────────┼──▶ GuardedLeader, StorageLeader
    identity ───────────────▶ disk tier and shared tier ──┘

The tiers are opened in parallel. One that hangs is left out until it answers. Tiers that outlive the engine or that
several engines share keep the blocks of each namespace apart: those that are interchangeable. Engines with equal
content have equal namespaces, on all machines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypeVar

from kvbm.device.worker import HostCapacity
from kvbm.hashing import namespace
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.leader.guarded import GuardedLeader
from kvbm.leader.storage_leader import StorageLeader
from kvbm.tiers.disk.settings import DiskSettings, Namespace, Progress
from kvbm.tiers.disk.tier import DiskTier
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks, LeaderSettings
from kvbm.tiers.shared.tier import SharedTier
from kvbm.types import SegmentInfo

if TYPE_CHECKING:
    from kvbm.boundary import Boundary
    from kvbm.config.schema import ConnectorConfig, DiskTierSection
    from kvbm.host.layout import BlockLayout
    from kvbm.tiers.disk.service.client import DiskSupervisor
    from kvbm.tiers.lower_tier import LowerTier, OpenTier, TierContext
    from kvbm.tiers.shared.service.client import SharedClient

DAY_S = 86_400.0
WAITS = "the files of the model are being read to identify their content"
KV_FORMAT = 2  # of blocks; increase it when kvbm stores the same KV in other bytes
DISPLAY = "model"  # shown to users; it does not count
Identity = tuple[Mapping[str, object], str]
"""Everything that decides the bytes and hashes of a block, except the layouts of the segments, and a doubt: why blocks
of this engine could be wrong for another one of equal identity, empty if they could not. `model` is shown to users and
does not count."""
BegunTier = tuple["DiskSupervisor | SharedClient", "OpenTier"]  # its process, and what makes a tier of it
Result = TypeVar("Result")
AnyLeader = TypeVar("AnyLeader", GuardedLeader, StorageLeader)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAtStart:
    """What an integration knows of its engine. `g1_blocks` is the number of blocks in device memory. `identity` is
    called only if there is a tier below host memory. `progress` follows the allocation of disk space. `info` are labels
    of the metric `kvbm_info`."""

    segments: Sequence[SegmentInfo]
    traits: EngineTraits
    g1_blocks: int
    identity: Callable[[], Future[Identity]]
    progress: Progress | None = None
    info: Mapping[str, str] = field(default_factory=dict)


def open_leader(
    boundary: Boundary, config: ConnectorConfig, engine: EngineAtStart, callbacks: LeaderCallbacks
) -> GuardedLeader:
    """Return the leader of an engine. Raises EnvironmentProblem."""
    return _opened(partial(GuardedLeader, boundary), config, engine, callbacks)


def open_storage_leader(config: ConnectorConfig, engine: EngineAtStart, callbacks: LeaderCallbacks) -> StorageLeader:
    """Return the leader for an engine that has its own host memory. Raises EnvironmentProblem."""
    return _opened(StorageLeader, config, engine, callbacks)


def open_storage(
    boundary: Boundary,
    config: ConnectorConfig,
    layout: BlockLayout,
    traits: EngineTraits,
    identity: Callable[[], Future[Identity]],
    *,
    info: Mapping[str, str],
    g1_blocks: int = 1,
    rank_count: int = 1,
) -> tuple[Segment, StorageLeader]:
    """Allocate the slots of this rank, through which blocks of an engine with host memory of its own pass, and open the
    tiers below it. Raises EnvironmentProblem."""
    host = config.tiers.memory_below_engine(layout.slot_stride * rank_count)
    capacity = HostCapacity(capacity_bytes=host.capacity_bytes, block_count=host.blocks)
    slots = capacity.slot_count(layout.slot_stride, rank_count)
    segment = Segment.create(rank=0, layout=layout, slot_count=slots)
    engine = EngineAtStart([segment.info], traits, g1_blocks, identity, info=info)
    try:
        leader = open_storage_leader(config, engine, LeaderCallbacks(_no_device_blocks, _no_device_blocks))
    except BaseException:
        segment.close()
        raise
    boundary.counters = leader.counters
    return segment, leader


def _no_device_blocks(block_ids: Sequence[int]) -> None:
    assert not block_ids, "kvbm holds no device memory of this engine"


def _opened(
    create: Callable[[Region, LeaderSettings, LeaderCallbacks, list[OpenTier]], AnyLeader],
    config: ConnectorConfig,
    engine: EngineAtStart,
    callbacks: LeaderCallbacks,
) -> AnyLeader:
    phases_s = {"memory": max(segment.ready_s for segment in engine.segments)}
    with _timed(phases_s, "map"):
        region = Region.map(engine.segments)
    tiers: list[BegunTier] = []
    try:
        settings = LeaderSettings.of(config, engine.segments, engine.traits, g1_blocks=engine.g1_blocks)
        with _timed(phases_s, "tiers"):
            tiers = open_tiers(config, engine, settings)
        with _timed(phases_s, "blocks"):
            leader = create(region, settings, callbacks, [open_tier for _, open_tier in tiers])
    except BaseException:
        for service, _ in tiers:
            service.close(0.0)
        region.close()
        raise
    leader.facts.startup_s.update(phases_s)
    counts = {"block_tokens": str(engine.traits.block_tokens), "ranks": str(len(engine.segments))}
    leader.facts.info.update({**counts, **engine.info})
    return leader


@contextmanager
def _timed(phases_s: dict[str, float], phase: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    phases_s[phase] = time.monotonic() - began_s


def open_tiers(config: ConnectorConfig, engine: EngineAtStart, settings: LeaderSettings) -> list[BegunTier]:
    """Open the tiers below host memory, the nearest first. Without a shared tier whose blocks are in doubt
    (`namespace_of`). Raises EnvironmentProblem if one cannot be used.

    If the identity is not known yet, the tiers are opened when it is, and blocks stay in host memory until then. Blocks
    in doubt are not kept on disk for the next start.
    """
    if not config.tiers.has_lower:
        return []
    identity = engine.identity()
    begun: list[BegunTier] = []
    try:
        for begin in TIERS:
            if (tier := begin(config, engine, settings, identity)) is not None:
                begun.append(tier)
        for service, _ in begun:
            service.await_opening()
    except BaseException:
        for service, _ in begun:
            service.close(0.0)
        raise
    return begun


def _begin_disk(
    config: ConnectorConfig, engine: EngineAtStart, settings: LeaderSettings, identity: Future[Identity]
) -> BegunTier | None:
    section = config.tiers.disk
    if section is None:
        return None
    from kvbm.tiers.disk.service.client import DiskSupervisor

    named = _then(identity, partial(_disk_settings, section, engine.segments))
    if not named.done():
        log.info("kvbm: %s: the disk tier is off until then", WAITS)
    disk = DiskSupervisor(named, engine.segments, hash_bytes=engine.traits.hash_bytes, progress=engine.progress)

    def open_tier(context: TierContext) -> LowerTier:
        if (count := disk.slot_count) > 0:
            log.info("kvbm: space for %d blocks in %s (I/O: %s)", count, section.directory, disk.process.io_name)
        return DiskTier(disk, context)

    return disk, open_tier


def _disk_settings(
    section: DiskTierSection, segments: Sequence[SegmentInfo], identity: Identity
) -> tuple[DiskSettings, Namespace]:
    name, doubt = namespace_of(segments, identity)
    if section.persist and doubt:
        log.warning("kvbm: blocks will not stay on disk after this engine exits: %s", doubt)
    settings = DiskSettings(
        directory=Path(section.directory).expanduser(),
        capacity_bytes=section.capacity_bytes,
        block_count=section.blocks,
        allocator=section.allocator,
        zerofill=section.zerofill,
        o_direct=section.o_direct,
        io=section.io,
        threads=section.threads,
        persist=section.persist and not doubt,
        reclaim=section.reclaim,
        fit=section.fit,
    )
    return settings, name


def _begin_shared(
    config: ConnectorConfig, engine: EngineAtStart, settings: LeaderSettings, identity: Future[Identity]
) -> BegunTier | None:
    section = config.tiers.shared
    if section is None:
        return None
    from kvbm.tiers.shared.service.client import BlockShape, SharedClient
    from kvbm.tiers.shared.settings import SharedSettings

    def named(identity: Identity) -> tuple[bytes, Mapping[str, object]] | None:
        name, doubt = namespace_of(engine.segments, identity)
        if doubt:
            log.warning("kvbm: this engine does not use the shared tier: %s", doubt)
            return None
        facts = {"block_bytes": settings.block_bytes, "block_tokens": settings.traits.block_tokens}
        return name.digest, {**facts, **public_facts(name)}

    disk = config.tiers.disk
    shared_settings = SharedSettings(
        url=section.resolved_url(),
        protection=section.protection,
        key_file=None if section.key_file is None else Path(section.key_file).expanduser(),
        expire_s=section.expire_days * DAY_S,
        writes=section.write,
        requests=section.requests,
        node_directory=None if disk is None else Path(disk.directory).expanduser(),
    )
    has_extents = len(settings.groups) == 1 and settings.traits.names_whole_chains
    shape = BlockShape(settings.traits.hash_bytes, settings.traits.block_tokens, has_extents)
    name = _then(identity, named)
    if not name.done():
        log.info("kvbm: %s: the shared tier is off until then", WAITS)
    elif name.result() is None:
        return None
    shared = SharedClient(name, shared_settings, engine.segments, shape)

    def open_tier(context: TierContext) -> LowerTier:
        name, count, size = shared.process.opened
        if count:
            url, size_mib = section.url, size / 2**20
            log.info("kvbm: shared tier %s (%s), %d blocks in an object of %.1f MiB", url, name, count, size_mib)
        return SharedTier(shared, context)

    return shared, open_tier


TIERS = (_begin_disk, _begin_shared)


def _then(future: Future[Identity], function: Callable[[Identity], Result]) -> Future[Result]:
    """Return a future of `function(result)`, done at once if `future` is. Raises what `function` raises then."""
    after: Future[Result] = Future()
    if future.done():
        after.set_result(function(future.result()))
    else:
        future.add_done_callback(lambda done: after.set_result(function(done.result())))
    return after


def namespace_of(segments: Sequence[SegmentInfo], identity: Identity) -> tuple[Namespace, str]:
    """Return the namespace of an engine's blocks, and why others must not use them, empty if they may."""
    facts, doubt = identity
    layouts = [[info.block_bytes, info.slot_stride, info.layout_digest] for info in segments if info.replica == 0]
    named = {"kvbm": KV_FORMAT, "layouts": layouts, **facts}
    digest = namespace({name: value for name, value in named.items() if name != DISPLAY})
    if not doubt and "engine" not in facts:
        doubt = "the engine does not say what determines its blocks"
    return Namespace(digest, named), doubt


def known(facts: Mapping[str, object], doubt: str = "") -> Future[Identity]:
    identity: Future[Identity] = Future()
    identity.set_result((facts, doubt))
    return identity


def public_facts(namespace: Namespace) -> dict[str, object]:
    """Return the facts of a namespace for people on other machines: without the directory of the model."""
    facts = dict(namespace.facts)
    if DISPLAY in facts:
        facts[DISPLAY] = PurePath(str(facts[DISPLAY])).name
    return facts
