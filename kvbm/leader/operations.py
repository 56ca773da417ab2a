"""Operations: hold the chain of a prompt in host memory, or bring it there, for an operator or because of a hint.

A pin holds the beginning of a chain until its time has ended, or until it is released. It is a lock, unlike a hint, so
pins hold at most PIN_SHARE of host memory. A pin whose blocks were forgotten, by a clear or a reset, ends.

A hint can ask for a chain at a later time. The chains that wait for it have at most as many blocks as host memory.
Those whose time has arrived are read one after the other, tenants by turns, each within READ_S.

The leader's thread owns it. The messages of operators are in control.py.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING

from kvbm.leader.tenant_table import Holding
from kvbm.tiers.lower_tier import AskedTier

if TYPE_CHECKING:
    from kvbm.core.store import PinnedBlocks
    from kvbm.leader.hints import Hints
    from kvbm.leader.prefetches import Prefetches
    from kvbm.tiers.lower_tier import LowerTier, TierContext

PIN_SHARE = 0.25  # of host memory
MOST_PINS = 256
PIN_BYTES = 8  # of the name of a pin
READ_S = 2.0
ASKS, ASKS_LATER = "an operator", "a hint"  # in place of a request, for what the shared tier is asked


@dataclass(slots=True)
class _Pin:
    blocks: PinnedBlocks
    until_s: float


class Operations:
    """See the module's text. `hints` come from clients."""

    def __init__(self, context: TierContext, tiers: Sequence[LowerTier], prefetches: Prefetches, hints: Hints) -> None:
        self.hints = hints
        self._host = context.host
        self._clock = context.callbacks.clock
        self.chain_of = context.callbacks.chain_of
        self._tiers = tiers
        self._asked = [tier for tier in tiers if isinstance(tier, AskedTier)]
        self._prefetches = prefetches
        self._pins: dict[bytes, _Pin] = {}
        self._counters = context.counters
        self._wanted: list[Holding] = []  # those of `hints.waiting`, by their time
        self._numbers = count()
        self._reading: Holding | None = None
        self._read_until_s = 0.0
        self._last_tenant: bytes | None = None  # whose chain was read last
        self._losses = 0

    def is_on_its_way(self, chain: Sequence[bytes], owner: bytes, asks: str = ASKS) -> bool:
        """Let lower tiers read what host memory lacks of a chain of this tenant. Return whether they still have to."""
        self._prefetches.want_chain(chain, 0, len(chain), owner)
        at = self._host.store.match(chain)
        if at == len(chain):
            return False
        waits = any(tier.must_wait(asks, chain, at, len(chain)) for tier in self._asked if tier.is_on)
        return waits or any(tier.match(chain, at, len(chain)) > 0 for tier in self._tiers if tier.is_on)

    def end_asking(self, asks: str = ASKS) -> None:
        for tier in self._asked:
            tier.forget_request(asks)

    def want_later(self, chain: Sequence[bytes], owner: bytes, delay_s: float) -> bool:
        """Bring a chain of this tenant to host memory after a time. Return whether there is room for it."""
        if not self._tiers or not chain:
            return False
        wanted = Holding(owner, next(self._numbers), chain, self._clock() + delay_s)
        insort(self._wanted, wanted, key=lambda one: one.until_s)
        given_up = self.hints.waiting.add(wanted)
        self._counters.prefetch_share_hints += len(given_up)
        for one in given_up:
            if not one.chain:
                self._forget(one)
        return bool(wanted.chain)

    def has_work(self) -> bool:
        """Whether the time of a chain has arrived."""
        return bool(self._wanted) and self._wanted[0].until_s <= self._clock()

    def reset(self) -> None:
        self._wanted.clear()
        self.hints.waiting.clear()
        self._reading = None
        self.end_asking(ASKS_LATER)

    @property
    def room(self) -> int:
        """Blocks that can still be pinned."""
        held = sum(len(pin.blocks.slots) for pin in self._pins.values())
        return int(PIN_SHARE * self._host.capacity_blocks) - held

    def pin(self, chain: Sequence[bytes], seconds: float) -> tuple[str, int] | None:
        """Hold the blocks of a chain up to the first one that is not in host memory, in place of an earlier pin of this
        chain. Return the name of the pin and the number of blocks; None if there are too many pins."""
        name = chain[-1][:PIN_BYTES]
        self.release(name)
        if len(self._pins) >= MOST_PINS:
            return None
        blocks = self._host.store.pin_prefix(chain[: max(0, self.room)])
        count = len(blocks.slots)
        if count:
            self._pins[name] = _Pin(blocks, self._clock() + seconds)
        else:
            blocks.release()
        return name.hex(), count

    def release(self, name: bytes | None) -> int:
        """Release a pin, or all; return how many blocks were held."""
        names = list(self._pins) if name is None else [name] if name in self._pins else []
        pins = [self._pins.pop(one) for one in names]
        count = sum(len(pin.blocks.slots) for pin in pins)
        for pin in pins:
            pin.blocks.release()
        return count

    def pins(self) -> list[dict[str, object]]:
        """Return a description of each pin."""
        now_s = self._clock()
        return [
            {"pin": name.hex(), "blocks": len(pin.blocks.slots), "seconds": round(pin.until_s - now_s)}
            for name, pin in self._pins.items()
        ]

    def step(self) -> None:
        """Release the pins whose time has ended, and those of blocks that were forgotten, and bring a chain whose time
        has arrived."""
        if self.has_work():
            self._bring()
        if not self._pins:
            return
        now_s, store = self._clock(), self._host.store
        has_lost, self._losses = store.losses != self._losses, store.losses
        for name, pin in list(self._pins.items()):
            if pin.until_s <= now_s or (has_lost and store.match(pin.blocks.hashes) < len(pin.blocks.hashes)):
                self.release(name)

    def _bring(self) -> None:
        now_s = self._clock()
        if self._reading is None:
            due = takewhile(lambda one: one.until_s <= now_s, self._wanted)
            self._reading = next((one for one in due if one.tenant != self._last_tenant), self._wanted[0])
            self._read_until_s, self._last_tenant = now_s + READ_S, self._reading.tenant
        one = self._reading
        if self.is_on_its_way(one.chain, one.tenant, ASKS_LATER) and now_s <= self._read_until_s:
            return
        self._counters.prefetch_late_hints += self._host.store.match(one.chain) < len(one.chain)
        self.hints.waiting.pop(one.tenant, one.key)
        self._forget(one)

    def _forget(self, one: Holding) -> None:
        self._wanted = [other for other in self._wanted if other is not one]
        if one is self._reading:
            self._reading = None
            self.end_asking(ASKS_LATER)
