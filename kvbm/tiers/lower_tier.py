"""LowerTier: what the leader asks of a tier below host memory.

Blocks are written to a lower tier from host memory, and a load reads them into host memory first. The leader's thread
owns each tier, and calls in this order:

    arrive                      a request arrives, with its whole chain
    refresh, match              before and during a lookup: what can be read, without starting anything
    claim, fetch                a load begins: hold what is there, and start its reads one after the other
    registered, hit, used       blocks were registered in host memory, hit, or used: the tier decides what it writes
    step                        start the writes that are due
    settle                      register what has ended: written blocks there, read blocks in host memory

A tier reports nothing before it has happened: what `settle` returns is proven, and any doubt is a miss. What a tier
does not need keeps the empty method of this Protocol. Some tiers can do more:

    HostListener                writes blocks that are in host memory, so that it follows what happens there
    OwnedTier                   its blocks are this engine's: they are pinned where they are, and deleted
    AskedTier                   others write to it, so that a request may wait until it answers what is there
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvbm.core.policies.chain_use import ChainUse
    from kvbm.core.store import BlockStore, PinnedBlocks
    from kvbm.metrics import Counters
    from kvbm.tiers.host_tier import HostTier
    from kvbm.tiers.open_reads import Extent, Fetch, OpenReads
    from kvbm.tiers.rates import Rates
    from kvbm.tiers.settings import LeaderCallbacks, LeaderSettings
    from kvbm.tiers.slot_labels import SlotLabels
    from kvbm.types import Tier


@dataclass(slots=True)
class Claim:
    """What a load reads from one tier. `batches` are (positions in the load, extent that has them), each read at once;
    `kept` pins the blocks where they are until the load has ended."""

    batches: list[tuple[Sequence[int], Extent | None]] = field(default_factory=list)
    kept: list[PinnedBlocks] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a leader and its lower tiers use together."""

    host: HostTier
    settings: LeaderSettings
    counters: Counters
    rates: Rates
    callbacks: LeaderCallbacks


class LowerTier(Protocol):
    """See the module's text. `kind`: as which tier its blocks are counted. `reads` are its reads in flight."""

    kind: Tier
    reads: OpenReads

    @property
    def is_on(self) -> bool:
        """Whether its blocks are found, read and written."""
        ...

    def refresh(self) -> None:
        """Take what the tier has sent while the engine was idle. Call before a lookup."""
        return

    def contains(self, sequence_hash: bytes) -> bool:
        """Whether this block can be read by itself."""
        ...

    def match(self, hashes: Sequence[bytes], start: int, end: int) -> int:
        """Return how many of `hashes[start:end]` can be read, up to the first that cannot."""
        ...

    def claim(self, hashes: Sequence[bytes], positions: Sequence[int], extents: Sequence[Extent]) -> Claim:
        """Hold those of the blocks at these positions that are here. `extents` were found by the match."""
        ...

    def has_lost(self, hashes: Sequence[bytes], extent: Extent | None) -> bool:
        """Whether one of these blocks of a claim is gone, because another read of it has failed."""
        return False

    def fetch(self, hashes: Sequence[bytes], tenant: bytes | None, extent: Extent | None = None) -> Fetch | None:
        """Start to read blocks of a tenant, None if it is unknown, into host memory; `settle` returns the end. None
        while there is no room or the tier is off."""
        ...

    def hit(self, hashes: Sequence[bytes]) -> None:
        """Note a cache hit of these blocks in any tier."""
        return

    def used(self, hashes: Sequence[bytes], end: int, tenant: bytes) -> None:
        """Note that a request that has ended used `hashes[:end]`."""
        return

    def step(self, *, computes: bool) -> None:
        """Start the writes that are due. `computes`: the last step of the engine computed something."""
        ...

    def settle(self) -> list[Fetch]:
        """Register what has ended. Return the ended fetches; the caller owns their blocks."""
        ...

    def is_busy(self) -> bool:
        """Whether the tier needs `settle` soon: the engine must keep stepping."""
        ...

    def reset(self, *, ends_persistence: bool) -> None:
        """Forget every block, including those in flight. `ends_persistence`: no block that is written later survives
        this engine. Raises EnvironmentProblem if that is not durable yet; no block is served before it is."""
        ...

    def close(self) -> None:
        """Write what is due, as far as the time allows, and end."""
        ...

    def queues(self) -> dict[str, tuple[int, float | None]]:
        """Return for each queue, by name: how many blocks wait or move, and since when the oldest one. Any thread may
        call it."""
        return {}

    def drop_results(self) -> None:
        """Take the results of what is in flight, and ignore them."""
        return

    def abandon(self, timeout_s: float) -> None:
        """End within `timeout_s`, and write nothing more."""
        return


class OwnedTier(LowerTier):
    """A tier whose blocks are this engine's. `store` has their metadata: they are evicted in order of last use, and
    reported in events. `labels` are their ages and tenants. A tier may replace both."""

    store: BlockStore
    labels: SlotLabels

    @abstractmethod
    def arrive(self, hashes: Sequence[bytes], now_s: float) -> ChainUse | None:
        """Note that a request for the chain `hashes` has arrived; return what it is to the policy of this tier."""

    @abstractmethod
    def batches(self, positions: Sequence[int]) -> list[Sequence[int]]:
        """Return these positions of blocks that are pinned here in the batches in which they are read."""

    @abstractmethod
    def begin_clear(self, tenant: bytes | None) -> None:
        """Start to delete all blocks, or those of one tenant, which the caller makes unfindable. Nothing is read or
        written before that is durable."""

    @abstractmethod
    def not_durable(self) -> str:
        """Return why the last `begin_clear` is not durable yet, empty if it is."""

    @abstractmethod
    def clear(self, *, ends_persistence: bool) -> None:
        """Delete every block that an engine that starts later could find. Raises EnvironmentProblem."""

    @abstractmethod
    def wear(self) -> dict[str, float]:
        """Return the known wear metrics by name."""


class AskedTier(LowerTier):
    """A tier to which others write too, several consecutive blocks of a chain at once."""

    @abstractmethod
    def extents_of(self, hashes: Sequence[bytes], start: int, end: int) -> list[Extent]:
        """Return the extents that hold `hashes[start:end]`."""

    @abstractmethod
    def must_wait(self, request_id: str, hashes: Sequence[bytes], start: int, end: int) -> bool:
        """Whether a request that found nothing from `start` on should be asked again at the next step."""

    @abstractmethod
    def forget_request(self, request_id: str) -> None:
        """Note that a request has ended."""

    @abstractmethod
    def due_blocks(self) -> Iterator[Sequence[bytes]]:
        """Yield in pieces the blocks that may still have to be written, and whose write has not begun, the newest piece
        first. Some repeat. Leaves out those that newer ones have driven out of host memory."""


OpenTier = Callable[[TierContext], LowerTier]
