"""Opens the tiers below an engine that has its own host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvbm.device.worker import HostCapacity
from kvbm.engines.opening import EngineAtStart, Identity, open_storage_leader
from kvbm.host.segment import Segment
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks

if TYPE_CHECKING:
    from kvbm.boundary import Boundary
    from kvbm.config.schema import ConnectorConfig
    from kvbm.host.layout import BlockLayout
    from kvbm.leader.storage_leader import StorageLeader


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
    """Allocate the slots of this rank, through which blocks pass, and open the tiers. Raises EnvironmentProblem."""
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
