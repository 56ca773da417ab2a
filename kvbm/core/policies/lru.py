"""Lru: the order of `eviction: lru`. One list, slots that are appended last are taken last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvbm.core.policies.policy import Policy
from kvbm.core.slot_lists import Order, SlotLists


class LeastRecent(Order):
    """Evicts the least recently used block first."""

    def __init__(self, slot_count: int) -> None:
        self.lists = SlotLists(slot_count)

    def add(self, slots: list[int], runs: Sequence[Sequence[int]] = ()) -> None:
        self.lists.append(self.lists.inactive, slots)

    def evict_next(self, slots: list[int]) -> None:
        self.lists.prepend(self.lists.inactive, slots)

    def take(self, count: int) -> list[int]:
        return self.lists.take(self.lists.inactive, count)

    def first(self, count: int) -> list[int]:
        return list(islice(self.lists.walk(self.lists.inactive), count))

    def free_all(self) -> None:
        self.lists.append_all(self.lists.free, self.lists.inactive)


class Lru(Policy):
    """Does not learn from requests."""

    def __init__(self, capacity_blocks: int) -> None:
        self.order = LeastRecent(capacity_blocks)
