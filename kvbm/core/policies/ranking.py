"""Ranked: the order of eviction of `eviction: adaptive`. See docs/concepts/eviction.md.

Each block has a class, from what is known of its use when a request arrives:

    DEMOTED    a hint says that no request will use it again
    NEW        no block of its chain is known, or none but a prefix that many share
    ARRIVING   not in the cache, but its chain continues known blocks; by the pause since their last use
    RESIDENT   in the cache when the request arrived; by the pause before that
    RETAINED   a hint says that its chain comes back; by how long it may be away

Each class is a list in the order of use. The victim is the head of one of these lists. A table says which: it has a
weight and a least age for each class, and the victim is the head with the largest `weight * max(age, least age)`. With
the table LRU, that is the least recently used block. While hints are followed (docs/reference/hints.md), DEMOTED blocks
come first, and the age of a RETAINED block begins when its time, the grace, has ended. Otherwise, RETAINED is like
RESIDENT, and DEMOTED like NEW, with a least age because the blocks before may have one. Graces of uses before hints
were followed do not count: meanwhile, a use may have put the beginning of a retained chain into another class.

Classes are monotone along a chain: a block's class is never lower than that of the block after it. With every table a
chain therefore loses its tail first.

A block costs nine bytes here: a double for the time of its last use, and a mark, the byte with its class and what is
known of it. Only `adaptive` uses this.
"""

from __future__ import annotations

import copy
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import cast

from kvbm.core.index import ascending_runs, picked
from kvbm.core.slot_lists import Order, SlotLists

PAUSES_S = (25.0, 100.0, 400.0)  # the limits between classes of pauses
# A block that came back after such a pause counts as at least so old. Blocks behind it in a chain were last used before
# the pause, so they are at least as old.
LEAST_AGES_S = (0.0, *PAUSES_S)

# How long blocks may be retained. A time between two of them counts as the longer one. Powers of four, as the pauses.
GRACES_S = (30.0, 120.0, 480.0, 1920.0)

# Classes, from the tail of a chain to its head. ARRIVING and RESIDENT have one class per pause, the longest one first,
# RETAINED has one per grace, the shortest one first.
PAUSES = len(LEAST_AGES_S)
DEMOTED, NEW, ARRIVING, RESIDENT = 0, 1, 2, 2 + PAUSES
RETAINED = RESIDENT + PAUSES
UNRETAINED = RETAINED - 1  # the class after a retention has been ended
CLASSES = RETAINED + len(GRACES_S)
CLASS_MASK, REUSED, SHARED = 0x0F, 0x10, 0x20  # the bits of a mark
OWNED = 0x40  # only requests of one session have used the block
PLAIN = ARRIVING + PAUSES - 1  # the mark of a block of which nothing is known, such as one read from disk
PLAIN_MARK = bytes([PLAIN])
_CLASS_OF = bytes(mark & CLASS_MASK for mark in range(256))
_IS_HINTED = bytes(mark & CLASS_MASK >= RETAINED or mark & OWNED > 0 for mark in range(256))
_OF_NEW_BLOCKS = bytes(mark for mark in range(256) if mark & CLASS_MASK <= NEW)
LEAST_WINDOW = 32  # slots that are examined together; more while all of them are evicted
SPARE_S = 1e9  # subtracted from the time of the last use of blocks that are evicted before others
TICK_S = 1e-6  # between two uses at the same time, so that their order is kept


@dataclass(frozen=True, slots=True)
class Table:
    """How long blocks stay. `new` and `arriving` are the weights of these classes; the weight of RESIDENT is 1.

    With `uses_pauses`, LEAST_AGES_S apply. With `admits_new` false, a new block may replace new blocks only.
    """

    name: str
    new: float
    arriving: float
    uses_pauses: bool = True
    admits_new: bool = True

    def weights(self) -> tuple[float, ...]:
        return (self.new, self.new, *[self.arriving] * PAUSES, *[1.0] * (PAUSES + len(GRACES_S)))

    def least_ages_s(self) -> tuple[float, ...]:
        ages = LEAST_AGES_S[::-1] if self.uses_pauses else (0.0,) * PAUSES
        return (ages[0], 0.0, *ages, *ages, *[0.0] * len(GRACES_S))  # any class may be before DEMOTED in a chain


