"""Adaptive eviction: what is known of the blocks of a request, and which table of ranking.py the store uses.

`Adaptive.arrive` gets the whole chain of a request. From the blocks in the cache, and a History of blocks that were
used before, it derives an ChainUse: the marks of all blocks of the chain.

Each table has a shadow cache: a small cache of its own, without bytes, of every n-th block, n being such that it has
about SHADOW_BLOCKS places. Whether a block is one of them depends on its hash alone. A table's gain is the sum of the
hits that its shadow cache has more than that of LRU, in the same requests. The store uses a table other than LRU only
while its gain is significant. Without requests, or without a difference, the table stays LRU.

The arrival of a long chain costs little per block. What is in the cache is the beginning of the chain, so its end is
found by bisection, and the History has blocks at certain positions only. The shadow caches need not know of a chain
before the next one arrives: until then, `see` shows them a part of it in each step. Their blocks are chosen by the
first byte of the hash, which every hash function distributes evenly, with operations on all of these bytes at once.

Memory: 16 bytes per block for the History, and a constant for the shadow caches. The owner of the store calls this.
"""

from __future__ import annotations

import copy
import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from zlib import crc32

from kvbm.core.index import HashIndex
from kvbm.core.policies.chain_use import LONGEST_CHAIN, ChainHint, ChainUse, pause_class
from kvbm.core.policies.policy import Policy
from kvbm.core.policies.ranking import (
    REUSED,
    SHARED,
    TABLES,
    Ranked,
    Table,
)

SHADOW_BLOCKS = 2048  # places of a shadow cache, of larger stores
DECIDE_AFTER = 500  # sampled blocks between two decisions
MEMORY_BLOCKS = 20_000  # after so many sampled blocks, gains have decreased to 1/e
STANDARD_ERRORS = 0.5  # that a gain must exceed, so that it counts as significant
LEAST_GAIN = 0.005  # of the hits of LRU
LEAST_REQUESTS = 4  # whose hits differ from those of LRU: the standard error of fewer says nothing
LONGEST_PAUSE_S = 60.0  # between two requests; more is time in which nothing competed for the cache
SEEN_BLOCKS = 512  # of the last chain that arrived, which the shadow caches see in a step
RECENT_BLOCKS = 128  # at the end of a chain, of which the history has more than of the blocks before
RECENT_DISTANCE, EARLIER_DISTANCE = 4, 128  # between two positions of which the history has the block
FIRST_LOOKUPS = 8  # in the history, from the beginning of a chain: if none of them is known, no later one is looked up


def _chosen(hashes: Sequence[bytes], limit: int) -> list[int]:
    """Return the positions of the hashes whose first byte is below `limit`. All hashes have the same length."""
    flags = b"".join(hashes)[:: len(hashes[0])].translate(_is_below(limit)) if hashes else b""
    found, position = [], flags.find(1)
    while position >= 0:
        found.append(position)
        position = flags.find(1, position + 1)
    return found


@cache
def _is_below(limit: int) -> bytes:
    return bytes(byte < limit for byte in range(256))


class History:
    """When blocks were last used and what was known of them, in or out of the cache. It has one of RECENT_DISTANCE of
    the last RECENT_BLOCKS of a chain, and one of EARLIER_DISTANCE of the blocks before. A block has the same position
    in each chain.

    A direct-mapped table: a later block overwrites an earlier one in its place. Blocks are named by their crc. An entry
    has the crc (32 bits), the time of the last use in quarters of a second (30 bits), and the bits of a mark (2).
    """

    def __init__(self, places: int) -> None:
        self._entries = array("Q", bytes(8 * max(1, places)))
        self._since = 0  # quarters of a second; entries of before are forgotten

    def positions(self, end: int) -> list[int]:
        """Return the positions of the blocks of a chain of `end` blocks that it has."""
        recent = max(0, end - RECENT_BLOCKS)
        recent += -recent % RECENT_DISTANCE
        return [*range(0, recent, EARLIER_DISTANCE), *range(recent, end, RECENT_DISTANCE)]

    def find_last(self, hashes: Sequence[bytes], start: int) -> tuple[int, int, float] | None:
        """Return the last known position of a chain, from `start` on, with its mark and the time of its last use."""
        entries, places, positions = self._entries, len(self._entries), self.positions(len(hashes))
        names = map(crc32, map(hashes.__getitem__, positions[:FIRST_LOOKUPS]))
        if not start and not any(entries[name % places] >> 32 == name for name in names):
            return None
        for index in range(len(positions) - 1, bisect_left(positions, start) - 1, -1):
            name = crc32(hashes[positions[index]])
            entry = entries[name % places]
            if entry and entry >> 32 == name and (when := entry >> 2 & (1 << 30) - 1) >= self._since:
                return positions[index], (entry & 3) << 4, when / 4
        return None

    def note(self, hashes: Sequence[bytes], arrival: ChainUse, now_s: float) -> None:
        """Note that a chain is used now."""
        entries, places, positions = self._entries, len(self._entries), self.positions(len(hashes))
        when = (max(self._since, int(now_s * 4)) & (1 << 30) - 1) << 2
        shared_end = bisect_left(positions, arrival.shared_end)
        reused_end = max(shared_end, bisect_left(positions, arrival.reused_end))
        marks = ((shared_end, (REUSED | SHARED) >> 4), (reused_end, REUSED >> 4), (len(positions), 0))
        at = 0
        for end, bits in marks:
            for name in map(crc32, map(hashes.__getitem__, positions[at:end])):
                entries[name % places] = name << 32 | when | bits
            at = end

    def clear(self, now_s: float) -> None:
        """Forget all entries. They stay in the table: to write millions of them would hold up a step."""
        self._since = int(now_s * 4) + 1


