"""What crosses between the two sides of the connector, and from a worker back: small, picklable, no bytes of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvbm.plan import StepPlan

if TYPE_CHECKING:
    from kvbm.leader.leader import LoadResult
    from kvbm.types import SegmentInfo


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is not there when types are checked
    """What each rank tells the leader once: where its segment lies, and what it was made from."""

    segment: SegmentInfo
    config_digest: str
    boot_id: str


@dataclass(frozen=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders for every rank. `failed_loads` ended badly before; vLLM takes that only from a worker. With
    `wants_answer` the leader has results that it can tell only when this step's output arrives."""

    plan: StepPlan
    failed_loads: tuple[LoadResult, ...] = ()
    wants_answer: bool = False


@dataclass(frozen=True)
class WordsWritten(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A rank has written control words in this step. It carries nothing: it makes an otherwise empty step's output
    reach the scheduler side, which then reads the words."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


NOTHING = StepOrders(StepPlan(step=0))  # of a step before the leader exists, and of none
