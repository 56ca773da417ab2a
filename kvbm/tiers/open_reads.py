"""OpenReads: the reads of one lower tier into host memory that have not ended, and whether one of them hangs.

A read makes progress when it ends, or when one that began before it ends: a tier begins its reads in order. A read
without progress for HUNG_S, plus what a read of this tier usually takes, hangs. Until it has ended, the tier is off:
nothing is found there, so that no request waits for it. Its slots stay reserved, because the read may still write to
them. So the open reads of a tier take at most TIER_SHARE of host memory, and those of all tiers READ_SHARE.

What a request may wait beyond its time without the hang is 2.5 s:

    0.1 s      the shared tier is asked whether it has the blocks (shared_tier.WAIT_S)
    HUNG_S     no read of its tier ends; the usual time of a read is part of its time without the hang
    one step   the load is cut, and the engine schedules the request again
    the rest   the engine computes what it would have loaded, together with the other requests that waited

With 1.8 s instead of 1.2 s, two prompts that one core computes left nothing of the 2.5 s. A shorter time would turn off
disks and stores that pause for a second, as with garbage collection or a network that repeats a packet. What is slow
but alive is learned: reads that take long, and end, allow later ones more time, up to HUNG_S + USUAL_LIMIT_S.

The leader's thread owns it. Time between two calls of `check` counts as idle only if nothing has ended meanwhile: the
engine may compute for seconds without looking.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.core.store import PinnedBlocks
    from kvbm.tiers.host_tier import HostTier, Reservation

HUNG_S = 1.2
USUAL_LIMIT_S = 1.8  # a tier whose reads usually take longer is not read
GRACE_S = 0.3  # a shorter time without progress is no stall
TIER_SHARE, READ_SHARE = 0.5, 0.75
KEPT = 0.8  # weight of the older durations, per read

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive blocks of a chain that a tier keeps together, and reads together."""

    hashes: tuple[bytes, ...]

    @property
    def name(self) -> bytes:
        return self.hashes[-1]


@dataclass(slots=True, eq=False)
class Fetch:
    """A read of blocks from a lower tier into host memory. `blocks` holds them, pinned in G2, when they have arrived.

    `source` pins them where they are, `extent` is what holds them, if the tier has such. `tenant` is None if it is
    unknown. `idle_s`: how long the read has made no progress. `is_copy`: the blocks came from elsewhere, so that the
    read says nothing about the rate of the tier.
    """

    hashes: tuple[bytes, ...]
    tenant: bytes | None
    target: Reservation
    born_s: float
    source: PinnedBlocks | None = None
    extent: Extent | None = None
    blocks: PinnedBlocks | None = None
    is_void: bool = False
    is_abandoned: bool = False
    has_ended: bool = False
    is_copy: bool = False
    idle_s: float = 0.0
    has_moved: bool = False
    is_hung: bool = False

    def abandon(self) -> None:
        """Drop its result: `settle` releases its blocks when the read has ended."""
        self.is_abandoned = True