class ShadowCache:
    """A cache of sampled blocks with a fixed table. `gain` and `variance` compare its hits with those of LRU, or, if it
    follows hints, with those of the same table without hints. They differed in `differing` requests."""

    def __init__(self, places: int, table: Table) -> None:
        self.table = table
        self.hits = self.gain = self.variance = self.differing = 0.0
        self._order = Ranked(places, table)
        self._slots: dict[int, int] = {}
        self._names = array("L", bytes(8 * places))  # of the block in each slot
        self._free = places

    def use(self, names: Sequence[int], positions: Sequence[int], arrival: ChainUse, now_s: float) -> int:
        """Look for the blocks `names`, which are at these positions of a chain, and keep them. Return how many were
        found before the first one that was not."""
        order, slots = self._order, self._slots
        order.advance_to(now_s)
        found = list(map(slots.get, names))
        hit = found.index(None) if None in found else len(found)
        held = [(at, slot) for at, slot in enumerate(found) if slot is not None]
        seen = arrival.seen_by(positions, hit)
        if order.has_hints:
            seen = seen.beside(bytes([order.marks[slot] for _, slot in held]))
        marks = seen.marks(0, len(names))
        order.lists.remove([slot for _, slot in held])
        absent = [at for at, slot in enumerate(found) if slot is None]
        room = order.room(bytes([marks[at] for at in absent]), self._free, len(slots) - len(held))
        arrived = list(zip(absent, self._allocate(room), strict=False))
        for at, slot in arrived:
            slots[names[at]] = slot
            self._names[slot] = names[at]
        kept = sorted(held + arrived, reverse=True)
        kept_slots = [slot for _, slot in kept]
        if order.has_hints:
            order.remark([slot for _, slot in held], bytes([marks[at] for at, _ in held]))
            order.mark([slot for _, slot in arrived], bytes([marks[at] for at, _ in arrived]))
        else:
            order.mark(kept_slots, bytes([marks[at] for at, _ in kept]))
        order.add(kept_slots)
        return hit

    def with_hints(self) -> ShadowCache:
        """Return a copy that follows hints from now on."""
        hinted = copy.copy(self)
        hinted._order, hinted._slots, hinted._names = self._order.copy(), self._slots.copy(), self._names[:]
        hinted.hits = hinted.gain = hinted.variance = hinted.differing = 0.0
        hinted._order.has_hints = True
        hinted._order.use_table(self.table, follows_hints=True)
        return hinted

    def let_go(self, names: Sequence[int], *, demotes: bool) -> None:
        slots = [slot for name in names if (slot := self._slots.get(name)) is not None]
        self._order.let_go(slots, [], demotes=demotes)

    def unretain(self, sampled: Mapping[int, int], kept: int) -> None:
        slots = {slot: position for name, position in sampled.items() if (slot := self._slots.get(name)) is not None}
        self._order.unretain([*slots], [slot for slot, position in slots.items() if position >= kept])

    def note(self, hits: int, others: int) -> None:
        self.hits += hits
        self.gain += hits - others
        self.variance += (hits - others) ** 2
        self.differing += hits != others

    def decay(self, factor: float) -> None:
        self.hits *= factor
        self.gain *= factor
        self.variance *= factor
        self.differing *= factor

    def _allocate(self, count: int) -> list[int]:
        order = self._order
        from_free = min(count, self._free)
        evicted = order.take(count - from_free)
        for slot in evicted:
            del self._slots[self._names[slot]]
        self._free -= from_free
        return order.lists.take(order.lists.free, from_free) + evicted


