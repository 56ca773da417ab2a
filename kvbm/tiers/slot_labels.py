"""SlotLabels: since when each slot of a tier has its block, and which tenant the block belongs to.

Eight bytes a slot and no Python object per block. A tenant has a number while a slot carries it. Labels of a slot that
holds no block are stale: only the store knows which slots are registered. The leader's thread owns it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from kvbm.core.index import is_consecutive


class SlotLabels:
    """`since_s[slot]` is in whole seconds of `clock`; `owners[slot]` is the number of a tenant, 0 for none."""

    def __init__(self, slot_count: int, clock: Callable[[], float]) -> None:
        self.since_s = array("i", bytes(4 * slot_count))
        self.owners = array("I", bytes(4 * slot_count))
        self._clock = clock
        self._numbers: dict[bytes, int] = {}
        self._tenants: dict[int, bytes] = {}
        self._slots_of: Counter[int] = Counter()
        self._last_number = 0

    def begin(self, slots: Sequence[int]) -> None:
        """Note that the blocks in these slots have been registered now."""
        now_s, since_s = int(self._clock()), self.since_s
        if is_consecutive(slots):
            since_s[slots[0] : slots[-1] + 1] = array("i", [now_s]) * len(slots)
        else:
            for slot in slots:
                since_s[slot] = now_s

    def begin_at(self, slots: Sequence[int], ages_s: Sequence[int]) -> None:
        """Note that the blocks in these slots were registered so many seconds ago."""
        now_s = int(self._clock())
        for slot, age_s in zip(slots, ages_s, strict=True):
            self.since_s[slot] = now_s - min(max(0, age_s), 1 << 30)

    def own(self, slots: Sequence[int], tenant: bytes) -> None:
        """Note whose blocks are in these slots; no bytes if the tenant is unknown."""
        if not tenant and not self._numbers:
            return
        number = self._number_for(tenant) if slots else 0
        for slot in slots:
            former = self.owners[slot]
            if former != number:
                self.owners[slot] = number
                self._slots_of[number] += 1
                self._leave(former)

    def own_each(self, slots: Sequence[int], tenants: Sequence[bytes]) -> None:
        """Like `own`, with a tenant per slot."""
        if tenants and tenants.count(tenants[0]) == len(tenants):
            self.own(slots, tenants[0])
            return
        for tenant, pairs in groupby(zip(slots, tenants, strict=True), key=lambda pair: pair[1]):
            self.own([slot for slot, _ in pairs], tenant)

    def tenants_of(self, slots: Sequence[int]) -> list[bytes]:
        if not self._numbers:
            return [b""] * len(slots)
        return [self.tenant(self.owners[slot]) for slot in slots]

    def tenant(self, number: int) -> bytes:
        """Return the tenant with this number, no bytes for none."""
        return self._tenants.get(number, b"")

    def number_of(self, tenant: bytes) -> int | None:
        """Return the number that slots of this tenant carry; None if there is no such slot."""
        return self._numbers.get(tenant)

    def _number_for(self, tenant: bytes) -> int:
        if not tenant:
            return 0
        number = self._numbers.get(tenant)
        if number is None:
            number = self._last_number = self._last_number + 1
            self._numbers[tenant], self._tenants[number] = number, tenant
        return number

    def _leave(self, number: int) -> None:
        """Note that a slot no longer carries this number, which is forgotten with its last slot."""
        self._slots_of[number] -= 1
        if number and not self._slots_of[number]:
            del self._slots_of[number], self._numbers[self._tenants.pop(number)]
