"""Offloads: copies from G1 to host memory, from the decision which blocks are copied to their registration.

`advance` collects blocks of all requests, `step` reserves G2 slots and makes one order of them, `settle` registers the
blocks that every rank has proven. One order per step costs the leader and the workers far less than one per request.
The sources are held in the engine's block pool until every rank has reported, so that an abort or a preemption needs no
waiting. At most `max_in_flight_blocks` blocks are held at a time.

With `to_host: on_evict`, and with `auto` where late_offloads.py says so, `advance` notes blocks, and `step` orders
copies of those that the engine evicts next, or with `auto` of all while host memory has free slots. Their sources are
not held: `settle` drops a block that the engine has evicted during its copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress, groupby
from typing import TYPE_CHECKING

from kvbm.core.policies.ranking import PLAIN_MARK, known_blocks, picked_marks
from kvbm.leader.late_offloads import LateOffloads
from kvbm.plan import Offload

if TYPE_CHECKING:
    from kvbm.leader.long_chains import Slices
    from kvbm.leader.request import LiveRequest, OffloadProgress
    from kvbm.tiers.host_tier import Reservation
    from kvbm.tiers.lower_tier import TierContext

SNAPSHOT_SHARE = 2  # snapshots may hold this many times `max_in_flight_blocks`: there is no later step for them
FRESH_SHARE = 4  # a chain that was made recent stays so until this part of the slots has been evicted
PRESENT_SLICES = 2  # a step examines so many slices of a chain that is in G2 already
NO_BLOCK = -1  # in place of a block id: the engine keeps no such block

Completed = tuple[str, Sequence[bytes], Sequence[int], int, int]  # arguments of `Leader.offload`, in its order


@dataclass(slots=True)
class _Batch:
    """Blocks that one order copies: `block_ids[i]` in G1 holds `hashes[i]` of `tenants[i]`, with `marks[i]`."""

    hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    tenants: list[bytes] = field(default_factory=list)
    marks: bytearray = field(default_factory=bytearray)

    def add(self, hashes: Sequence[bytes], block_ids: Sequence[int], tenant: bytes, marks: bytes) -> None:
        self.hashes += hashes
        self.block_ids += block_ids
        self.tenants += [tenant] * len(hashes)
        self.marks += marks or PLAIN_MARK * len(hashes)

    def extend(self, other: _Batch) -> None:
        self.hashes += other.hashes
        self.block_ids += other.block_ids
        self.tenants += other.tenants
        self.marks += other.marks

    def remove(self, positions: Collection[int]) -> None:
        is_kept = [position not in positions for position in range(len(self.hashes))]
        self.hashes = list(compress(self.hashes, is_kept))
        self.block_ids = list(compress(self.block_ids, is_kept))
        self.tenants = list(compress(self.tenants, is_kept))
        self.marks = bytearray(compress(self.marks, is_kept))

    def positions_of(self, block_ids: Set[int]) -> set[int]:
        return {position for position, block_id in enumerate(self.block_ids) if block_id in block_ids}


@dataclass(slots=True)
class _OffloadInFlight:
    """An order until its copies have stopped. `dropped` are the positions of blocks that are not registered. With
    sources that are not held, `contents` is what the engine had in them, until they are abandoned."""

    order: Offload
    target: Reservation
    batch: _Batch
    born_step: int
    born_s: float
    dropped: set[int] = field(default_factory=set)
    is_void: bool = False
    is_held: bool = True
    contents: Sequence[object] = ()

    def wanted(self) -> list[bytes]:
        """Return the hashes of the blocks that `_end` registers if their copies succeed."""
        if self.is_void:
            return []
        if not self.dropped:
            return self.batch.hashes
        return [one for index, one in enumerate(self.batch.hashes) if index not in self.dropped]


class Offloads:
    def __init__(self, context: TierContext, slices: Slices) -> None:
        self._host = context.host
        self._block_pool = context.callbacks
        self._settings = context.settings
        self._counters = context.counters
        self._slices = slices
        self._clock = context.callbacks.clock
        self._step = 0
        self.in_flight: dict[int, _OffloadInFlight] = {}  # from before a copier can run until it has stopped
        self._departing: set[bytes] = set()
        self._held_blocks = 0
        self._collected = _Batch()  # for the next order
        self._snapshots = _Batch()  # for the end of the next order
        self._keeps_unwritten = False  # whether a collected block may only evict blocks that are on disk
        self._late: LateOffloads | None = None
        if context.callbacks.evictions is not None:
            self._late = LateOffloads(context.callbacks.evictions, context, self._departing)

    @property
    def are_late(self) -> bool:
        """Whether blocks are copied when the engine evicts them, so that host memory has no copies of those in G1: with
        `on_evict`, and with `auto` once host memory is full."""
        return self._late is not None

    def advance(self, progress: OffloadProgress, hashes: Sequence[bytes], block_ids: Sequence[int], end: int) -> None:
        """Collect those of `hashes[:end]` that are missing in G2, as far as there is room, for the order of this step.

        `block_ids[i]` is the G1 block of `hashes[i]`, or NO_BLOCK. A long chain is examined in slices over several
        steps.
        """
        if self._late is not None:
            self._note(self._late, progress, hashes, block_ids, end)
            return
        if progress.is_declined:
            progress.considered = max(progress.considered, end)
            return
        begin, store, unwritten = progress.considered, self._host.store, self._host.unwritten_blocks(end)
        if unwritten is None:
            end = min(end, self._host.capacity_blocks)
            if end <= begin:
                return
        if progress.can_wait and end - begin > self._slices.size:
            if self._is_slice_present(progress, hashes, end):
                return
            begin = progress.considered
            end = min(end, begin + self._slices.size)
        fresh, marks = hashes[begin:end], progress.marks(begin, end)
        missing = store.missing_of_chain(fresh) if progress.can_wait else store.missing(fresh)
        if (begin == 0 or marks) and len(missing) < len(fresh):
            store.touch(fresh, marks)
        absent = self._absent(missing, fresh, block_ids[begin:end])
        collected = len(self._collected.hashes) + len(self._snapshots.hashes)
        if unwritten is None:
            evicted = self._counters.evicted_blocks
            if evicted + max(0, collected + len(absent) - store.free) > progress.fresh_until:
                if begin:  # so that no block is evicted for its own tail
                    self._slices.run(store.touch, hashes[:end])
                progress.fresh_until = evicted + self._host.capacity_blocks // FRESH_SHARE
        if marks and absent and self._settings.may_decline:
            absent = self._worthwhile(progress, absent, picked_marks(marks, absent), collected)
        chosen = absent
        if absent:
            room = self._room(self._settings.max_in_flight_blocks, unwritten)
            if room < len(absent) or not progress.can_wait:
                chosen = (absent if progress.can_wait else absent[::-1])[:room]
            sources = [block_ids[begin + i] for i in chosen]
            of_chosen = picked_marks(marks, chosen)
            names = [fresh[i] for i in chosen]
            self._collect(self._collected, names, sources, progress.tenant, unwritten, of_chosen)
        left_out = len(absent) - len(chosen)
        if progress.can_wait and left_out:
            progress.left_out = left_out
            progress.considered = begin + absent[len(chosen)]
        else:
            progress.left_out = 0
            progress.considered = end
            self._counters.offload_skipped_blocks += left_out

    def _is_slice_present(self, progress: OffloadProgress, hashes: Sequence[bytes], end: int) -> bool:
        """Skip the next blocks of a long chain that are in G2. Return whether this was the work of a step."""
        begin, has_marks = progress.considered, progress.arrival is not None
        examined = self._slices.size * (1 if has_marks else PRESENT_SLICES)  # marks take several times as long
        present = self._host.store.match(hashes[begin : min(end, begin + examined)])
        if has_marks:
            self._host.store.touch(hashes[begin : begin + present], progress.marks(begin, begin + present))
        progress.considered = begin + present
        return has_marks and present == examined

    def _note(
        self, late: LateOffloads, progress: OffloadProgress, hashes: Sequence[bytes], block_ids: Sequence[int], end: int
    ) -> None:
        """Like `advance`, for blocks that are copied before the engine evicts them."""
        begin = progress.considered
        if progress.can_wait:
            end = min(end, begin + self._slices.size)
        fresh, sources, marks = hashes[begin:end], block_ids[begin:end], progress.marks(begin, end)
        if marks or not self.has_spare(progress):
            self._host.store.touch(fresh, marks)
        if NO_BLOCK in sources:
            kept = [position for position, block_id in enumerate(sources) if block_id != NO_BLOCK]
            fresh, sources, marks = [fresh[i] for i in kept], [sources[i] for i in kept], picked_marks(marks, kept)
        late.note(fresh, sources, progress.tenant, marks)
        progress.considered = end

    def _worthwhile(self, progress: OffloadProgress, absent: list[int], marks: bytes, collected: int) -> list[int]:
        """Return those of the `absent` blocks that host memory would keep, with `collected` others in this step.

        It keeps the beginning of a chain. A request that is declined once stays so: a later part is of no use without
        the one before it.
        """
        store = self._host.store
        kept = known_blocks(marks)
        if self._settings.to_host != "second_hit":
            kept = store.room(marks, taken=collected)
        if kept >= min(len(absent), store.available - collected):
            return absent
        progress.is_declined = True
        self._counters.offload_declined_blocks += len(absent) - kept
        return absent[:kept]

    def _absent(self, missing: list[int], fresh: Sequence[bytes], block_ids: Sequence[int]) -> list[int]:
        """Return the positions of blocks to copy: `missing` ones that the engine keeps and that are not in flight."""
        departing = self._departing
        if NO_BLOCK not in block_ids and departing.isdisjoint(fresh):
            return missing
        return [i for i in missing if fresh[i] not in departing and block_ids[i] != NO_BLOCK]

    def advance_all(
        self,
        completed: Sequence[Completed],
        requests: Mapping[str, LiveRequest],
        advance_one: Callable[[Completed], int],
    ) -> list[int]:
        """Advance many chains; return for each how many of its blocks have been considered.

        Most running requests complete one block at a time. Those are handled together, which takes a third of the time.
        """
        if self._late is not None:
            return [advance_one(one) for one in completed]
        singles: dict[int, tuple[OffloadProgress, bytes, int]] = {}
        considered: list[int] = []
        evicted, generated = self._evicted_after(len(completed)), self._settings.offload_generated
        for one in completed:
            request_id, hashes, block_ids, computed_blocks, prompt_blocks = one
            end = min(computed_blocks, len(hashes), len(block_ids))
            if (request := requests.get(request_id)) is not None and (generated or end <= prompt_blocks):
                progress = request.offloads[0]
                is_single = end == progress.considered + 1 > 1 and evicted <= progress.fresh_until
                may_copy = request.may_offload and not progress.is_declined
                if is_single and may_copy and end <= self._host.capacity_blocks:
                    singles[len(considered)] = (progress, hashes[end - 1], block_ids[end - 1])
                    considered.append(end)
                    continue
            considered.append(advance_one(one))
        if self._evicted_after(len(singles)) <= evicted:
            self._advance_by_one(list(singles.values()))
        else:  # the others have taken the room
            for position in singles:
                considered[position] = advance_one(completed[position])
        return considered

    def _evicted_after(self, count: int) -> float:
        """Return how many blocks will have been evicted if `count` more are collected; infinite if there is no room,
        or if blocks must be written to a lower tier before."""
        if self._room(self._settings.max_in_flight_blocks, None) < count or self._host.unwritten_blocks(0) is not None:
            return math.inf
        collected = len(self._collected.hashes) + len(self._snapshots.hashes) + count
        return self._counters.evicted_blocks + max(0, collected - self._host.store.free)

    def _advance_by_one(self, blocks: Sequence[tuple[OffloadProgress, bytes, int]]) -> None:
        """Like `advance`, for the next block of each of many chains: (progress, hash, G1 block).

        No chain need be made recent first: `_evicted_after` of all is at most its `fresh_until`.
        """
        wanted: dict[bytes, tuple[OffloadProgress, int]] = {}
        departing = self._departing
        for index in self._host.store.missing([name for _, name, _ in blocks]):
            progress, name, block_id = blocks[index]
            if block_id != NO_BLOCK and name not in departing and name not in wanted:
                wanted[name] = progress, block_id
        for tenant, group in groupby(wanted.items(), key=lambda one: one[1][0].tenant):
            chosen = list(group)
            names, sources = [name for name, _ in chosen], [block_id for _, (_, block_id) in chosen]
            marks = b""
            if self._host.has_marks:
                marks = b"".join([progress.next_mark() for _, (progress, _) in chosen])
            self._collect(self._collected, names, sources, tenant, None, marks)
        for progress, _, _ in blocks:
            progress.considered += 1
            progress.left_out = 0

    def add_snapshot(self, hashes: Sequence[bytes], block_ids: Sequence[int], tenant: bytes) -> bool:
        """Collect the blocks of one snapshot, one per state group, that are missing in G2: all or none.

        Return whether the snapshot is in G2 or on its way.
        """
        unwritten = self._host.unwritten_blocks(len(hashes))
        absent = [index for index in self._host.store.touch(hashes) if hashes[index] not in self._departing]
        if len(absent) > self._room(SNAPSHOT_SHARE * self._settings.max_in_flight_blocks, unwritten):
            self._counters.offload_skipped_blocks += len(absent)
            return False
        if absent:
            sources = [block_ids[i] for i in absent]
            self._collect(self._snapshots, [hashes[i] for i in absent], sources, tenant, unwritten, b"")
        return True

    def step(self) -> tuple[Offload, ...]:
        """Return one order for everything that was collected; snapshots come last, as the least recent blocks."""
        self._step += 1
        if self._late is not None:
            return self._order_late(self._late)
        batch, snapshots = self._collected, self._snapshots
        self._collected, self._snapshots = _Batch(), _Batch()
        batch.extend(snapshots)
        if (room := self._host.store.available) < len(batch.hashes):  # others have pinned blocks since `advance`
            left_out = range(room, len(batch.hashes))
            self._counters.offload_skipped_blocks += len(left_out)
            self._drop(batch, left_out)
        if not batch.hashes:
            return ()
        flight = self._begin(batch, keeps_unwritten=self._keeps_unwritten)
        self._keeps_unwritten = False
        return (flight.order,)

    def _begin(self, batch: _Batch, *, keeps_unwritten: bool) -> _OffloadInFlight:
        target = self._host.reserve(len(batch.hashes), keeps_unwritten=keeps_unwritten)
        assert target is not None, (len(batch.hashes), self._host.store.counts())
        order = Offload(generation=target.generation, block_ids=tuple(batch.block_ids), slots=target.slots)
        flight = _OffloadInFlight(order, target, batch, self._step, self._clock())
        self.in_flight[order.generation] = flight
        return flight

    def has_spare(self, progress: OffloadProgress) -> bool:
        """Whether blocks that a request has used are in host memory without need: they are in G1, and are copied when
        they leave it. Not those that a window has left."""
        return self._late is not None and progress.can_wait

    def _order_late(self, late: LateOffloads) -> tuple[Offload, ...]:
        """Return one order for the noted blocks that the engine evicts next."""
        unwritten = self._host.unwritten_blocks(0)
        room = self._settings.max_in_flight_blocks - self.queue()[0]
        picks = late.pick(min(room, self._host.store.available - len(unwritten or ())))
        if not picks:
            return ()
        block_ids, contents, names, tenants, marks = map(list, zip(*picks, strict=True))
        self._departing.update(names)
        batch = _Batch(names, block_ids, tenants, bytearray(marks))
        flight = self._begin(batch, keeps_unwritten=unwritten is not None)
        flight.is_held, flight.contents = False, contents
        return (flight.order,)

    def overdue(self) -> tuple[Offload, ...]:
        """Return the orders without a result, each once every `overdue_steps` steps."""
        if not self.in_flight:
            return ()
        ages = ((flight.order, self._step - flight.born_step) for flight in self.in_flight.values())
        return tuple(order for order, age in ages if age > 0 and age % self._settings.overdue_steps == 0)

    def settle(self) -> None:
        """Read the control words and register what has arrived. Late orders first, so that heads end up more recent."""
        if not self.in_flight:
            return
        flights = list(self.in_flight.values())
        if self._late is None:  # which copies tails before heads
            flights.reverse()
        are_reported = [True]
        if len(flights) > 1:  # a word per order and rank is read faster than all of them
            are_reported = self._host.are_reported([flight.target for flight in flights])
        for flight, is_reported in zip(flights, are_reported, strict=True):
            if not is_reported:
                continue
            is_ready = self._host.results(flight.target, may_differ=self._is_sample_in_doubt(flight))
            if is_ready is not None:
                self._end(flight, is_ready)

    def _is_sample_in_doubt(self, flight: _OffloadInFlight) -> bool:
        """Whether the engine may have written to the first block of an order, which ranks with equal KV compare."""
        if 0 in flight.dropped:
            return True
        if self._late is None or not flight.contents:
            return not flight.is_held
        return bool(self._late.changed(flight.order.block_ids[:1], flight.contents[:1]))

    def is_under_way(self, *, within_steps: int) -> bool:
        """Whether a copy is in flight that is not older than that."""
        youngest = next(reversed(self.in_flight.values()), None)
        return youngest is not None and self._step - youngest.born_step <= within_steps

    def queue(self) -> tuple[int, float | None]:
        """Return how many blocks wait for their copy or its result, and since when the oldest order has been out."""
        oldest = next(iter(list(self.in_flight.values())), None)
        blocks = self._held_blocks
        if self._late is not None:
            blocks = sum(len(flight.order.block_ids) for flight in list(self.in_flight.values()))
        return blocks, None if oldest is None else oldest.born_s

    def are_blocks_read(self) -> bool:
        """Whether copies that have not been abandoned read blocks of G1, held or not."""
        return self._held_blocks > 0 or any(flight.contents for flight in self.in_flight.values())

    def reset(self) -> None:
        """Register nothing of what is collected or in flight."""
        for flight in self.in_flight.values():
            flight.is_void = True
        for batch in (self._collected, self._snapshots):
            self._drop(batch, range(len(batch.hashes)))
        self._departing.clear()
        if self._late is not None:
            self._late.reset()

    def discard(self, block_ids: Set[int]) -> None:
        """Register nothing that is copied from these G1 blocks."""
        for flight in self.in_flight.values():
            if not flight.is_void:
                fresh = flight.batch.positions_of(block_ids) - flight.dropped
                flight.dropped |= fresh
                self._departing.difference_update([flight.batch.hashes[position] for position in fresh])
        for batch in (self._collected, self._snapshots):
            self._drop(batch, batch.positions_of(block_ids))
        if self._late is not None:
            self._late.forget(block_ids)

    def discard_tenant(self, tenant: bytes) -> None:
        """Register nothing of a tenant that is collected or in flight."""
        batches = [self._collected, self._snapshots, *(flight.batch for flight in self.in_flight.values())]
        pairs = (pair for batch in batches for pair in zip(batch.block_ids, batch.tenants, strict=True))
        self.discard({block_id for block_id, owner in pairs if owner == tenant})
        if self._late is not None:
            self._late.forget_tenant(tenant)

    def abandon(self) -> None:
        """Release the sources of what is in flight, which is not registered: the engine may overwrite them now."""
        self.reset()
        for flight in self.in_flight.values():
            self._release(flight)
            flight.contents = ()

    def _collect(
        self,
        batch: _Batch,
        hashes: list[bytes],
        block_ids: list[int],
        tenant: bytes,
        unwritten: Collection[bytes] | None,
        marks: bytes,
    ) -> None:
        self._block_pool.hold(block_ids)
        self._held_blocks += len(block_ids)
        self._departing.update(hashes)
        self._keeps_unwritten |= unwritten is not None
        batch.add(hashes, block_ids, tenant, marks)

    def _drop(self, batch: _Batch, positions: Collection[int]) -> None:
        """Remove blocks that no order contains yet."""
        if positions:
            self._departing.difference_update([batch.hashes[position] for position in positions])
            self._release_blocks([batch.block_ids[position] for position in positions])
            batch.remove(positions)

    def _room(self, may_hold: int, unwritten: Collection[bytes] | None) -> int:
        """Return how many more blocks can be collected if the copies `may_hold` so many blocks of G1."""
        collected = len(self._collected.hashes) + len(self._snapshots.hashes)
        slots = self._host.store.available - len(unwritten or ()) - collected
        return max(0, min(may_hold - self._held_blocks, slots))

    def _end(self, flight: _OffloadInFlight, is_ready: Sequence[bool]) -> None:
        del self.in_flight[flight.order.generation]
        self._release(flight)
        if flight.is_void:
            flight.target.release()
            return
        self._departing.difference_update(flight.wanted())
        if self._late is not None:
            evicted = self._late.changed(flight.order.block_ids, flight.contents) - flight.dropped
            flight.dropped |= evicted
            self._counters.offload_skipped_blocks += len(evicted)
        hashes, tenants = flight.batch.hashes, flight.batch.tenants
        failed = is_ready.count(False)
        if flight.dropped:
            is_ready = [good and index not in flight.dropped for index, good in enumerate(is_ready)]
        blocks = self._host.register(flight.target, hashes, is_ready, bytes(flight.batch.marks))
        registered = len(blocks.hashes)
        self._counters.offload_failed_blocks += failed
        self._counters.offload_blocks += registered
        self._counters.offload_bytes += registered * self._settings.block_bytes
        if registered:
            self._counters.durations["device-host"].observe(self._clock() - flight.born_s)
        self._host.labels.own_each(blocks.slots, list(compress(tenants, is_ready)))
        for listener in self._host.listeners if registered else ():
            listener.registered(blocks.hashes, blocks.slots)
        blocks.release()

    def _release(self, flight: _OffloadInFlight) -> None:
        if flight.is_held:
            flight.is_held = False
            self._release_blocks(flight.order.block_ids)

    def _release_blocks(self, block_ids: Sequence[int]) -> None:
        self._held_blocks -= len(block_ids)
        self._block_pool.release(block_ids[::-1])


def blocks_before_low_priority(priorities: Sequence[int], end: int, *, least: int) -> int:
    """Return how many of the first `end` blocks come before one whose priority is below `least`; the default is 0."""
    low = (index for index in range(end) if (priorities[index] if index < len(priorities) else 0) < least)
    return next(low, end)