LRU = Table("lru", 1, 1, uses_pauses=False)
PROBATION = Table("probation", 4, 1)
INCUMBENTS = Table("incumbents", math.inf, 4, admits_new=False)
TABLES = (LRU, PROBATION, INCUMBENTS)
# A block that is written to a lower tier is new there, whatever it is above; its chain is known.
IN_LOWER_TIER = bytes(
    mark & (REUSED | SHARED)
    | (its_class if (its_class := mark & CLASS_MASK) < RESIDENT else ARRIVING + min(its_class - RESIDENT, PAUSES - 1))
    for mark in range(256)
)
NO_GRACES_S = (0.0,) * CLASSES


def _view(times_s: array[float]) -> memoryview[float]:
    """Return a view of an array: writing an item of it takes two thirds of the time."""
    return cast("memoryview[float]", memoryview(times_s))


def known_blocks(marks: bytes) -> int:
    """Return how many of these marks are of blocks whose chain is known."""
    return len(marks.translate(None, delete=_OF_NEW_BLOCKS))


def picked_marks(marks: bytes, positions: Sequence[int]) -> bytes:
    """Return the marks at these positions, which are different; empty without marks."""
    if not marks or marks.count(marks[0]) == len(marks):
        return marks[: len(positions)]
    return bytes(picked(marks, positions))


