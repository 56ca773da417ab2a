"""TenantTable: a table of bounded size in which no tenant can take the share of another one.

An entry is the beginning of a chain. It weighs as much as its blocks, but at least `_unit`, which bounds the number of
entries. The share of a tenant is what an operator has reserved for it, else a SHARES-th of what is not reserved.

The table lends what no tenant uses. When it is full, the tenant that holds the most gives up first, of those that hold
more than their shares. A client can invent tenants, so that there may be more than SHARES, and none of them holds more
than its share. Then the tenant gives up that has added nothing for the longest time: no new one is refused.

The leader's thread owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

SHARES = 64
MOST_GIVEN_UP = 8  # entries, for one that is added: a step of the engine waits meanwhile
LEAST_CUT = 16  # an entry gives up at least one of so many of its blocks: each time takes as long as the chain is


@dataclass(slots=True, eq=False)
class Holding:
    """Of a tenant, which knows it as `key`. `until_s`: when it ends or is due, for its owner."""

    tenant: bytes
    key: Hashable
    chain: Sequence[bytes]
    until_s: float = 0.0


class TenantTable:
    """Entries with `capacity` blocks. With `cuts`, an entry may give up its last blocks, and a tenant that holds the
    most cuts what it adds; otherwise, its oldest entries are dropped."""

    def __init__(self, capacity: int, most_entries: int, *, cuts: bool) -> None:
        self._capacity, self._cuts = capacity, cuts
        self._unit = max(1, -(-capacity // most_entries))
        self._entries: OrderedDict[bytes, OrderedDict[Hashable, Holding]] = OrderedDict()  # last added to, last
        self._held: dict[bytes, int] = {}
        self._large: dict[bytes, None] = {}  # tenants that hold more than their shares, last added to, last
        self._each = capacity / SHARES
        self._reserved: dict[bytes, float] = {}
        self.total = 0

    def __iter__(self) -> Iterator[Holding]:
        return (one for entries in self._entries.values() for one in entries.values())

    def reserve(self, parts: Mapping[bytes, float]) -> None:
        """Reserve parts of the table for tenants; less of each in proportion if they are more than the whole."""
        whole = self._capacity / max(1.0, sum(parts.values()))
        self._reserved = {tenant: part * whole for tenant, part in parts.items()}
        self._each = max(0.0, self._capacity - sum(self._reserved.values())) / SHARES
        self._large = {tenant: None for tenant in self._entries if self._held[tenant] > self._share(tenant)}

    def held(self, tenant: bytes) -> int:
        return self._held.get(tenant, 0)

    def fitting(self, tenant: bytes, count: int, *, limit: int) -> int:
        """Return how many of `count` blocks a new entry may have so that its tenant holds at most `limit`."""
        room = limit - self.held(tenant)
        return min(count, room) if room >= self._unit else 0

    def of(self, tenant: bytes) -> Mapping[Hashable, Holding]:
        """Return the entries of a tenant, the oldest one first."""
        return self._entries.get(tenant, {})

    def add(self, entry: Holding) -> dict[Holding, Sequence[bytes]]:
        """Add an entry, in place of one with its key. Return what gives up blocks for it, with the former chains: the
        new one may, too. An entry that is dropped has no block then."""
        tenant = entry.tenant
        self.pop(tenant, entry.key)
        self._entries.setdefault(tenant, OrderedDict())[entry.key] = entry
        self._entries.move_to_end(tenant)
        self._large.pop(tenant, None)
        self._count(tenant, self._weight(entry))
        given_up: dict[Holding, Sequence[bytes]] = {}
        for left in range(MOST_GIVEN_UP, -1, -1):
            if (over := self.total - self._capacity) <= 0:
                break
            one, blocks = self._next(entry, over) if left else (entry, over)
            given_up.setdefault(one, one.chain)
            self._shrink(one, blocks)
        return given_up

    def pop(self, tenant: bytes, key: Hashable) -> Holding | None:
        entry = self._entries[tenant].pop(key, None) if tenant in self._entries else None
        if entry is not None:
            self._count(tenant, -self._weight(entry))
        return entry

    def clear(self) -> None:
        for kept in (self._entries, self._held, self._large):
            kept.clear()
        self.total = 0

    def _share(self, tenant: bytes) -> float:
        return max(self._each, self._reserved.get(tenant, 0.0))

    def _weight(self, entry: Holding) -> int:
        return max(len(entry.chain), self._unit)

    def _count(self, tenant: bytes, change: int) -> None:
        self.total += change
        held = self._held[tenant] = self.held(tenant) + change
        if held > self._share(tenant):
            self._large.setdefault(tenant)
        else:
            self._large.pop(tenant, None)
        if not held:
            del self._held[tenant], self._entries[tenant]

    def _next(self, entry: Holding, over: int) -> tuple[Holding, int]:
        """Return what gives up next for a new entry, and how many blocks."""
        tenant = max(self._large, key=self._held.__getitem__, default=None)
        if tenant is None:
            tenant = next((one for one in self._entries if one not in self._reserved), entry.tenant)
            most = self._held[tenant]
        else:
            held = self._held[tenant]
            most = max(1, min(held // 4, held - int(self._share(tenant))))
        is_its_own = self._cuts and tenant == entry.tenant
        one = entry if is_its_own else next(iter(self._entries[tenant].values()))
        return one, min(max(over, len(one.chain) // LEAST_CUT), most)

    def _shrink(self, entry: Holding, blocks: int) -> None:
        left = len(entry.chain) - blocks
        if self._cuts and left >= self._unit:
            entry.chain = entry.chain[:left]
            self._count(entry.tenant, -blocks)
        else:
            self.pop(entry.tenant, entry.key)
            entry.chain = ()