class OpenReads:
    """See the module's text. `times_hung` counts how often reads alone turned the tier off. `name` is for the log.
    `tier`, which is read, hears of no block that it has brought itself."""

    def __init__(self, name: str, tier: object, host: HostTier, clock: Callable[[], float]) -> None:
        self.times_hung = 0
        self.usual_s = 0.0  # that a read takes, at most USUAL_LIMIT_S
        self.name = name
        self._tier = tier
        self._host = host
        self._clock = clock
        self._open: dict[int, Fetch] = {}  # by ticket, in the order in which they began
        self._blocks = 0
        self._hung = 0
        self._checked_s = clock()

    def queue(self) -> tuple[int, float | None]:
        """Return how many blocks are being read, and since when the oldest read has been open."""
        oldest = next(iter(list(self._open.values())), None)
        return self._blocks, None if oldest is None else oldest.born_s

    @property
    def are_hung(self) -> bool:
        """Whether a read hangs. If so, begin no other one."""
        return self._hung > 0

    @property
    def limit_s(self) -> float:
        """How long a read may make no progress."""
        return HUNG_S + self.usual_s

    @property
    def grace_s(self) -> float:
        """How long a read may make no progress without anything being wrong."""
        return max(GRACE_S, 1.5 * self.usual_s)

    def has_room(self, blocks: int) -> bool:
        """Whether a read of so many blocks may begin besides the open ones. A tier may always begin one."""
        capacity = self._host.capacity_blocks
        return not self._open or (
            self._blocks + blocks <= TIER_SHARE * capacity
            and self._host.arriving_blocks + blocks <= READ_SHARE * capacity
        )

    @property
    def are_ended(self) -> bool:
        return not self._open

    @property
    def are_abandoned(self) -> bool:
        """Whether no load waits for a read in flight."""
        return all(fetch.is_abandoned for fetch in self._open.values())

    def begin(self, ticket: int, hashes: Sequence[bytes], tenant: bytes | None) -> Fetch | None:
        """Reserve host memory for a read; None without room. `ticket` is larger than that of any earlier one."""
        if not self.has_room(len(hashes)):
            return None
        target = self._host.reserve(len(hashes))
        if target is None:
            return None
        self._host.unprove(target)
        self._blocks += len(hashes)
        self._host.arriving_blocks += len(hashes)
        fetch = self._open[ticket] = Fetch(tuple(hashes), tenant, target, self._clock())
        return fetch

    def end(self, ticket: int) -> Fetch | None:
        """Note the end of a read; None if the ticket is none of a read."""
        read = self._open.pop(ticket, None)
        if read is None:
            return None
        read.has_ended = True
        self._blocks -= len(read.hashes)
        self._host.arriving_blocks -= len(read.hashes)
        for other, later in self._open.items():
            later.has_moved |= other > ticket
        self._hung -= read.is_hung
        if not read.is_hung:
            self._note_duration(self._clock() - read.born_s)
        elif not self._hung:
            self._note_duration(HUNG_S)  # once for all that hung: it says that a read may take long, not how long
            log.info("kvbm: the reads of %s that hung have ended", self.name)
        return read

    def arrive(self, fetch: Fetch, is_good: Sequence[bool]) -> int:
        """Register the good blocks of a read in host memory, and tell the other tiers of them; return how many. None
        of a read from before a reset."""
        if fetch.is_void:
            fetch.target.release()
            return 0
        self._host.prove(fetch.target, is_good)
        blocks = self._host.register(fetch.target, fetch.hashes, is_good)
        count = len(blocks.slots)
        self._host.labels.own(blocks.slots, fetch.tenant or b"")
        for other in self._host.listeners:
            if other is not self._tier:
                other.registered(blocks.hashes, blocks.slots)
        if count < len(fetch.hashes) or fetch.is_abandoned:
            blocks.release()
        else:
            fetch.blocks = blocks
        return count

    def void(self, tenant: bytes | None = None) -> None:
        """Let no read in flight, or none for this tenant or an unknown one, register its blocks."""
        for fetch in self._open.values():
            fetch.is_void |= tenant is None or fetch.tenant in (None, tenant)

    def check(self, *, is_on: bool) -> None:
        """Find out whether a read hangs. Call after the ends that are known have been noted. `is_on`: nothing else has
        turned the tier off, and reported it."""
        now_s = self._clock()
        passed_s, self._checked_s = now_s - self._checked_s, now_s
        for read in self._open.values():
            read.idle_s = 0.0 if read.has_moved else min(read.idle_s + passed_s, now_s - read.born_s)
            read.has_moved = False
            if read.idle_s > self.limit_s and not read.is_hung:
                read.is_hung = True
                self._hung += 1
                if self._hung == 1 and is_on:
                    self.times_hung += 1
                    log.warning("kvbm: %s is off until a read that hangs has ended", self.name)

    def _note_duration(self, took_s: float) -> None:
        self.usual_s = KEPT * self.usual_s + (1 - KEPT) * min(took_s, USUAL_LIMIT_S)
