"""Events: the changes of a tier's findable blocks, in an order that can be replayed.

There is one event per batch operation, in the order in which the operations took effect. Replaying the events of a tier
from an empty set gives exactly the sequence hashes that are registered there. A hash is stored only while it is not
registered, and removed only while it is. A publisher of events (a router, a log) takes them from the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvbm.types import Tier


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """`hashes` became findable in `tier`, in this order."""

    tier: Tier
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksRestored:
    """`hashes`, which an earlier process has left, became findable in `tier`. `notes` has what an integration had
    written next to each block, empty for none, or nothing at all. `is_last`: no more follow."""

    tier: Tier
    hashes: tuple[bytes, ...]
    notes: tuple[bytes, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """`hashes` are no longer findable in `tier`: evicted or forgotten."""

    tier: Tier
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierCleared:
    """`tier` has no findable blocks any more."""

    tier: Tier


Event: TypeAlias = BlocksStored | BlocksRestored | BlocksRemoved | TierCleared
