"""Messages between the leader's side and the ranks. Small and picklable, without bytes of blocks.

Each rank sends one RankReport at start-up. The leader's side sends one StepOrders per engine step, as the metadata that
TensorRT-LLM broadcasts. Ranks send nothing back: control words carry the results, and TensorRT-LLM collects the ids of
ended requests from all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbm.plan import StepPlan
from kvbm.types import SegmentInfo


@dataclass(frozen=True, slots=True)
class RankReport:
    """`segments` has one entry per layer group. `error`: the rank has no host memory, for this reason."""

    rank: int
    segments: tuple[SegmentInfo, ...]
    block_count: int
    config_digest: str
    boot_id: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TransferOrders:
    """One step's orders for every rank.

    `loads` are (request id, generation of its onboard order); the generation is None if the load has no blocks.
    With several layer groups, `tables[block_id]` are the ids in all groups, and `block_id` is the id in the first one.
    """

    plan: StepPlan
    loads: tuple[tuple[int, int | None], ...] = ()
    tables: dict[int, tuple[int, ...]] = field(default_factory=dict)


NOTHING = TransferOrders(StepPlan(step=0))
