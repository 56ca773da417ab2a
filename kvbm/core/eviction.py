"""The order in which slots are taken: a list of free slots and a list of inactive ones, oldest first.

Both are circular doubly linked lists that share two arrays of ints, with one extra node per list as its two ends. A
slot is in at most one list, costs eight bytes, and every operation touches only the slots it is given: no heap, no
clock, no compaction. Exact least recently used order: what is appended last is taken last.

       node of the list ──newer──▶ oldest slot ──newer──▶ ... ──newer──▶ newest slot ──newer──▶ node of the list

Only the store calls this. The lists know nothing of states: the store decides which slots belong in them.
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
        """Take `slots`, each of which is in a list and which are all different, out of it.

        Blocks that were released together stand side by side, tail first, so `slots` is cut into runs in which each
        slot is the older neighbour of the one before it, and each run is taken out as a whole.
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
        """Move the whole list `source` to the newest end of `which`, in one step whatever its length."""
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
        """Whether both neighbours of `slot` agree that it stands between them."""
        return self._older[self._newer[slot]] == slot == self._newer[self._older[slot]]

    def _join(self, older: int, newer: int) -> None:
        self._newer[older] = newer
        self._older[newer] = older
