"""What happened to the findable blocks of a tier, as a list that can be replayed.

One event per batch operation, in the order in which the operations took effect: replaying the events of a tier from an
empty set gives exactly the sequence hashes that are registered there. A hash is never stored while it is live and
never removed while it is not. Whoever publishes events (a router, a log) takes them from the store and owns them then.
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
class BlocksRemoved:
    """`hashes` are no longer findable in `tier`: evicted or forgotten."""

    tier: Tier
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierCleared:
    """Nothing is findable in `tier` any more."""

    tier: Tier


Event: TypeAlias = BlocksStored | BlocksRemoved | TierCleared
