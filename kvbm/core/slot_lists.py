"""SlotLists: ordered lists of slots. Order: which of the inactive ones is evicted next.

They are circular doubly linked lists that share two arrays of ints, with one extra node per list for its two ends.
A slot is in at most one list and costs eight bytes. Every operation changes only the slots it is given.

       node of the list ──newer──▶ oldest slot ──newer──▶ ... ──newer──▶ newest slot ──newer──▶ node of the list

One list holds the free slots. The others hold the inactive blocks; each policy has an Order of its own.

Only the store and its policy use them. The store decides from the states which slots belong in which list.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class SlotLists:
    """Ordered lists over `slot_count` slots: `free`, and `list_count` lists of inactive slots from `inactive` on. All
    slots start in `free`, in ascending order. `older` and `newer` are the neighbours of each slot and node. They are
    views of arrays, because writing an item of a view takes two thirds of the time."""

    def __init__(self, slot_count: int, list_count: int = 1) -> None:
        self.free = slot_count
        self.inactive = slot_count + 1
        neighbours = array("i", range(-1, slot_count + list_count + 2))
        self.older, self.newer = memoryview(neighbours[:-2]), memoryview(neighbours[2:])
        self.join(self.free, 0 if slot_count else self.free)
        self.join(slot_count - 1 if slot_count else self.free, self.free)
        for node in range(self.inactive, self.inactive + list_count):
            self.join(node, node)

    def copy(self) -> SlotLists:
        """Return lists of their own with the same slots."""
        twin = copy.copy(self)
        twin.older, twin.newer = memoryview(array("i", self.older)), memoryview(array("i", self.newer))
        return twin

    def append(self, which: int, slots: Iterable[int]) -> None:
        """Put `slots`, which are in no list, at the newest end, the last one newest."""
        _link(which, slots, self.newer, self.older)

    def prepend(self, which: int, slots: Iterable[int]) -> None:
        """Put `slots`, which are in no list, at the oldest end, the last one oldest."""
        _link(which, slots, self.older, self.newer)

    def take(self, which: int, count: int) -> list[int]:
        """Remove and return the `count` oldest slots, oldest first. The list must hold as many."""
        newer = self.newer
        slot, taken = newer[which], []
        for _ in range(count):
            taken.append(slot)
            slot = newer[slot]
        self.join(which, slot)
        return taken

    def remove(self, slots: Sequence[int]) -> None:
        """Remove `slots` from their lists. They must be different, and each must be in a list.

        Blocks that were released together are neighbours, tail first. So `slots` is cut into runs in which each slot is
        the older neighbour of the previous one, and each run is removed as a whole.
        """
        if not slots:
            return
        newer, older = self.newer, self.older
        head = tail = slots[0]
        for slot in slots:
            if slot != head and older[tail] != slot:
                before, after = older[tail], newer[head]
                newer[before], older[after] = after, before
                head = slot
            tail = slot
        self.join(older[tail], newer[head])

    def append_all(self, which: int, source: int) -> None:
        """Move the whole list `source` to the newest end of `which`, in constant time."""
        if self.newer[source] == source:
            return
        oldest, newest = self.newer[source], self.older[source]
        self.join(self.older[which], oldest)
        self.join(newest, which)
        self.join(source, source)

    def walk(self, which: int) -> Iterator[int]:
        """Yield the slots of a list, oldest first."""
        slot = self.newer[which]
        while slot != which:
            yield slot
            slot = self.newer[slot]

    def is_linked(self, slot: int) -> bool:
        """Whether both neighbours of `slot` link to it."""
        return self.older[self.newer[slot]] == slot == self.newer[self.older[slot]]

    def join(self, older: int, newer: int) -> None:
        """Make two slots or nodes neighbours."""
        self.newer[older] = newer
        self.older[newer] = older


class Order(Protocol):
    """The inactive slots of `lists`, and which of them is evicted next."""

    lists: SlotLists

    def add(self, slots: list[int], runs: Sequence[Sequence[int]] = ()) -> None:
        """Make `slots`, which are in no list, the most recently used inactive ones, the last one newest. `runs` are
        the same slots from the last one to the first one, in pieces, if these are known."""
        ...

    def evict_next(self, slots: list[int]) -> None:
        """Make `slots`, which are in no list, the inactive ones that are evicted next, the last one first. A policy may
        evict blocks before them that it keeps in free places only."""
        ...

    def take(self, count: int) -> list[int]:
        """Remove and return the `count` slots that are evicted next, in that order. There must be as many."""
        ...

    def first(self, count: int) -> list[int]:
        """Return up to `count` slots that would be evicted next, in that order."""
        ...

    def free_all(self) -> None:
        """Move all slots to the newest end of the free list."""
        ...

    def mark(self, slots: list[int], marks: bytes) -> None:
        """Note what is known of the blocks in slots that are in no list of inactive ones; without marks, nothing."""
        return

    def remark(self, slots: list[int], marks: bytes, runs: Sequence[Sequence[int]] = ()) -> None:
        """Like `mark`, for blocks that have marks already. `runs` are the same slots in pieces."""
        return

    def room(self, marks: bytes, free: int, inactive: int) -> int:
        """Return how many blocks with these marks, which never rise, may be kept, if so many slots are free and
        inactive."""
        return min(len(marks), free + inactive)


def _link(which: int, slots: Iterable[int], newer: memoryview[int], older: memoryview[int]) -> None:
    """Put `slots` at the newest end of a list; at its oldest one if `newer` and `older` change places."""
    last = older[which]
    for slot in slots:
        newer[last] = slot
        older[slot] = last
        last = slot
    newer[last] = which
    older[which] = last
