"""SlotLists: the order in which slots are allocated and evicted, as a list of free and a list of inactive slots.

Both are circular doubly linked lists that share two arrays of ints, with one extra node per list for its two ends. A
slot is in at most one list and costs eight bytes. Every operation changes only the slots it is given. The order is
exactly least recently used: slots that are appended last are taken last.

       node of the list ──newer──▶ oldest slot ──newer──▶ ... ──newer──▶ newest slot ──newer──▶ node of the list

Only the store uses them. It decides from the states which slots belong in which list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence


class SlotLists:
    """Two ordered lists over `slot_count` slots, `free` and `inactive`. All start in `free`, in ascending order."""

    def __init__(self, slot_count: int) -> None:
        self.free = slot_count
        self.inactive = slot_count + 1
        neighbours = array("i", range(-1, slot_count + 3))
        self._older, self._newer = neighbours[:-2], neighbours[2:]
        self._join(self.free, 0 if slot_count else self.free)
        self._join(slot_count - 1 if slot_count else self.free, self.free)
        self._join(self.inactive, self.inactive)

    def append(self, which: int, slots: Iterable[int]) -> None:
        """Put `slots`, which are in no list, at the newest end, the last one newest."""
        newer, older = self._newer, self._older
        last = older[which]
        for slot in slots:
            newer[last] = slot
            older[slot] = last
            last = slot
        self._join(last, which)

    def take(self, which: int, count: int) -> list[int]:
        """Remove and return the `count` oldest slots, oldest first. The list must hold as many."""
        newer = self._newer
        slot, taken = newer[which], []
        for _ in range(count):
            taken.append(slot)
            slot = newer[slot]
        self._join(which, slot)
        return taken

    def remove(self, slots: Sequence[int]) -> None:
        """Remove `slots` from their lists. They must be different, and each must be in a list.

        Blocks that were released together are neighbours, tail first. So `slots` is cut into runs in which each slot is
        the older neighbour of the previous one, and each run is removed as a whole.
        """
        if not slots:
            return
        newer, older = self._newer, self._older
        head = tail = slots[0]
        for slot in slots:
            if slot != head and older[tail] != slot:
                before, after = older[tail], newer[head]
                newer[before], older[after] = after, before
                head = slot
            tail = slot
        self._join(older[tail], newer[head])

    def append_all(self, which: int, source: int) -> None:
        """Move the whole list `source` to the newest end of `which`, in constant time."""
        if self._newer[source] == source:
            return
        oldest, newest = self._newer[source], self._older[source]
        self._join(self._older[which], oldest)
        self._join(newest, which)
        self._join(source, source)

    def walk(self, which: int) -> Iterator[int]:
        """Yield the slots of a list, oldest first."""
        slot = self._newer[which]
        while slot != which:
            yield slot
            slot = self._newer[slot]

    def is_linked(self, slot: int) -> bool:
        """Whether both neighbours of `slot` link to it."""
        return self._older[self._newer[slot]] == slot == self._newer[self._older[slot]]

    def _join(self, older: int, newer: int) -> None:
        self._newer[older] = newer
        self._older[newer] = older
