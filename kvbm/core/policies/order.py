"""Order: the inactive slots of a store, and which of them is evicted next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbm.core.slot_lists import SlotLists


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
