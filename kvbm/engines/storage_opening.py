"""Opens the tiers below an engine that has its own host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvbm.device.worker import HostCapacity
from kvbm.engines.opening import EngineAtStart, Identity, open_storage_leader
from kvbm.host.segment import Segment
from kvbm.tiers.settings import SLICE_BLOCKS, EngineTraits, LeaderCallbacks

if TYPE_CHECKING:
    from kvbm.boundary import Boundary
    from kvbm.config.schema import ConnectorConfig
    from kvbm.host.layout import BlockLayout
    from kvbm.leader.storage_leader import StorageLeader

SHARED_BUFFER_BYTES = 512 << 20  # 2 GB/s, if a block waits for 0.25 s until the shared store has it


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
    """Allocate the slots of this rank, through which blocks pass, and open the tiers. Raises EnvironmentProblem.

    Above a shared tier, where the profile does not set their number, they have SHARED_BUFFER_BYTES over all ranks.
    """
    tiers, host = config.tiers, config.tiers.host_memory()
    capacity = HostCapacity(capacity_bytes=host.capacity_bytes, block_count=host.blocks)
    slots = capacity.slot_count(layout.slot_stride, rank_count)
    if tiers.shared is not None and (tiers.host is None or tiers.are_below_engine):
        slots = max(slots, min(SLICE_BLOCKS, SHARED_BUFFER_BYTES // (layout.slot_stride * rank_count)))
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