@dataclass(slots=True)
class _Unseen:
    """The arrival of a chain. The shadow caches have seen the blocks before `position`; `sampled` has those of these
    blocks that they contain, with their positions."""

    hashes: Sequence[bytes]
    arrival: ChainUse
    time_s: float
    hint: ChainHint | None
    position: int = 0
    sampled: dict[int, int] = field(default_factory=dict)


class Adaptive(Policy):
    """The order of eviction of a store of `capacity_blocks`, and the choice of its table."""

    knows_uses = True
    order: Ranked

    def __init__(self, capacity_blocks: int) -> None:
        self.order = Ranked(capacity_blocks)
        self._history = History(2 * capacity_blocks)
        every = max(1, capacity_blocks // SHADOW_BLOCKS)
        self._limit = max(1, round(256 / every))  # of the first byte of sampled hashes; of these, one of `_every`
        self._every = max(1, every // 256)
        places = -(-capacity_blocks * self._limit // (256 * self._every))
        self._shadows = [ShadowCache(places, table) for table in TABLES]
        self._hinted: list[ShadowCache] = []  # the same tables, with hints; from the first hint on
        self._current = self._shadows[0]
        self.follows_hints = True
        self._unseen: _Unseen | None = None
        self._sampled = 0
        self._clock_s: float | None = None
        self._time_s = 0.0

    @property
    def marks(self) -> bytearray:
        return self.order.marks

    def arrive(
        self, hashes: Sequence[bytes], index: HashIndex, now_s: float, hint: ChainHint | None = None, above: int = 0
    ) -> ChainUse:
        self.see(LONGEST_CHAIN)
        hashes = hashes[:LONGEST_CHAIN]
        if hint is not None and not self._hinted:
            self._begin_hints()
        time_s = self._pass_time(now_s)
        arrival = self._examine(hashes, index, time_s, min(above, len(hashes)))
        self._unseen = _Unseen(hashes, arrival, time_s, hint)
        if not self._hinted or not self.follows_hints:
            return arrival
        return replace(arrival.beside(self.order.marks_of(index.find_prefix(hashes))), hint=hint)

    def see(self, blocks: int = SEEN_BLOCKS) -> None:
        """Show the shadow caches so many blocks more of the last chain that arrived. They use it after its end, and
        then the history has it, too."""
        if (unseen := self._unseen) is None:
            return
        begin = unseen.position
        unseen.position += blocks
        for name, position in self._sample(unseen.hashes[begin : unseen.position]).items():
            unseen.sampled.setdefault(name, begin + position)
        if unseen.position >= len(unseen.hashes):
            self._unseen = None
            self._history.note(unseen.hashes, unseen.arrival, unseen.time_s)
            if unseen.sampled:
                self._compare(unseen)

    def let_go(self, hashes: Sequence[bytes], listed: list[int], others: list[int], *, demotes: bool) -> None:
        """Note that the session that owns these blocks of the chain `hashes` needs them no more, see Ranked.let_go."""
        self.see(LONGEST_CHAIN)
        names = list(self._sample(hashes))
        for shadow in self._hinted:
            shadow.let_go(names, demotes=demotes)
        if self.follows_hints:
            self.order.let_go(listed, others, demotes=demotes)

    def unretain(self, hashes: Sequence[bytes], kept: int, listed: list[int], slots: list[int]) -> None:
        """Note that the blocks of the chain `hashes` from `kept` on are retained no longer, see Ranked.unretain."""
        self.see(LONGEST_CHAIN)
        sampled = self._sample(hashes)
        for shadow in self._hinted:
            shadow.unretain(sampled, kept)
        if self.follows_hints:
            self.order.unretain(listed, slots)

    def clear(self) -> None:
        """Forget what is known of blocks. The choice stays: it is about requests."""
        self.see(LONGEST_CHAIN)
        self._history.clear(self._time_s)

    def choice(self) -> tuple[int, int]:
        """Return 1 + the position of the table in TABLES, and its hits above those of LRU, in percent."""
        lru, current = self._shadows[0], self._current
        return 1 + TABLES.index(current.table), round(100 * current.gain / lru.hits) if lru.hits else 0

    def _begin_hints(self) -> None:
        self._hinted = [shadow.with_hints() for shadow in self._shadows]
        self.order.has_hints = True
        self.order.use_table(self._current.table, follows_hints=self.follows_hints)

    def _pass_time(self, now_s: float) -> float:
        passed_s = 0.0 if self._clock_s is None else now_s - self._clock_s
        self._clock_s = now_s
        self._time_s += min(max(0.0, passed_s), LONGEST_PAUSE_S)
        self.order.advance_to(self._time_s)
        return self._time_s

    def _sample(self, hashes: Sequence[bytes]) -> dict[int, int]:
        """Return the names of those blocks that the shadow caches have, and their positions."""
        every = self._every
        sampled: dict[int, int] = {}
        for position in _chosen(hashes, self._limit):
            if (crc := crc32(hashes[position])) % every == 0:
                sampled.setdefault(crc, position)
        return sampled

    def _examine(self, hashes: Sequence[bytes], index: HashIndex, time_s: float, above: int) -> ChainUse:
        order, end, slot_of = self.order, len(hashes), index.slot_of
        hit = above
        if hit < end and slot_of(hashes[hit]) is not None:
            hit = bisect_left(hashes, True, lo=hit, key=lambda name: slot_of(name) is None)
        shared_end = bisect_left(hashes, True, hi=hit, key=lambda name: not order.is_shared(slot_of(name)))
        known = self._history.find_last(hashes, hit)
        if known is None and above:  # the store knows nothing of blocks above it
            known = self._history.find_last(hashes, 0)
        if known is not None:
            last, mark, used_s = known
            if mark & SHARED:
                shared_end = last + 1
            last = max(last, hit - 1)
        elif (slot := slot_of(hashes[hit - 1]) if hit else None) is not None:
            last, mark, used_s = hit - 1, order.marks[slot], order.used_s(slot)
        else:
            return ChainUse(0, 0, 0, pause=0, resident_pause=0, continues=False)
        continues = not mark & REUSED or (not mark & SHARED and last == end - 1)
        if not continues:
            return ChainUse(hit, last + 1, last + 1, pause=0, resident_pause=0, continues=False)
        pause = resident_pause = pause_class(time_s - used_s)
        if shared_end < hit and (slot := slot_of(hashes[shared_end])) is not None:
            resident_pause = max(pause, pause_class(time_s - order.used_s(slot)))
        return ChainUse(hit, shared_end, last + 1, pause, resident_pause, continues=True)

    def _compare(self, seen: _Unseen) -> None:
        names, positions = list(seen.sampled), list(seen.sampled.values())
        arrival, time_s, hint = seen.arrival, seen.time_s, seen.hint
        hits = [shadow.use(names, positions, arrival, time_s) for shadow in self._shadows]
        for shadow, its_hits in zip(self._shadows, hits, strict=True):
            shadow.note(its_hits, hits[0])
        hinted = arrival if hint is None else replace(arrival, hint=hint)
        for shadow, hits_without in zip(self._hinted, hits, strict=False):
            shadow.note(shadow.use(names, positions, hinted, time_s), hits_without)
        self._sampled += len(names)
        if self._sampled >= DECIDE_AFTER:
            self._current = self._decide()
            self.follows_hints = self._are_hints_harmless()
            self.order.use_table(self._current.table, follows_hints=self.follows_hints and bool(self._hinted))
            for shadow in (*self._shadows, *self._hinted):
                shadow.decay(math.exp(-self._sampled / MEMORY_BLOCKS))
            self._sampled = 0

    def _decide(self) -> ShadowCache:
        lru, current = self._shadows[0], self._current

        def score(shadow: ShadowCache) -> float:
            if shadow is lru or shadow.differing < LEAST_REQUESTS:
                return 0.0
            return shadow.gain - STANDARD_ERRORS * math.sqrt(shadow.variance) - LEAST_GAIN * lru.hits

        best = max(self._shadows, key=score)  # LRU if none is better
        is_clear = best.gain > current.gain + STANDARD_ERRORS * math.sqrt(best.variance)
        return best if best is lru or current is lru or is_clear else current

    def _are_hints_harmless(self) -> bool:
        """Whether the current table has, with hints, not significantly fewer hits than without."""
        if not self._hinted:
            return True
        hinted = self._hinted[TABLES.index(self._current.table)]
        tolerated = STANDARD_ERRORS * math.sqrt(hinted.variance) + LEAST_GAIN * self._current.hits
        return hinted.gain >= -tolerated
