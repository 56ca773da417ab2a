"""Messages between the two sides of the connector: small and picklable, without bytes of blocks."""

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
    """What each rank sends to the leader once: the location of its segment, and its configuration."""

    segment: SegmentInfo
    config_digest: str
    boot_id: str


@dataclass(frozen=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders for every rank. `failed_loads` are loads that failed before: vLLM accepts a failure only from a
    worker. `wants_answer`: the leader has results that it can report only when this step's output arrives."""

    plan: StepPlan
    failed_loads: tuple[LoadResult, ...] = ()
    wants_answer: bool = False


@dataclass(frozen=True)
class WordsWritten(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A rank has written control words in this step. The message has no content: it makes vLLM pass the output of an
    otherwise empty step to the scheduler side, which then reads the words."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


NOTHING = StepOrders(StepPlan(step=0))  # orders before the leader exists, or without a step
