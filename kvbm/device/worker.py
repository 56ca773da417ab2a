"""Worker: copies blocks on one rank, between the rank's G1 memory and its segment.

It owns the rank's segment, the copier and the copying threads. It decides nothing: it executes a StepPlan and proves
each result in a control word. One thread owns it and calls, per engine step,

    start(plan)     before the forward pass: start onboards
    finish(plan)    after the forward pass: start offloads, whose sources are computed by then
    poll()          write the control words of failed copies, and the heartbeat

None of them waits. A copy that succeeds is proven by its thread: the leader can register an offload after the engine's
last step, and finds an onboard up to one step earlier. Onboards and offloads have separate threads, so that a hung
offload delays no request. An exception in one transfer fails that transfer on this rank and no other.

Ranks with equal KV have one segment together. Each of them copies a share of an offload's blocks, and a sample, so that
the leader notices if their KV is not equal. Each of them loads all blocks of an onboard.

Correctness depends on an order: payload bytes first, control word last. An onboard reads the words of its source slots
before the copy and after it, to detect a slot that was reused meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbm.boundary import Boundary, contained
from kvbm.device.copier import DeviceCopier
from kvbm.device.cuda import STREAMS_PER_DIRECTION
from kvbm.device.cuda_runtime import numa_node_of, on_device
from kvbm.device.pool import TransferPool
from kvbm.device.replicas import ALONE, Replicas
from kvbm.errors import EnvironmentProblem, TransferError
from kvbm.host.segment import Segment
from kvbm.plan import Offload, Onboard, StepPlan
from kvbm.types import SegmentInfo, SlotState

if TYPE_CHECKING:
    import torch

    from kvbm.device.pool import Finished
    from kvbm.host.layout import BlockLayout

WARNING_INTERVAL_S = 60.0
CPU_PARTS = 2  # one core does not use all memory bandwidth
MIN_PART_BYTES = 4 << 20  # smaller parts are not worth a thread
SLICE_BYTES = 64 << 20  # of larger orders, so that the parts of several orders can take turns

log = logging.getLogger(__name__)

_Order = TypeVar("_Order", Onboard, Offload)


@dataclass(slots=True)
class _Running(Generic[_Order]):
    """An order, the tickets of its parts that have not ended, and the first error of a part."""

    order: _Order
    tickets: set[int]
    error: BaseException | None = None

    def end(self, ticket: int, error: BaseException | None) -> bool:
        """Note the end of one part; return whether it was the last one."""
        self.tickets.discard(ticket)
        self.error = self.error or error
        return not self.tickets


class _UncopiedParts:
    """The number of parts of one order that are not copied yet. The threads that copy them share it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()

    def end_one(self) -> bool:
        """Return whether it was the last one. A part that fails never ends here."""
        with self._lock:
            self._count -= 1
            return self._count == 0


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Size of G2 for one engine: bytes as the sum over its segments, or a block count, which takes precedence."""

    capacity_bytes: int | None = None
    block_count: int | None = None

    def slot_count(self, slot_stride: int, segment_count: int) -> int:
        """Slots of one segment; every segment holds a shard of every block."""
        if self.block_count is not None:
            return self.block_count
        slots = (self.capacity_bytes or 0) // (slot_stride * segment_count)
        if slots == 0:
            raise EnvironmentProblem(
                f"host tier of {self.capacity_bytes} bytes is too small: one block requires "
                f"{slot_stride * segment_count} bytes",
                hint="raise `tiers.host.capacity`",
            )
        return slots


@dataclass(slots=True)
class CopyThreads:
    """The copying threads of a rank, and into which parts orders are divided for them.

    A part has at most `slice_bytes`, and the orders of a pool take turns. An onboard, for which a request waits, has at
    least `onboard_parts` parts, unless these would be smaller than `min_part_bytes`.
    """

    onboard_pool: TransferPool
    offload_pool: TransferPool
    onboard_parts: int = 1
    min_part_bytes: int = MIN_PART_BYTES
    slice_bytes: int = SLICE_BYTES

    @classmethod
    def start(cls, rank: int, count: int, *, is_device: bool) -> CopyThreads:
        """Start at most `count` threads for each direction."""
        onboards_at_once, offloads_at_once, parts = CPU_PARTS, 1, CPU_PARTS
        if is_device:  # copies of a device share one link, and more threads would only wait for a stream
            count = min(count, STREAMS_PER_DIRECTION)
            onboards_at_once, offloads_at_once, parts = count, count, 1
        return cls(
            TransferPool(count, name=f"kvbm-onboard-{rank}", parts_at_once=onboards_at_once, share_count=parts),
            TransferPool(count, name=f"kvbm-offload-{rank}", parts_at_once=offloads_at_once),
            onboard_parts=parts,
        )

    def parts(self, count: int, block_bytes: int, wanted: int) -> list[slice]:
        """Split `count` blocks into `wanted` parts, fewer if these would be too small, more if too large."""
        worth = count * block_bytes // self.min_part_bytes
        size = -(-count // max(1, min(wanted, worth)))
        size = max(1, min(size, self.slice_bytes // block_bytes))
        return [slice(begin, begin + size) for begin in range(0, count, size)]


class Worker:
    """Executes plans on one rank. See the module's text for the order of calls.

    With `repeats_onboards`, a failed onboard is copied again at each poll until it succeeds, for an engine that does
    not accept failed loads. Such an engine asks each rank with `has_onboarded` after `poll`, which then also writes the
    words of successful onboards: a word does not last, because the leader reuses the lane.
    """

    def __init__(
        self, segment: Segment, copier: DeviceCopier, threads: CopyThreads, *, repeats_onboards: bool = False
    ) -> None:
        self._segment = segment
        self.copier = copier
        self._threads = threads
        self._onboard_pool, self._offload_pool = threads.onboard_pool, threads.offload_pool
        self._onboards: dict[int, _Running[Onboard]] = {}
        self._offloads: dict[int, _Running[Offload]] = {}
        self._repeats_onboards = repeats_onboards
        self._threads_prove_onboards = not repeats_onboards
        self._repeats: list[Onboard] = []  # failed, to start again at the next poll
        self._has_written = False
        self._has_replicas = segment.info.replica_count > 1
        self._sampling = threading.Lock()  # of the sample slot, between copying threads
        self.boundary = Boundary()
        self._warned_s = float("-inf")

    @classmethod
    def create(
        cls,
        layout: BlockLayout,
        storages: Sequence[torch.Tensor],
        capacity: HostCapacity,
        *,
        rank: int = 0,
        segment_count: int = 1,
        replicas: Replicas = ALONE,
        thread_count: int = 4,
        binds_memory: bool = True,
        repeats_onboards: bool = False,
        progress: Callable[[int, int], None] | None = None,
        on_copier: Callable[[DeviceCopier], None] | None = None,
    ) -> Worker:
        """Allocate, prefault and pin this rank's segment, or the one that it shares with `replicas`, and start its
        threads. `segment_count` segments share the capacity. `binds_memory`: allocate on the NUMA node of the device,
        if it is known and there are several. `on_copier` gets the copier before it is used. Raises
        EnvironmentProblem."""
        slot_count = capacity.slot_count(layout.slot_stride, segment_count)
        pin = storages[0].is_cuda
        node = numa_node_of(storages[0]) if binds_memory else None
        shared = {"rank": rank, "layout": layout, "pin": pin, "progress": progress}
        with on_device(storages[0]):  # page-locks the memory
            segment = replicas.share(
                node,
                lambda nodes: Segment.create(
                    slot_count=slot_count, replica_count=replicas.count, nodes=nodes, **shared
                ),
                lambda owner: Segment.attach(owner, replica=replicas.index, **shared),
            )
        copier = DeviceCopier(layout, storages, segment)  # may fail: then there are no threads to end
        if on_copier is not None:
            on_copier(copier)
        threads = CopyThreads.start(rank, thread_count, is_device=pin)
        return cls(segment, copier, threads, repeats_onboards=repeats_onboards)

    @property
    def info(self) -> SegmentInfo:
        """Return what the leader needs to map this rank's segment."""
        return self._segment.info

    @contained()
    def start(self, plan: StepPlan) -> None:
        """Start the plan's onboards. The G1 blocks they write belong to no running request."""
        for offload in plan.overdue_offloads:
            self._deny_offload(offload)
        for onboard in plan.overdue_onboards:
            self._deny_onboard(onboard)
        if plan.onboards:
            self._start_onboards(plan.onboards)

    @contained()
    def finish(self, plan: StepPlan) -> None:
        """Start the plan's offloads. The forward pass that computes their sources has been submitted."""
        if plan.offloads:
            fence, error = self.boundary.attempt("fence", self.copier.fence)
            for order in plan.offloads:
                parts = self._offload_parts(order, fence)
                if (failed := self._submit(order, parts, self._offload_pool, self._offloads, error)) is not None:
                    self._write_offload(failed)

    @contained(False)
    def poll(self) -> bool:
        """Write the control words of copies that have ended since the last call; return whether there were any."""
        self._segment.beat()
        onboards = self._onboard_pool.poll() if self._onboards else []
        offloads = self._offload_pool.poll() if self._offloads else []
        repeats, self._repeats = self._repeats, []
        for finished in onboards:
            self._prove_onboard(finished)
        for finished in offloads:
            self._prove_offload(finished)
        if repeats:
            self._start_onboards(repeats)
        has_written, self._has_written = self._has_written, False
        return has_written

    def is_busy(self) -> bool:
        """Whether a copy is queued, running, or ended without its word written."""
        return bool(self._onboards or self._offloads or self._repeats)

    def is_onboarding(self) -> bool:
        """Whether a thread may write the word of an onboard at any time."""
        return bool(self._onboards)

    def generations(self) -> set[int]:
        """Return the orders whose copies have not ended."""
        onboards = {running.order.generation for running in self._onboards.values()}
        offloads = {running.order.generation for running in self._offloads.values()}
        return onboards | offloads | {order.generation for order in self._repeats}

    def has_onboarded(self, order: Onboard) -> bool:
        """Whether this rank has proven this onboard. Known until the leader gives its lane to another one."""
        return self._segment.lane_carries(order.lane, order.generation)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the threads. The segment remains until no process maps it."""
        self._repeats_onboards = False
        self._onboard_pool.close(timeout_s)
        self._offload_pool.close(timeout_s)
        self.poll()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads and free the segment. If a copy still runs, the end of the process frees it."""
        self.stop(timeout_s)
        if not self.is_busy():
            self._segment.close()

    def _run_offload(self, order: Offload, part: slice, uncopied: _UncopiedParts, fence: object | None) -> None:
        """Copy, and prove it at once: an engine that runs no more steps polls no more. Replicas report at the end of
        their last part."""
        slots = np.array(order.slots[part], np.int64)
        self.copier.offload(np.array(order.block_ids[part], np.int64), slots, fence)
        self._segment.write_slots(slots, order.generation, SlotState.READY)
        if uncopied.end_one() and self._has_replicas:
            self._segment.write_report(order.generation, SlotState.READY, self._sample(order, fence))

    def _sample(self, order: Offload, fence: object | None) -> int:
        """Return the checksum of the order's first block as this rank has it, after this rank has copied its share."""
        if 0 in self._share(order):
            return self._segment.checksum(order.slots[0])
        with self._sampling:
            self.copier.offload(order.block_ids[:1], (self._segment.sample_slot,), fence)
            return self._segment.checksum(self._segment.sample_slot)

    def _run_onboard(self, order: Onboard, part: slice, uncopied: _UncopiedParts, fence: object | None) -> None:
        slots, generations = np.array(order.slots[part]), np.array(order.slot_generations[part])
        self._require_source(order, slots, generations)
        self.copier.onboard(slots, np.array(order.block_ids[part]), fence)
        self._require_source(order, slots, generations)
        if uncopied.end_one() and self._threads_prove_onboards:
            self._segment.write_lane(order.lane, order.generation, SlotState.READY)

    def _require_source(self, order: Onboard, slots: NDArray[np.int64], generations: NDArray[np.int64]) -> None:
        if not self._segment.slots_carry(slots, generations):
            raise TransferError(f"onboard {order.generation}: a source slot holds another block")

    def _start_onboards(self, orders: Sequence[Onboard]) -> None:
        fence, error = self.boundary.attempt("fence", self.copier.fence)
        for order in orders:
            slices = self._threads.parts(len(order.slots), self._segment.info.block_bytes, self._threads.onboard_parts)
            uncopied = _UncopiedParts(len(slices))
            parts = [partial(self._run_onboard, order, part, uncopied, fence) for part in slices]
            if (failed := self._submit(order, parts, self._onboard_pool, self._onboards, error)) is not None:
                self._end_onboard(failed)

    def _offload_parts(self, order: Offload, fence: object | None) -> list[Callable[[], None]]:
        """Return the copies of this rank's share; a replica without a share has one that only reports."""
        share = self._share(order)
        shares = [share[part] for part in self._threads.parts(len(share), self._segment.info.block_bytes, 1)]
        slices = [slice(one.start, one.stop) for one in shares] or [slice(0, 0)]
        uncopied = _UncopiedParts(len(slices))
        return [partial(self._run_offload, order, part, uncopied, fence) for part in slices]

    def _share(self, order: Offload) -> range:
        """Return the positions of the blocks that this rank copies: all, or the share of one of several replicas."""
        info, count = self._segment.info, len(order.slots)
        turn = (info.replica + order.generation) % info.replica_count
        return range(turn * count // info.replica_count, (turn + 1) * count // info.replica_count)

    def _submit(
        self,
        order: _Order,
        parts: Sequence[Callable[[], None]],
        pool: TransferPool,
        into: dict[int, _Running[_Order]],
        error: Exception | None,
    ) -> _Running[_Order] | None:
        """Submit the parts of an order, unless there is an error already. Return the order if none of it runs."""
        running = _Running(order, set(), error)

        def submit_parts() -> None:
            for part in parts:
                ticket = pool.submit(part, order.generation)
                running.tickets.add(ticket)
                into[ticket] = running

        if error is None:
            _, running.error = self.boundary.attempt("submit", submit_parts)
        return None if running.tickets else running

    @contained()
    def _prove_onboard(self, finished: Finished) -> None:
        running = self._onboards.pop(finished.ticket, None)
        if running is not None and running.end(finished.ticket, finished.error):
            self._end_onboard(running)

    @contained()
    def _prove_offload(self, finished: Finished) -> None:
        """Write the failure of an offload. If it succeeded, its slots may have another use by now."""
        running = self._offloads.pop(finished.ticket, None)
        if running is not None and running.end(finished.ticket, finished.error):
            if running.error is not None:
                self._write_offload(running)
            self._has_written = True

    def _end_onboard(self, running: _Running[Onboard]) -> None:
        """Write the result, unless a thread has: if it succeeded, its lane may have another use by now."""
        if running.error is None and self._threads_prove_onboards:
            self._has_written = True
        elif running.error is not None and self._repeats_onboards:
            self._state(running.error)
            self._repeats.append(running.order)
        else:
            self._write_onboard(running)

    @contained()
    def _write_onboard(self, running: _Running[Onboard]) -> None:
        order = running.order
        self._segment.write_lane(order.lane, order.generation, self._state(running.error))
        self._has_written = True

    @contained()
    def _write_offload(self, running: _Running[Offload]) -> None:
        """Report the failure for the slots whose part did not succeed. The leader has released none of the slots, as
        long as some have no word."""
        self._fail_offload(running.order, self._state(running.error))

    @contained()
    def _deny_onboard(self, order: Onboard) -> None:
        """Report an overdue onboard that does not run here as failed, unless this rank has proven its part."""
        is_proven = self._segment.lane_carries(order.lane, order.generation)
        if not is_proven and not _is_running(self._onboards, order.generation, self._onboard_pool):
            self._segment.write_lane(order.lane, order.generation, SlotState.FAILED)
            self._has_written = True

    @contained()
    def _deny_offload(self, order: Offload) -> None:
        if not self._has_proven(order) and not _is_running(self._offloads, order.generation, self._offload_pool):
            self._fail_offload(order, SlotState.FAILED)

    def _fail_offload(self, order: Offload, state: SlotState) -> None:
        self._segment.write_slots(self._unproven(order), order.generation, state)
        if self._has_replicas:  # last: this rank copies no more
            self._segment.write_report(order.generation, state)
        self._has_written = True

    def _has_proven(self, order: Offload) -> bool:
        is_reported = not self._has_replicas or self._segment.has_reported(order.generation)
        return is_reported and not self._unproven(order)

    def _unproven(self, order: Offload) -> list[int]:
        """Return the slots of this rank's share that it has not proven."""
        share = self._share(order)
        return self._segment.unproven(order.slots[share.start : share.stop], order.generation)

    def _state(self, error: BaseException | None) -> SlotState:
        """Return the state for the control word. Logs one failure per WARNING_INTERVAL_S: many may come together."""
        if error is None:
            return SlotState.READY
        if time.monotonic() - self._warned_s > WARNING_INTERVAL_S:
            self._warned_s = time.monotonic()
            log.warning(
                "kvbm: rank %d: a copy failed, and others may have failed too: %r", self._segment.info.rank, error
            )
        return SlotState.FAILED


def _is_running(orders: dict[int, _Running[_Order]], generation: int, pool: TransferPool) -> bool:
    """Whether a copy of this order may still run. A part that the pool has lost, or cancels now because it has not
    started, is not copied, and the order fails when the other parts have ended."""
    running = next((running for running in orders.values() if running.order.generation == generation), None)
    if running is None:
        return False
    for ticket in list(running.tickets):
        if not pool.is_outstanding(ticket) or pool.withdraw(ticket):
            del orders[ticket]
            running.end(ticket, TransferError(f"a part of transfer {generation} never ran"))
    return bool(running.tickets)
