"""OpenReads: the reads of one lower tier into host memory that have not ended, and whether one of them hangs.

A read makes progress when it ends, or when one that began before it ends: a tier begins its reads in order. A read
without progress for HUNG_S, plus what a read of this tier usually takes, hangs. Until it has ended, the tier is off:
nothing is found there, so that no request waits for it. Its slots stay reserved, because the read may still write to
them. So the open reads of a tier take at most TIER_SHARE of host memory, and those of all tiers READ_SHARE.

The leader's thread owns it. Time between two calls of `check` counts as idle only if nothing has ended meanwhile: the
engine may compute for seconds without looking.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.leader.host_tier import HostTier

HUNG_S = 1.8
GRACE_S = 0.3  # a shorter time without progress is no stall
TIER_SHARE, READ_SHARE = 0.5, 0.75
KEPT = 0.8  # weight of the older durations, per read

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenRead:
    """A read of `blocks` blocks. `idle_s`: how long it has made no progress."""

    blocks: int
    born_s: float
    idle_s: float = 0.0
    has_moved: bool = False
    is_hung: bool = False


class OpenReads:
    """See the module's text. `times_hung` counts how often reads alone turned the tier off. `name` is for the log."""

    def __init__(self, name: str, host: HostTier, clock: Callable[[], float]) -> None:
        self.times_hung = 0
        self.usual_s = 0.0  # that a read takes, at most HUNG_S
        self._name = name
        self._host = host
        self._clock = clock
        self._open: dict[int, OpenRead] = {}  # by ticket, in the order in which they began
        self._blocks = 0
        self._hung = 0
        self._checked_s = clock()

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

    def begin(self, ticket: int, blocks: int) -> OpenRead:
        """Note a read. `ticket` is larger than that of any earlier one."""
        self._blocks += blocks
        self._host.arriving_blocks += blocks
        read = self._open[ticket] = OpenRead(blocks, self._clock())
        return read

    def end(self, ticket: int) -> None:
        """Note the end of a read."""
        read = self._open.pop(ticket)
        self._blocks -= read.blocks
        self._host.arriving_blocks -= read.blocks
        for other, later in self._open.items():
            later.has_moved |= other > ticket
        self._hung -= read.is_hung
        if not read.is_hung:
            self._note_duration(self._clock() - read.born_s)
        elif not self._hung:
            self._note_duration(HUNG_S)  # once for all that hung: it says that a read may take long, not how long
            log.info("kvbm: the reads of %s that hung have ended", self._name)

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
                    log.warning("kvbm: %s is off until a read that hangs has ended", self._name)

    def _note_duration(self, took_s: float) -> None:
        self.usual_s = KEPT * self.usual_s + (1 - KEPT) * min(took_s, HUNG_S)
