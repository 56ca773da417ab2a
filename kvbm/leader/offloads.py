"""Offloads: copies from G1 to host memory, from the decision which blocks are copied to their registration.

`advance` reserves G2 slots and orders copies, `step` hands the orders out, `settle` registers the blocks that every
rank has proven. The sources are held in the engine's block pool until every rank has reported, so that an abort or a
preemption needs no waiting. At most `max_in_flight_blocks` blocks are held at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm.plan import Offload

if TYPE_CHECKING:
    from kvbm.leader.disk_tier import DiskTier
    from kvbm.leader.host_tier import HostTier, Reservation
    from kvbm.leader.settings import LeaderCallbacks, LeaderSettings
    from kvbm.metrics import Counters

SNAPSHOT_SHARE = 2  # snapshots may hold this many times `max_in_flight_blocks`: there is no later step for them
FRESH_SHARE = 4  # a chain that was made recent stays so until this part of the slots has been evicted
NO_BLOCK = -1  # in place of a block id: the engine keeps no such block


@dataclass(slots=True)
class OffloadProgress:
    """How far the blocks of one KV cache group of a request have been offloaded.

    Of the first `considered` blocks, `left_out` found no room. With `can_wait`, blocks that found no room are tried
    again at a later step; without, the engine may have given them up by then. The chain is made recent again when more
    than `fresh_until` blocks have been evicted; at every block this would cost the chain's length.
    """

    tenant: bytes
    can_wait: bool = True
    considered: int = 0
    left_out: int = 0
    fresh_until: int = 0


@dataclass(slots=True)
class _OffloadInFlight:
    order: Offload
    target: Reservation
    hashes: list[bytes]
    tenant: bytes
    born_step: int
    is_snapshot: bool = False
    is_void: bool = False
    is_held: bool = True


class Offloads:
    """See the module's text."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        engine: LeaderCallbacks,
        settings: LeaderSettings,
        counters: Counters,
    ) -> None:
        self._host = host
        self._disk = disk
        self._engine = engine
        self._settings = settings
        self._counters = counters
        self._step = 0
        self.in_flight: dict[int, _OffloadInFlight] = {}  # from before a copier can run until it has stopped
        self._departing: set[bytes] = set()
        self._held_blocks = 0
        self._orders: list[Offload] = []

    def advance(
        self,
        progress: OffloadProgress,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        end: int,
        unwritten: int | None,
    ) -> None:
        """Order copies of those of `hashes[:end]` that are missing in G2, as far as there is room.

        `block_ids[i]` is the G1 block of `hashes[i]`, or NO_BLOCK. `unwritten` is the number of G2 blocks that must not
        be evicted because they still have to be written to disk; None if the whole chain has to fit into G2.
        """
        begin = progress.considered
        fresh = list(hashes[begin:end])
        if begin == 0:
            self._host.store.touch(fresh)
        sources = block_ids[begin:end]
        absent = [
            index
            for index in self._host.store.missing(fresh)
            if fresh[index] not in self._departing and sources[index] != NO_BLOCK
        ]
        counts, evicted = self._host.store.counts(), self._counters.evicted_blocks
        if unwritten is None and evicted + max(0, len(absent) - counts.free) > progress.fresh_until:
            self._host.store.touch(hashes[:end])  # so that no block is evicted for its own tail
            progress.fresh_until = evicted + self._host.capacity_blocks // FRESH_SHARE
        room = self._room(self._settings.max_in_flight_blocks, unwritten)
        chosen = absent[:room] if progress.can_wait else absent[::-1][:room]
        self._make_room(len(chosen), unwritten)
        for first in range(0, len(chosen), self._settings.batch_blocks):
            batch = chosen[first : first + self._settings.batch_blocks]
            self._order([fresh[i] for i in batch], tuple(sources[i] for i in batch), progress.tenant)
        left_out = len(absent) - len(chosen)
        if progress.can_wait and left_out:
            progress.left_out = left_out
            progress.considered = begin + absent[len(chosen)]
        else:
            progress.left_out = 0
            progress.considered = end
            self._counters.offload_skipped_blocks += left_out

    def add_snapshot(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], tenant: bytes, *, unwritten: int | None
    ) -> None:
        """Order copies of the blocks of one snapshot, one per state group, that are missing in G2: all or none."""
        self._host.store.touch(hashes)
        absent = [index for index in self._host.store.missing(hashes) if hashes[index] not in self._departing]
        if len(absent) > self._room(SNAPSHOT_SHARE * self._settings.max_in_flight_blocks, unwritten):
            self._counters.offload_skipped_blocks += len(absent)
        elif absent:
            self._make_room(len(absent), unwritten)
            self._order([hashes[i] for i in absent], tuple(block_ids[i] for i in absent), tenant, is_snapshot=True)

    def step(self) -> tuple[Offload, ...]:
        self._step += 1
        orders, self._orders = tuple(self._orders), []
        return orders

    def overdue(self) -> tuple[Offload, ...]:
        """Return the orders without a result, each once every `overdue_steps` steps."""
        if not self.in_flight:
            return ()
        ages = ((flight.order, self._step - flight.born_step) for flight in self.in_flight.values())
        return tuple(order for order, age in ages if age > 0 and age % self._settings.overdue_steps == 0)

    def settle(self) -> None:
        """Read the control words and register what has arrived. Snapshots and tails first, so that heads end up more
        recent."""
        flights = sorted(self.in_flight.values(), key=lambda flight: flight.is_snapshot)[::-1]
        if not flights:
            return
        are_reported = self._host.are_reported([flight.target for flight in flights])
        for flight, is_reported in zip(flights, are_reported, strict=True):
            if is_reported and (is_ready := self._host.results(flight.target)) is not None:
                self._end(flight, is_ready)

    def is_under_way(self, *, within_steps: int) -> bool:
        """Whether a copy is in flight that is not older than that."""
        youngest = next(reversed(self.in_flight.values()), None)
        return youngest is not None and self._step - youngest.born_step <= within_steps

    def are_blocks_held(self) -> bool:
        return self._held_blocks > 0

    def reset(self) -> None:
        """Register nothing of what is in flight."""
        for flight in self.in_flight.values():
            flight.is_void = True
        self._departing.clear()

    def discard(self, block_ids: Collection[int]) -> None:
        """Register nothing of the orders in flight that read one of these G1 blocks."""
        for flight in self.in_flight.values():
            if not flight.is_void and not set(flight.order.block_ids).isdisjoint(block_ids):
                flight.is_void = True
                self._departing.difference_update(flight.hashes)

    def abandon(self) -> None:
        """Release the sources of what is in flight, which is not registered: the engine may overwrite them now."""
        self.reset()
        for flight in self.in_flight.values():
            self._release(flight)

    def _room(self, may_hold: int, unwritten: int | None) -> int:
        """Return how many blocks can be copied now if the copies in flight `may_hold` so many blocks of G1."""
        counts = self._host.store.counts()
        return max(0, min(may_hold - self._held_blocks, counts.free + counts.inactive - (unwritten or 0)))

    def _make_room(self, count: int, unwritten: int | None) -> None:
        if self._disk is not None:
            self._disk.evicting(count - self._host.store.counts().free, keeps_unwritten=unwritten is not None)

    def _order(
        self, hashes: list[bytes], block_ids: tuple[int, ...], tenant: bytes, *, is_snapshot: bool = False
    ) -> None:
        target = self._host.reserve(len(hashes))
        assert target is not None, (len(hashes), self._host.store.counts())
        order = Offload(generation=target.generation, block_ids=block_ids, slots=target.slots)
        self._engine.hold(block_ids)
        self.in_flight[order.generation] = _OffloadInFlight(order, target, hashes, tenant, self._step, is_snapshot)
        self._departing.update(hashes)
        self._held_blocks += len(block_ids)
        self._orders.append(order)

    def _end(self, flight: _OffloadInFlight, is_ready: Sequence[bool]) -> None:
        del self.in_flight[flight.order.generation]
        self._release(flight)
        if flight.is_void:
            flight.target.release()
            return
        self._departing.difference_update(flight.hashes)
        blocks = self._host.register(flight.target, flight.hashes, is_ready)
        self._counters.offload_failed_blocks += len(flight.hashes) - len(blocks.hashes)
        self._counters.offload_blocks += len(blocks.hashes)
        self._counters.offload_bytes += len(blocks.hashes) * self._settings.block_bytes
        if self._disk is not None:
            self._disk.registered(blocks.hashes, blocks.slots, flight.tenant)
        blocks.release()

    def _release(self, flight: _OffloadInFlight) -> None:
        if flight.is_held:
            flight.is_held = False
            self._held_blocks -= len(flight.hashes)
            self._engine.release(flight.order.block_ids[::-1])


def blocks_before_low_priority(priorities: Sequence[int], end: int, *, least: int) -> int:
    """Return how many of the first `end` blocks come before one whose priority is below `least`; the default is 0."""
    low = (index for index in range(end) if (priorities[index] if index < len(priorities) else 0) < least)
    return next(low, end)
