"""HostTier: the metadata of G2 and the control words that prove it. The only owner of both.

It joins two things that must agree: the store (which slot holds which hash) and the region (which bytes are proven).
Each slot has a generation, the number of the transfer that filled it. A block becomes findable in this order:

    reserve      slots and a generation; nothing can be found there
    (transfer)   a rank writes bytes and then control words; or the disk writes bytes, and `prove` the words
    register     the slots whose words are proven become findable, pinned by the caller; the others are free again

The leader's thread owns it. `store` and `region` are public: lookup, pins, recency, lane words. Only HostTier
registers blocks, and reads or writes slot words. After `store.reset`, nothing reserved before becomes findable.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

from kvbm.core.index import is_consecutive, picked
from kvbm.core.policies.ranking import PLAIN_MARK
from kvbm.core.store import BlockStore
from kvbm.tiers.slot_labels import SlotLabels
from kvbm.types import SlotState, Tier

if TYPE_CHECKING:
    from kvbm.core.policies.chain_use import ChainHint, ChainUse
    from kvbm.core.store import MutableBlocks, PinnedBlocks
    from kvbm.host.region import Region
    from kvbm.metrics import Counters

CHECK_STEPS, CHECKED_SLOTS = 256, 128  # one check of many slots costs less than many of a few

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reservation:
    """G2 slots that transfer `generation` fills. Consumed by `HostTier.register` or `release`."""

    blocks: MutableBlocks
    slots: tuple[int, ...]
    generation: int

    def release(self) -> None:
        self.blocks.release()


class HostListener:
    """A tier that follows what happens in host memory, because it writes blocks that are there."""

    def registered(self, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Note that blocks were registered in these slots of host memory; its labels say of which tenants."""
        return

    def evicting(self, count: int, *, keeps_unwritten: bool) -> None:
        """Prepare for the eviction of `count` blocks of host memory; `keeps_unwritten` spares the unwritten ones."""
        return

    def adopt(self, hashes: Sequence[bytes]) -> None:
        """Note that a request has these blocks of host memory, so that their tenant is known."""
        return

    def unwritten_blocks(self, end: int) -> Collection[bytes] | None:
        """Return which blocks a chain of `end` blocks must not evict, because they still have to be written.

        None if the chain does not pass through host memory to this tier, so that it has to fit into host memory.
        """
        return None


