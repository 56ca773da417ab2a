"""Operations: hold the chain of a prompt in host memory, or bring it there, for an operator or because of a hint.

A pin holds the beginning of a chain until its time has ended, or until it is released. It is a lock, unlike a hint, so
pins hold at most PIN_SHARE of host memory. A pin whose blocks were forgotten, by a clear or a reset, ends.

A hint can ask for a chain at a later time. The chains that wait for it have at most as many blocks as host memory. The
one whose time has arrived is read within READ_S, one after the other.

The leader's thread owns it. The messages of operators are in control.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.core.blocks import PinnedBlocks
    from kvbm.leader.hints import Hints
    from kvbm.leader.lower_tier import LowerTier, TierContext
    from kvbm.leader.prefetches import Prefetches

PIN_SHARE = 0.25  # of host memory
MOST_PINS = 256
PIN_BYTES = 8  # of the name of a pin
MOST_WAITING = 1024  # chains that are brought later
READ_S = 2.0
ASKS, ASKS_LATER = "an operator", "a hint"  # in place of a request, for what the shared tier is asked


@dataclass(slots=True)
class _Pin:
    blocks: PinnedBlocks
    until_s: float


@dataclass(order=True, frozen=True, slots=True)
class _Later:
    due_s: float
    chain: Sequence[bytes] = field(compare=False)
    tenant: bytes = field(compare=False)


class Operations:
    """See the module's text. `hints` come from clients."""

    def __init__(self, context: TierContext, tiers: Sequence[LowerTier], prefetches: Prefetches, hints: Hints) -> None:
        self.hints = hints
        self._host = context.host
        self._clock = context.callbacks.clock
        self._chain_of = context.callbacks.chain_of
        self._tiers = tiers
        self._prefetches = prefetches
        self._pins: dict[bytes, _Pin] = {}
        self._wanted: list[_Later] = []  # a heap
        self._wanted_blocks = 0
        self._losses = 0

    def chain(self, token_ids: Sequence[int], salt: str | None) -> Sequence[bytes] | None:
        """Return the hashes of the full blocks of a prompt; None if this engine has no such chain."""
        return self._chain_of(token_ids, salt)

    def is_on_its_way(self, chain: Sequence[bytes], owner: bytes, asks: str = ASKS) -> bool:
        """Let lower tiers read what host memory lacks of a chain of this tenant. Return whether they still have to."""
        self._prefetches.want_chain(chain, 0, len(chain), owner)
        at = self._host.store.match(chain)
        if at == len(chain):
            return False
        waits = any(tier.must_wait(asks, chain, at, len(chain)) for tier in self._tiers if tier.is_on)
        return waits or any(tier.match(chain, at, len(chain)) > 0 for tier in self._tiers if tier.is_on)

    def end_asking(self, asks: str = ASKS) -> None:
        for tier in self._tiers:
            tier.forget_request(asks)

    def want_later(self, chain: Sequence[bytes], owner: bytes, delay_s: float) -> bool:
        """Bring a chain of this tenant to host memory after a time. Return whether there is room for it."""
        blocks = self._wanted_blocks + len(chain)
        if not self._tiers or len(self._wanted) >= MOST_WAITING or blocks > self._host.capacity_blocks:
            return False
        heapq.heappush(self._wanted, _Later(self._clock() + delay_s, chain, owner))
        self._wanted_blocks = blocks
        return True

    def has_work(self) -> bool:
        """Whether the time of a chain has arrived."""
        return bool(self._wanted) and self._wanted[0].due_s <= self._clock()

    def reset(self) -> None:
        self._wanted.clear()
        self._wanted_blocks = 0

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
            first = self._wanted[0]
            if not self.is_on_its_way(first.chain, first.tenant, ASKS_LATER) or self._clock() > first.due_s + READ_S:
                self.end_asking(ASKS_LATER)
                self._wanted_blocks -= len(heapq.heappop(self._wanted).chain)
        if not self._pins:
            return
        now_s, store = self._clock(), self._host.store
        has_lost, self._losses = store.losses != self._losses, store.losses
        for name, pin in list(self._pins.items()):
            if pin.until_s <= now_s or (has_lost and store.match(pin.blocks.hashes) < len(pin.blocks.hashes)):
                self.release(name)
