"""Onboards: copies into G1, from host memory at once, from lower tiers through host memory.

A load is what one request was promised: blocks of a chain, and the G1 blocks that receive them. It moves in parts:

- Blocks in host memory are one part, ordered at once. Many of them are several parts, one slice per step: the parts of
  one load take turns with those of others.
- Blocks in a lower tier are read in batches, in order: on disk a few blocks, in the shared tier what the load needs of
  one object. Each batch is a part, ordered when its bytes are in host memory. So a load larger than host memory passes
  through it, and one batch is copied while the next is read.

A load ends when all its parts have ended. If a copy failed, the whole load failed and the engine computes all of it. If
the tier fails or is too slow, the load is cut at the first missing block: the engine keeps what comes before and
computes the rest. An engine that cannot use the beginning without the rest gets a failed load instead; the blocks that
have arrived can still be found in host memory.

The G1 blocks of a part are held from when it begins until nothing can write to them any more. Before that they belong
to the waiting request; so if the request ends, its load begins no more parts. A load that is given up before its
copiers have stopped is reported as failed at once, and its blocks stay held.

No request waits for a lower tier that hangs. A load loses time while its first missing part makes no progress: its read
(open_reads.py), or, while it waits for room, the reads of the loads before it. A load is cut when it has lost as much
time as one read may lose, also if it lost that piece by piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvbm.host.control_words import LANES
from kvbm.leader.request import Load, LoadPart
from kvbm.plan import Onboard
from kvbm.tiers.lower_tier import Claim, OwnedTier
from kvbm.tiers.settings import SpanNote
from kvbm.types import SlotState, Tier

if TYPE_CHECKING:
    from kvbm.core.store import PinnedBlocks
    from kvbm.leader.long_chains import LongMatch, Slices
    from kvbm.leader.request import LiveRequest
    from kvbm.tiers.lower_tier import LowerTier, TierContext
    from kvbm.tiers.open_reads import Fetch

FETCHES_AT_A_TIME = 32
LANES_SHARE = 4  # this part of the lanes is left for loads without slices


@dataclass(slots=True, eq=False)
class _Copy:
    order: Onboard
    load: Load
    source: PinnedBlocks
    born_step: int
    born_s: float
    is_void: bool = False

    def age(self, step: int) -> int:
        return step - self.born_step


class Onboards:
    """`arriving` are the loads in flight, by the hashes of their first blocks. `ended` are those that have ended since
    the last `settle`."""

    def __init__(self, context: TierContext, tiers: Sequence[LowerTier], slices: Slices) -> None:
        self._slices = slices
        self._host = context.host
        self._tiers = tiers
        self._rates = context.rates
        self._counters = context.counters
        self._block_pool = context.callbacks
        self._settings = context.settings
        self._overdue_steps = context.settings.overdue_steps
        self._clock = context.callbacks.clock
        self._spans = context.callbacks.spans
        self._step = 0
        self.in_flight: dict[int, _Copy] = {}  # from before a copier can run until it has stopped
        self._fetches: dict[Fetch, Load] = {}
        self._reading: list[Load] = []  # loads with blocks from lower tiers
        self._in_slices: deque[Load] = deque()  # loads with `slices`, the one whose turn it is first
        self.arriving: dict[bytes, Load] = {}
        self._has_moved = True  # a read or a copy of a load in `_reading` has ended, or a read has begun
        self._idle_s = 0.0  # how long nothing has
        self._checked_s = self._clock()
        self._lanes = deque(range(LANES))
        self._orders: list[Onboard] = []
        self.ended: list[Load] = []
        self._are_ranks_silent = False

    def can_begin(self, promises: int = 0) -> bool:
        """Whether a load may be promised in addition to these: not while an older one is overdue or given up, or a rank
        is silent."""
        oldest = next(iter(self.in_flight.values()), None)
        return (
            len(self._lanes) > promises + len(self._fetches)
            and not self._are_ranks_silent
            and (oldest is None or not (oldest.load.is_reported or oldest.age(self._step) >= self._overdue_steps))
        )

    def begin(
        self,
        request: LiveRequest,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        tokens: int,
        found: LongMatch | None = None,
    ) -> Load | None:
        """Bring `hashes[i]` into G1 block `block_ids[i]`. None if a block is no longer there. Consumes the match."""
        blocks = tuple(hashes), tuple(block_ids)
        new_load = partial(Load, request, *blocks, tokens, self._clock(), self._step, end=len(hashes))
        load = new_load()
        if found is not None and not self._begin_long(load, found):
            load, found = new_load(), None
        if found is None and not self._begin_short(load):
            return None
        self.arriving.update(dict.fromkeys(load.hashes[: self._slices.size], load))
        if load.waiting:
            self._reading.append(load)
            self._begin_fetches()
        if load.slices:
            self._in_slices.append(load)
        return load

    def _begin_short(self, load: Load) -> bool:
        """Order the copy of what is in host memory, and hold the rest in lower tiers. False if a block is in none."""
        positions: Sequence[int] = range(len(load.hashes))
        source, missing = self._host.store.pin(load.hashes), list[int]()
        if source is None:
            missing = self._host.store.missing(load.hashes)
            positions = sorted(set(positions).difference(missing))
            source = self._host.store.pin([load.hashes[position] for position in positions])
        assert source is not None, "blocks that are not missing can be pinned"
        if missing and not self._claim(load, missing):
            source.release()
            return False
        if positions:
            part = load.part(positions)
            self._open(load, part.block_ids)
            self._order(load, part, source)
        else:
            source.release()
        return True

    def _claim(self, load: Load, positions: Sequence[int]) -> bool:
        """Hold the blocks at these positions in lower tiers. False if one of them is in none."""
        for tier in self._tiers:
            claim = tier.claim(load.hashes, positions, load.request.extents.get(tier, ()))
            load.add(tier, claim)
            positions = sorted(set(positions).difference(*(batch for batch, _ in claim.batches)))
            if not positions:
                return True
        self._release_kept(load)
        return False

    def _begin_long(self, load: Load, found: LongMatch) -> bool:
        """Begin a load whose blocks the match holds already, except those behind that it did not look for. False if it
        found other blocks or fewer."""
        hashes = load.hashes
        is_valid, handles = found.is_valid(), found.take()
        tier_of = {tier.store: tier for tier in self._tiers if isinstance(tier, OwnedTier)}
        first = 0
        for store, blocks in handles:
            last = min(first + len(blocks.slots), len(hashes))
            is_valid &= first >= last or blocks.hashes[last - first - 1] == hashes[last - 1]  # proves the whole prefix
            if first >= last:
                self._slices.release(blocks)
            elif store is self._host.store:
                load.slices.append((load.part(range(first, last)), blocks))
            else:
                tier = tier_of[store]
                load.add(tier, Claim([(batch, None) for batch in tier.batches(range(first, last))], [blocks]))
            first = last
        is_valid &= not any(store.contains(one) for one in hashes[first:] for store in found.stores)
        if not is_valid or (first < len(hashes) and not self._claim(load, range(first, len(hashes)))):
            for blocks in (*load.kept, *(source for _, source in load.slices)):
                self._slices.release(blocks)
            return False
        return True

    def end_request(self, request: LiveRequest) -> None:
        """Begin no more parts of its loads: its G1 blocks are the engine's again, except those that are held."""
        for load in dict.fromkeys((*self._reading, *self._in_slices)):
            if load.request is request and (load.waiting or load.slices):
                self._fail(load)

    def step(self) -> tuple[Onboard, ...]:
        self._step += 1
        if self._reading:
            self._give_up_hopeless()
            self._begin_fetches()
        if self._in_slices:
            self._begin_slices()
        orders, self._orders = tuple(self._orders), []
        return orders

    def overdue(self) -> tuple[Onboard, ...]:
        """Return the orders without a result, each once every `overdue_steps` steps."""
        if not self.in_flight:
            return ()
        ages = ((copy.order, copy.age(self._step)) for copy in self.in_flight.values())
        return tuple(order for order, age in ages if age > 0 and age % self._overdue_steps == 0)

    def fetched(self, fetches: Sequence[Fetch]) -> None:
        """Continue with blocks that have arrived from a lower tier, or failed to."""
        for fetch in fetches:
            load = self._fetches.pop(fetch, None)
            if load is None:  # read ahead, or it failed with an earlier fetch of this batch
                if fetch.blocks is not None:
                    fetch.blocks.release()
                continue
            part, self._has_moved = load.reads.pop(fetch), True
            load.note_read(part.tier.kind, self._clock() - load.born_s)
            if fetch.is_copy:
                load.unrated.add(part.tier.kind)
            is_good = fetch.blocks is not None
            self._note_span(load, "read", fetch.born_s, len(fetch.hashes), part.tier.kind, is_good=is_good)
            if fetch.blocks is not None:
                self._order(load, part, fetch.blocks)
            else:
                self._close(load, part.block_ids)
                self._cut(load, part.first)

    def settle(self, *, are_ranks_silent: bool = False) -> list[Load]:
        """Read the lane words; return the loads that have ended, each once. An engine that `gives_up_blocks` gets a
        load as failed before its copiers have stopped if it is overdue, or if a rank does not respond."""
        self._are_ranks_silent = are_ranks_silent
        copies = list(self.in_flight.values())
        lanes = [copy.order.lane for copy in copies]
        results = self._host.region.lane_results(lanes, list(self.in_flight)) if copies else ()
        for copy, result in zip(copies, results, strict=True):
            if result is not SlotState.EMPTY:
                self._end_copy(copy, is_ready=result is SlotState.READY and not copy.is_void)
        for copy in self.in_flight.values() if self._settings.traits.gives_up_blocks else ():
            if not (are_ranks_silent or copy.age(self._step) >= self._overdue_steps):
                break
            self._fail(copy.load)
            self._report(copy.load)
        ended, self.ended = self.ended, []
        return ended

    def queue(self) -> tuple[int, float | None]:
        """Return how many blocks are being copied to G1, and since when the oldest copy has been ordered."""
        copies = list(self.in_flight.values())
        blocks = sum(len(copy.order.block_ids) for copy in copies)
        return blocks, copies[0].born_s if copies else None

    def is_reading(self) -> bool:
        """Whether a load waits for blocks from a lower tier, or for the turn of its next slice."""
        return bool(self._fetches or self._in_slices) or any(load.waiting for load in self._reading)

    def is_under_way(self, *, within_steps: int) -> bool:
        """Whether a read is in flight, or a copy that is not older than that."""
        if self.is_reading():
            return True
        youngest = next(reversed(self.in_flight.values()), None)
        return youngest is not None and youngest.age(self._step) <= within_steps

    def reset(self) -> None:
        """Let everything in flight end as failed."""
        for copy in self.in_flight.values():
            copy.is_void = True
        for load in dict.fromkeys((*self._reading, *self._in_slices)):
            self._fail(load)
        self.arriving.clear()

    def _open(self, load: Load, block_ids: Sequence[int]) -> None:
        """Hold the G1 blocks of a part that begins."""
        self._block_pool.hold(block_ids)
        load.open_parts += 1

    def _close(self, load: Load, block_ids: Sequence[int]) -> None:
        """Release the G1 blocks of a part to which nothing writes any more."""
        self._block_pool.release(block_ids[::-1])
        load.open_parts -= 1

    def _order(self, load: Load, part: LoadPart, source: PinnedBlocks) -> None:
        """Order the copy of an open part. `source` holds its blocks first, and possibly more."""
        slots = source.slots[: len(part.block_ids)]
        order = Onboard(
            generation=self._host.next_generation(),
            lane=self._lanes.popleft(),
            slots=tuple(slots),
            slot_generations=self._host.generations_of(slots),
            block_ids=part.block_ids,
        )
        self.in_flight[order.generation] = _Copy(order, load, source, self._step, self._clock())
        self._orders.append(order)

    def _begin_slices(self) -> None:
        """Order parts of long loads, about one slice of blocks per step. The loads take turns. A new one begins at the
        next step, because its beginning took as much time."""
        left = self._slices.size
        while left > 0 and self._in_slices and len(self._lanes) > len(self._fetches) + LANES // LANES_SHARE:
            if self._in_slices[0].born_step == self._step - 1:
                return
            load = self._in_slices.popleft()
            part, source = load.slices.popleft()
            if load.slices:
                self._in_slices.append(load)
            self._open(load, part.block_ids)
            self._order(load, part, source)
            left -= len(part.block_ids)

    def _begin_fetches(self) -> None:
        """First come, first served: a later load does not overtake one that waits for room."""
        for load in list(self._reading):
            while load.waiting:
                if len(self._fetches) >= FETCHES_AT_A_TIME or len(self._lanes) <= len(self._fetches):
                    return
                part = load.waiting[0]
                if part.tier.has_lost(part.hashes, part.extent) or len(part.hashes) > self._host.capacity_blocks:
                    self._cut(load, part.first)
                    break
                fetch = part.tier.fetch(part.hashes, load.request.tenant, part.extent)
                if fetch is None:
                    return
                load.reads[fetch] = load.waiting.popleft()
                self._has_moved = True
                self._fetches[fetch] = load
                self._open(load, part.block_ids)

    def _end_copy(self, copy: _Copy, *, is_ready: bool) -> None:
        order, load = copy.order, copy.load
        self._note_span(load, "copy", copy.born_s, len(order.block_ids), Tier.HOST, is_good=is_ready)
        del self.in_flight[order.generation]
        self._lanes.append(order.lane)
        self._has_moved |= load in self._reading
        self._close(load, order.block_ids)
        if is_ready:
            self._counters.durations["host-device"].observe(self._clock() - copy.born_s)
        else:
            if not copy.is_void:
                self._counters.onboard_copy_failed_blocks += len(order.block_ids)
                self._host.store.forget(copy.source.hashes)
            self._fail(load)
        copy.source.release()
        self._end_if_over(load)

    def _note_span(self, load: Load, name: str, born_s: float, blocks: int, tier: Tier, *, is_good: bool) -> None:
        if self._spans is not None:
            good = blocks if is_good else 0
            facts: dict[str, int | float | str] = {
                "tier": tier.name.lower(),
                "blocks": good,
                "bytes": good * self._settings.block_bytes,
                "failed_blocks": blocks - good,
            }
            self._spans(SpanNote(load.request.request_id, name, born_s, self._clock(), facts))

    def _fail(self, load: Load) -> None:
        """Begin no more parts of it, and release the G1 blocks that nothing writes to."""
        load.is_failed = True
        self._drop_parts(load, 0)

    def _cut(self, load: Load, end: int) -> None:
        """Load nothing from position `end` on."""
        load.end = min(load.end, end if self._settings.can_cut_loads else 0)
        if load.end == 0:
            load.is_failed = load.is_failed_below = True
        self._drop_parts(load, load.end)

    def _drop_parts(self, load: Load, end: int) -> None:
        """Drop the parts from position `end` on that have not begun or are being read. The load may end with them."""
        while load.waiting and load.waiting[-1].first >= end:
            load.waiting.pop()
        while load.slices and load.slices[-1][0].first >= end:
            self._slices.release(load.slices.pop()[1])
        if not load.slices and load in self._in_slices:
            self._in_slices.remove(load)
        for fetch in [fetch for fetch, part in load.reads.items() if part.first >= end]:
            del self._fetches[fetch]
            fetch.abandon()
            self._close(load, load.reads.pop(fetch).block_ids)
        self._end_if_over(load)

    def _end_if_over(self, load: Load) -> None:
        if load.open_parts or load.waiting or load.slices:
            return
        if load in self._reading:
            self._reading.remove(load)
            self._release_kept(load)
            if not load.is_failed and load.end == len(load.hashes):
                for tier in load.read_s.keys() - load.unrated:
                    first_s, last_s = load.read_s[tier]
                    self._rates.note_read(load.count_of(tier, load.end), last_s, tier, first_s=first_s)
        self._report(load)

    def _release_kept(self, load: Load) -> None:
        for kept in load.kept:
            self._slices.release(kept) if len(load.kept) > 1 else kept.release()
        load.kept.clear()

    def _report(self, load: Load) -> None:
        """Put it among the ended loads, once."""
        if load.is_reported:
            return
        load.is_reported = True
        for sequence_hash in load.hashes[: self._slices.size]:
            if self.arriving.get(sequence_hash) is load:
                del self.arriving[sequence_hash]
        self.ended.append(load)

    def _give_up_hopeless(self) -> None:
        """Cut the loads whose remaining blocks are computed faster than read, or whose tier hangs."""
        now_s = self._clock()
        self._idle_s = 0.0 if self._has_moved else self._idle_s + now_s - self._checked_s
        self._has_moved, self._checked_s = False, now_s
        for load in list(self._reading):
            if (missing := load.first_missing()) is None:
                continue
            (part, read), tier, waited_s = missing, missing[0].tier, now_s - load.born_s
            blocks, all_blocks = load.lower_blocks(part.first), load.lower_blocks(load.end)
            idle_s = min(waited_s, self._idle_s) if read is None else read.idle_s
            load.is_given_up = not tier.is_on or load.has_hung(idle_s, tier.reads)
            if (
                load.is_given_up
                or waited_s > self._settings.read_timeout_s
                or self._rates.is_hopeless(waited_s, blocks, all_blocks)
            ):
                arrived = load.count_of(tier.kind, part.first)
                self._rates.give_up(tier.kind, arrived, all_blocks - blocks, waited_s)
                self._cut(load, part.first)
