"""Rank's side of the connector: executes the leader's orders on one rank, and reports ended requests to TensorRT-LLM.

All hooks run in the event-loop thread of the rank's executor. Each layer group of the KV cache has a worker and a
segment of its own, so that a block can have a different id in each group.

    bind          takes the orders of a step
    start         starts its loads
    finish        starts its offloads: the forward pass that computes their blocks has been submitted
    ended         at the end of each iteration, also without a forward pass. Offloads that were not started by then are
                  reported as failed to the leader, because nothing has computed their blocks

A load ends when all its blocks are there. TensorRT-LLM does not accept a failure; a worker repeats a failed copy until
it succeeds. A save ends when every copy that ran when the request ended has stopped.

Rank 0 has both sides in one process, and so finds the leader's side. The other ranks are MPI processes. Their reports
reach rank 0 through a collective operation of TensorRT-LLM, in which every rank takes part once, when it registers its
KV cache; also a rank that failed, because the others wait for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvbm.boundary import Boundary, contained
from kvbm.device.worker import HostCapacity, Worker
from kvbm.engines.trtllm.messages import NOTHING, RankReport, TransferOrders
from kvbm.errors import EnvironmentProblem
from kvbm.host.processes import boot_id
from kvbm.plan import Offload, Onboard, StepPlan

if TYPE_CHECKING:
    import torch

    from kvbm.config.schema import ConnectorConfig
    from kvbm.engines.trtllm.leader_side import LeaderSide
    from kvbm.host.layout import BlockLayout

_Value = TypeVar("_Value")
_Order = TypeVar("_Order", Onboard, Offload)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """G1 memory of one layer group on this rank."""

    layout: BlockLayout
    storages: list[torch.Tensor]


class RankSide:
    """See the module's text. `saves_one_by_one`: the engine releases only one ended request per iteration, so that
    every rank reports them in the order in which they ended."""

    leader: ClassVar[LeaderSide | None] = None  # of the newest engine in this process

    def __init__(self, config: ConnectorConfig, *, rank_count: int, saves_one_by_one: bool) -> None:
        self._config = config
        self._rank_count = rank_count
        self._saves_one_by_one = saves_one_by_one
        self._rank = 0
        self._workers: list[Worker] = []
        self._orders = NOTHING
        self._due = NOTHING  # its offloads have not been started
        self._newest = 0  # generation of the newest onboard that this rank got
        self._loads: dict[int, list[Onboard]] = {}  # per request that loads: one order per layer group, or none
        self._loading: set[int] = set()  # ids that the engine waits for
        self._saving: dict[int, list[set[int]]] = {}  # ended requests -> copies that ran then, per worker
        self.boundary = Boundary()

    def register(self, memories: Sequence[GroupMemory]) -> None:
        """Allocate the host memory and connect the ranks. Every rank calls it once. Raises EnvironmentProblem on all
        ranks if one of them fails."""
        self._rank = _own_rank() if self._rank_count > 1 else 0
        reports = self._gathered(self._allocated(memories))
        error = next((f"rank {one.rank}: {one.error}" for one in reports if one.error is not None), None)
        if error is None and self._rank == 0:
            error = self._connected(reports)
        errors = self._gathered(error)
        if (error := next((one for one in errors if one is not None), None)) is not None:
            raise EnvironmentProblem(f"kvbm cannot start: {error}")

    def _allocated(self, memories: Sequence[GroupMemory]) -> RankReport:
        error = None
        try:
            self._workers = self._create_workers(memories)
        except Exception as caught:  # reported to all ranks, which then fail together
            log.error("kvbm: rank %d cannot allocate host memory", self._rank, exc_info=caught)
            error = f"{type(caught).__name__}: {caught}"
        return RankReport(
            self._rank,
            tuple(worker.info for worker in self._workers),
            block_count=memories[0].layout.block_count,
            config_digest=self._config.digest(),
            boot_id=boot_id(),
            error=error,
        )

    def _create_workers(self, memories: Sequence[GroupMemory]) -> list[Worker]:
        host = self._config.tiers.host_memory()
        stride = sum(memory.layout.slot_stride for memory in memories)
        capacity = HostCapacity(capacity_bytes=host.capacity_bytes, block_count=host.blocks)
        slots = HostCapacity(block_count=capacity.slot_count(stride, self._rank_count))
        return [
            Worker.create(
                memory.layout,
                memory.storages,
                slots,
                rank=self._rank * len(memories) + group,
                segment_count=self._rank_count * len(memories),
                thread_count=self._config.transfer.max_concurrent,
                binds_memory=self._config.transfer.numa,
                repeats_onboards=True,
            )
            for group, memory in enumerate(memories)
        ]

    def _gathered(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks, in the order of the ranks. Every rank must call it."""
        if self._rank_count == 1:
            return [value]
        from tensorrt_llm._utils import mpi_allgather

        return list(mpi_allgather(value))

    def _connected(self, reports: Sequence[RankReport]) -> str | None:
        """Create the leader; return the reason if that is not possible."""
        if self.leader is None:
            return f"process {os.getpid()} of rank 0 has no DynamoKVBMConnectorLeader"
        try:
            self.leader.connect(reports)
        except Exception as error:  # raised on all ranks together
            log.error("kvbm: the leader cannot start", exc_info=error)
            return f"{type(error).__name__}: {error}"
        return None

    @property
    def is_leading(self) -> bool:
        """Whether the leader is in this process."""
        return self._rank == 0

    @contained()
    def bind(self, orders: TransferOrders) -> None:
        self._start_loads()
        self._drop_due()
        self._orders = self._due = orders

    @contained()
    def start(self) -> None:
        """Start the loads of the bound orders."""
        self._start_loads()

    @contained()
    def finish(self) -> None:
        orders, self._due = self._due, NOTHING
        if not orders.plan.offloads:
            return
        for group, worker in enumerate(self._workers):
            mine = tuple(_in_group(order, group, orders.tables) for order in orders.plan.offloads)
            worker.finish(StepPlan(orders.plan.step, offloads=mine))

    @contained(lambda: ([], []))
    def ended(self, saving: Iterable[int], loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """Note the ids that the engine waits for from now on; return (saved, loaded) ids that have ended."""
        saving = list(saving)
        self._start_loads()  # if the engine has not called `start` in this iteration
        self._poll()
        self._loading.update(loading)
        for request_id in saving:
            self._saving[request_id] = [worker.generations() for worker in self._workers]
        loaded = [request_id for request_id in self._loading if self._is_loaded(request_id)]
        for request_id in loaded:
            self._loading.discard(request_id)
            del self._loads[request_id]
        return self._take_saved(), loaded

    @contained()
    def close(self) -> None:
        # The leader still reads this memory, to write it to lower tiers; the end of all processes frees it.
        for worker in self._workers:
            worker.stop() if self._config.tiers.has_lower else worker.close()

    def _start_loads(self) -> None:
        """Start the loads of the bound orders. One that is repeated as overdue starts if this rank never got it."""
        orders, self._orders = self._orders, NOTHING
        plan = orders.plan
        onboards = [one for one in (*plan.onboards, *plan.overdue_onboards) if one.generation > self._newest]
        by_generation = {order.generation: order for order in onboards}
        self._newest = max((self._newest, *by_generation))
        for request_id, generation in orders.loads:
            if generation is None:
                self._loads[request_id] = []
            elif (order := by_generation.get(generation)) is not None:
                groups = range(len(self._workers))
                self._loads[request_id] = [_in_group(order, group, orders.tables) for group in groups]
        for group, worker in enumerate(self._workers):
            mine = tuple(_in_group(order, group, orders.tables) for order in onboards)
            if mine or plan.overdue_offloads:
                worker.start(StepPlan(plan.step, onboards=mine, overdue_offloads=plan.overdue_offloads))

    @contained()
    def _poll(self) -> None:
        self._drop_due()
        for worker in self._workers:
            worker.poll()

    def _drop_due(self) -> None:
        """Report offloads as failed whose forward pass did not run."""
        plan, self._due = self._due.plan, NOTHING
        if plan.offloads:
            for worker in self._workers:
                worker.start(StepPlan(plan.step, overdue_offloads=plan.offloads))

    def _is_loaded(self, request_id: int) -> bool:
        orders = self._loads.get(request_id)
        return orders is not None and all(
            worker.has_onboarded(order) for worker, order in zip(self._workers, orders, strict=False)
        )

    def _take_saved(self) -> list[int]:
        running = [worker.generations() for worker in self._workers]
        saved: list[int] = []
        for request_id, wanted in list(self._saving.items()):
            has_ended = all(a.isdisjoint(b) for a, b in zip(wanted, running, strict=True))
            if has_ended:
                saved.append(request_id)
                del self._saving[request_id]
            if self._saves_one_by_one and (saved or not has_ended):
                break
        return saved


def _own_rank() -> int:
    from tensorrt_llm._utils import mpi_rank

    return int(mpi_rank())


def _in_group(order: _Order, group: int, tables: dict[int, tuple[int, ...]]) -> _Order:
    """Return the order with the block ids of one layer group."""
    if not tables:
        return order
    return replace(order, block_ids=tuple(tables[block_id][group] for block_id in order.block_ids))