class Ranked(Order):
    """Evicts the block that `table` ranks lowest. `marks` has a byte per slot; `now_s` is the time of the next use."""

    def __init__(self, slot_count: int, table: Table = LRU) -> None:
        self.lists = SlotLists(slot_count, CLASSES)
        self.marks = bytearray([PLAIN]) * slot_count
        self.has_hints = False  # whether a mark may be RETAINED or OWNED
        self.follows_hints = False
        self._followed_since_s = 0.0
        self.now_s = 0.0
        nodes = 1 + CLASSES  # they were never used
        self._used_s = _view(array("d", [-1.0]) * (slot_count + nodes))
        self._nodes = range(self.lists.inactive, self.lists.inactive + CLASSES)
        self.use_table(table)

    def copy(self) -> Ranked:
        """Return an order of its own with the same blocks."""
        twin = copy.copy(self)
        twin.lists, twin.marks = self.lists.copy(), self.marks.copy()
        twin._used_s = _view(array("d", self._used_s))
        return twin

    def use_table(self, table: Table, *, follows_hints: bool = False) -> None:
        if follows_hints and not self.follows_hints:
            self._followed_since_s = self.now_s
        self.table, self.follows_hints = table, follows_hints
        weights, graces_s = table.weights(), NO_GRACES_S
        if follows_hints:
            weights, graces_s = (math.inf, *weights[1:]), (*NO_GRACES_S[:RETAINED], *GRACES_S)
        ranks = list(zip(self._nodes, weights, table.least_ages_s(), graces_s, strict=True))
        self._ranks = ranks if self.has_hints else ranks[NEW:RETAINED]  # without hints, the other lists are empty

    def advance_to(self, now_s: float) -> None:
        """Set the time of the next use. Time never goes back."""
        self.now_s = max(self.now_s, now_s)

    def marks_of(self, slots: Sequence[int]) -> bytes:
        """Return the mark of the block in each slot."""
        if isinstance(slots, range):
            return bytes(self.marks[slots.start : slots.stop])
        return bytes(picked(self.marks, slots))

    def mark(self, slots: list[int], marks: bytes) -> None:
        """Set the marks of slots that are in no list of inactive ones, and the time of their last use."""
        self._mark(ascending_runs(slots), marks or PLAIN_MARK * len(slots))

    def remark(self, slots: list[int], marks: bytes, runs: Sequence[Sequence[int]] = ()) -> None:
        """Like `mark`, for blocks that have marks already. While hints are followed, a block stays RETAINED until its
        grace has ended, and OWNED only if the new mark says so, too. `runs` are the same slots in pieces."""
        self._mark(runs or ascending_runs(slots), self._merged(slots, marks) if self.follows_hints else marks)

    def _mark(self, runs: Sequence[Sequence[int]], marks: bytes) -> None:
        all_marks, used_s, now_s, at = self.marks, self._used_s, self.now_s, 0
        for run in runs:
            end = at + len(run)
            if isinstance(run, range):
                all_marks[run.start : run.stop] = marks[at:end]
                self._note_use(run)
            elif marks.count(marks[0]) == len(marks):
                mark = marks[0]
                for slot in run:
                    all_marks[slot] = mark
                    used_s[slot] = now_s
            else:
                for slot, mark in zip(run, marks[at:end], strict=True):
                    all_marks[slot] = mark
                    used_s[slot] = now_s
            at = end

    def _note_use(self, run: Sequence[int]) -> None:
        used_s, now_s = self._used_s, self.now_s
        if isinstance(run, range):
            used_s[run.start : run.stop] = array("d", (now_s,)) * len(run)
        else:
            for slot in run:
                used_s[slot] = now_s

    def _merged(self, slots: Sequence[int], marks: bytes) -> bytes:
        former = bytes(picked(self.marks, slots))
        if not any(former.translate(_IS_HINTED)) and not any(marks.translate(_IS_HINTED)):
            return marks
        merged = bytearray()
        for slot, old, new in zip(slots, former, marks, strict=True):
            its_class, old_class = new & CLASS_MASK, old & CLASS_MASK
            if old_class > its_class and self._is_in_grace(slot, old_class):
                its_class = old_class
            merged.append(its_class | new & (REUSED | SHARED) | new & old & OWNED)
        return bytes(merged)

    def _is_in_grace(self, slot: int, its_class: int) -> bool:
        if its_class < RETAINED or (used_s := self.used_s(slot)) <= self._followed_since_s:
            return False
        return used_s + GRACES_S[its_class - RETAINED] > self.now_s

    def let_go(self, listed: list[int], others: list[int], *, demotes: bool) -> None:
        """End the retention of the OWNED blocks of a chain, whose slots are `listed` as inactive, in the order of the
        chain, or are `others`. With `demotes`, OWNED blocks are evicted first. All listed ones count as used now:
        blocks that change their class move to the end of a list, and no block before them may be older."""
        marks, least = self.marks, DEMOTED if demotes else RETAINED
        changed = [slot for slot in (*listed, *others) if marks[slot] & OWNED and marks[slot] & CLASS_MASK >= least]
        self._lower(listed, changed, DEMOTED if demotes else UNRETAINED)

    def unretain(self, listed: list[int], slots: Sequence[int]) -> None:
        """End the retention of `slots`, the end of a chain whose slots in a list are `listed`. See `let_go`."""
        changed = [slot for slot in slots if self.marks[slot] & CLASS_MASK >= RETAINED]
        self._lower(listed, changed, UNRETAINED)

    def _lower(self, listed: list[int], slots: list[int], its_class: int) -> None:
        if not slots:
            return
        self.lists.remove(listed)
        for slot in slots:
            self.marks[slot] = self.marks[slot] & ~CLASS_MASK | REUSED | its_class
        self.add(listed[::-1])

    def add(self, slots: list[int], runs: Sequence[Sequence[int]] = ()) -> None:
        if not slots:
            return
        self.now_s += TICK_S
        runs = runs or ascending_runs(slots[::-1])
        marks = b"".join(map(self.marks_of, runs))
        inactive, count, at = self.lists.inactive, len(slots), 0
        if marks.count(marks[0]) == count and not isinstance(runs[0], range):
            self._append(inactive + (marks[0] & CLASS_MASK), slots)
            return
        for run in runs:
            self._note_use(run)
        classes = marks.translate(_CLASS_OF)[::-1]
        while at < count:
            rest = classes[at:]
            end = count - len(rest.lstrip(rest[:1]))
            self.lists.append(inactive + rest[0], slots[at:end])
            at = end

    def _append(self, node: int, slots: list[int]) -> None:
        """Append to a list like SlotLists, and note the use, in one pass: it runs for every slot."""
        newer, older, used_s, now_s = self.lists.newer, self.lists.older, self._used_s, self.now_s
        last = older[node]
        for slot in slots:
            newer[last] = slot
            older[slot] = last
            used_s[slot] = now_s
            last = slot
        self.lists.join(last, node)

    def evict_next(self, slots: list[int]) -> None:
        used_s, marks, inactive = self._used_s, self.marks, self.lists.inactive
        for slot in slots:
            used_s[slot] = self.used_s(slot) - SPARE_S
        for its_class, some in groupby(slots, key=lambda slot: marks[slot] & CLASS_MASK):
            self.lists.prepend(inactive + its_class, some)

    def take(self, count: int) -> list[int]:
        found, ends = self._next(count)
        for node, end in ends.items():
            self.lists.join(node, self.lists.newer[end])
        return found

    def first(self, count: int) -> list[int]:
        return self._next(count)[0]

    def _next(self, count: int) -> tuple[list[int], dict[int, int]]:
        """Return up to `count` slots that are evicted next, and the last one of each list that has any of them."""
        newer = self.lists.newer
        found: list[int] = []
        ends: dict[int, int] = {}
        while len(found) < count and (next_list := self._lowest(ends)) is not None:
            node, outranks = next_list
            end, window, is_lowest = ends.get(node, node), LEAST_WINDOW, True
            while is_lowest and len(found) < count:
                chunk = [end := newer[end] for _ in range(min(count - len(found), window))]
                if node in chunk:  # after the last slot
                    del chunk[chunk.index(node) :]
                    is_lowest = False
                if chunk and not outranks(chunk[-1]):  # ranks fall along a list
                    del chunk[bisect_left(chunk, True, key=lambda one: not outranks(one)) :]
                    is_lowest = False
                found += chunk
                window *= 16
            ends[node] = found[-1]
        return found, ends

    def free_all(self) -> None:
        for node in self._nodes:
            self.lists.append_all(self.lists.free, node)

    def is_shared(self, slot: int | None) -> bool:
        """Whether the block in this slot is the beginning of several chains; not for no slot."""
        return slot is not None and self.marks[slot] & SHARED > 0

    def used_s(self, slot: int) -> float:
        """Return when the block in this slot last became inactive."""
        used_s = self._used_s[slot]
        return used_s if used_s > -SPARE_S / 2 else used_s + SPARE_S

    def room(self, marks: bytes, free: int, inactive: int) -> int:
        """Return how many blocks with these marks, which never rise, may be kept, if so many slots are free and
        inactive."""
        room = max(0, min(len(marks), free + inactive))
        if self.table.admits_new:
            return room
        known = min(room, known_blocks(marks))
        new = chain.from_iterable(self.lists.walk(self.lists.inactive + one) for one in (DEMOTED, NEW))
        new_in_cache = sum(1 for _ in islice(new, max(0, room - free)))
        return max(known, min(room, free + new_in_cache))

    def _lowest(self, ends: dict[int, int]) -> tuple[int, Callable[[int], bool]] | None:
        """Return the list whose head is evicted next, and a function that says whether a slot of this list is evicted
        before the other heads, the slots after `ends`. Of equal ones, the lowest class comes first. None if all lists
        are empty."""
        now_s, used_s, since_s, newer = self.now_s + TICK_S, self._used_s, self._followed_since_s, self.lists.newer

        def rank(slot: int, weight: float, least_age_s: float, grace_s: float) -> float:
            age_s = now_s - used_s[slot]
            if grace_s and used_s[slot] > since_s:
                age_s -= grace_s
            return -weight * max(age_s, least_age_s)

        ranks = [
            (rank(head, weight, least_age_s, grace_s), node, weight, least_age_s, grace_s)
            for node, weight, least_age_s, grace_s in self._ranks
            if (head := newer[ends.get(node, node)]) != node
        ]
        if not ranks:
            return None
        ranks.sort()
        _, node, weight, least_age_s, grace_s = ranks[0]
        if len(ranks) == 1:
            return node, lambda slot: True
        limit = ranks[1][:2]
        return node, lambda slot: (rank(slot, weight, least_age_s, grace_s), node) < limit