class HostTier:
    """See the module's text. Counts evictions in `counters`. `listeners` hear of them. Who knows the tenants of blocks
    notes them in `labels`."""

    kind = Tier.HOST

    def __init__(
        self,
        region: Region,
        counters: Counters,
        *,
        hash_bytes: int = 16,
        events: bool = False,
        eviction: str = "lru",
        marks_blocks: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.region = region
        self.store = BlockStore(
            region.slot_count, tier=Tier.HOST, hash_bytes=hash_bytes, events=events, eviction=eviction
        )
        self.capacity_blocks = region.slot_count
        self.labels = SlotLabels(region.slot_count, clock)
        self.listeners: Sequence[HostListener] = ()
        self.arriving_blocks = 0  # slots that lower tiers are reading into; see OpenReads
        # What is known of the block in each slot, for the disk, if the policy of host memory keeps none.
        self._marks = self.store.policy.marks or bytearray(region.slot_count if marks_blocks else 0)
        self.has_marks = bool(self._marks)
        self._counters = counters
        counters.eviction_order, _ = self.store.policy.choice()
        self._slot_generations = array("Q", bytes(8 * region.slot_count))
        self._generation = 0
        self._steps = 0
        self._next_slot = 0

    def arrive(
        self, hashes: Sequence[bytes], now_s: float, hint: ChainHint | None = None, above: int = 0
    ) -> ChainUse | None:
        """Note that a request for the chain `hashes` has arrived, and return what it is to the policy; see Policy."""
        arrival, policy = self.store.arrive(hashes, now_s, hint, above), self.store.policy
        self._counters.hints_off = int(not policy.follows_hints)
        self._counters.eviction_order, self._counters.eviction_gain_percent = policy.choice()
        return arrival

    def unwritten_blocks(self, end: int) -> Collection[bytes] | None:
        """Return which blocks a chain of `end` blocks must not evict, see HostListener. None if no tier has to write
        them."""
        for listener in self.listeners:
            if (unwritten := listener.unwritten_blocks(end)) is not None:
                return unwritten
        return None

    def next_generation(self) -> int:
        """Return a number that no transfer has had."""
        self._generation += 1
        return self._generation

    def reserve(self, count: int, *, keeps_unwritten: bool = False) -> Reservation | None:
        """Return `count` slots, free ones first, then those of the blocks that are evicted next. None without room.

        `keeps_unwritten`: evict only blocks that no lower tier has still to write.
        """
        if count > self.store.available:
            return None
        evicted = count - self.store.free
        if evicted > 0:
            for listener in self.listeners:
                listener.evicting(evicted, keeps_unwritten=keeps_unwritten)
            self._counters.evicted_blocks += evicted
        blocks = self.store.allocate(count)
        assert blocks is not None, (count, self.store.counts())
        return Reservation(blocks, tuple(blocks.slots), self.next_generation())

    def unprove(self, target: Reservation) -> None:
        """Clear the control words of slots that no rank fills."""
        self.region.write_slots(target.slots, target.generation, SlotState.EMPTY)

    def prove(self, target: Reservation, is_good: Sequence[bool]) -> None:
        """Write the control words of those slots whose bytes are there, in place of the ranks."""
        proven = [slot for slot, good in zip(target.slots, is_good, strict=True) if good]
        if proven:
            self.region.write_slots(proven, target.generation, SlotState.READY)

    def are_reported(self, targets: Sequence[Reservation]) -> list[bool]:
        """For many transfers at once: whether `results` may be known. Reads one word per transfer and rank."""
        return self.region.are_reported([t.slots[0] for t in targets], [t.generation for t in targets])

    def results(self, target: Reservation, *, may_differ: bool = False) -> list[bool] | None:
        """Return which slots all ranks have proven; None until every rank has reported. `may_differ`: see Region."""
        states = self.region.slot_results(target.slots, target.generation, may_differ=may_differ)
        if states.count(SlotState.READY) == len(states):
            return [True] * len(states)
        return None if SlotState.EMPTY in states else [state is SlotState.READY for state in states]

    def register(
        self, target: Reservation, hashes: Sequence[bytes], is_good: Sequence[bool], marks: bytes = b""
    ) -> PinnedBlocks:
        """Consumes. Make the good blocks findable and return them pinned; `hashes[i]` names `slots[i]`, and `marks[i]`
        is its mark, if known."""
        proven = target.blocks
        if not all(is_good):
            proven, failed = target.blocks.split(is_good)
            failed.release()
            hashes = list(compress(hashes, is_good))
            marks = bytes(compress(marks, is_good))
        generations, slots = self._slot_generations, proven.slots
        if is_consecutive(slots):
            generations[slots[0] : slots[-1] + 1] = array("Q", [target.generation]) * len(slots)
        else:
            for slot in slots:
                generations[slot] = target.generation
        self.labels.begin(slots)
        if self.has_marks and not self.store.policy.knows_uses:
            for slot, mark in zip(slots, marks or PLAIN_MARK * len(slots), strict=True):
                self._marks[slot] = mark
        return proven.register(hashes, marks)

    def marks_of(self, slots: Sequence[int]) -> bytes:
        """Return the mark of the block in each slot; empty if no tier's policy knows uses."""
        return bytes(picked(self._marks, slots)) if self.has_marks else b""

    def generations_of(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the generation that the control word of each registered slot must carry."""
        if is_consecutive(slots):
            return tuple(self._slot_generations[slots[0] : slots[-1] + 1])
        return tuple(map(self._slot_generations.__getitem__, slots))

    def check_next(self) -> None:
        """Log handles that were dropped while they held blocks, and once in CHECK_STEPS steps check some slots. Call
        once per step. Raises InvariantError."""
        for handle in self.store.leaked():
            log.error("kvbm: blocks of host memory leaked, which is a bug in kvbm: %s", handle)
        self.store.step()
        self._steps += 1
        if self._steps % CHECK_STEPS:
            return
        self.store.check(self._next_slot, CHECKED_SLOTS)
        self._next_slot += CHECKED_SLOTS
        if self._next_slot >= self.capacity_blocks:
            self._next_slot = 0
