"""Messages between the leader and the storage of the disk tier: orders and results are the same frozen values on the
whole way.

    DiskTier -> DiskSupervisor -> DiskClient -> channel -> server -> DiskStorage      Read, Write, Forget
    DiskTier <- DiskSupervisor <- DiskClient <- channel <- server <- DiskStorage      DiskResult, FoundBlocks
                                  DiskClient -> channel -> server                     Open, Recover, Clear, KnownRates
                                  DiskClient <- channel <- server                     SpaceTaken, Opened, Cleared

Those of every process are in kvbm/child/child.py. Every level has `submit(order)`, `poll()`, `recovered()`,
`forget(disk_slots)`, `clear()` and `close(timeout_s)`. Every submitted order ends as exactly one DiskResult with its
ticket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvbm.tiers.disk.health import DiskStorageCounters
from kvbm.tiers.disk.settings import DiskSettings, Namespace
from kvbm.tiers.rates import KnownRates
from kvbm.types import SegmentInfo


@dataclass(frozen=True, slots=True)
class Read:
    """Read one block per position from a disk slot into a host slot, and compare its checksum."""

    ticket: int
    hashes: Sequence[bytes]
    disk_slots: Sequence[int]
    host_slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Write:
    """Write one block per position from a host slot to a disk slot.

    The disk slots belong to this ticket until `poll` returns it; their previous blocks are deleted first.
    No block is good unless the host slots still carry `generations` after their payload has been read. `notes[i]` is
    kept in the index next to block i and returned in FoundBlocks; no notes, or an empty one, for none.
    """

    ticket: int
    hashes: Sequence[bytes]
    disk_slots: Sequence[int]
    host_slots: Sequence[int]
    tenants: Sequence[bytes]
    generations: Sequence[int]
    notes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete the blocks in these slots, in the order of submission with writes."""

    disk_slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class DiskResult:
    """The end of one ticket. `error` is the first failure other than a checksum mismatch.

    `damaged` are the positions of a read whose blocks are proven to be damaged. Any other failure, as of a disk that is
    off or of a process that has ended, says nothing about the blocks.
    """

    ticket: int
    is_good: tuple[bool, ...]
    error: str | None
    damaged: tuple[int, ...] = ()

    @classmethod
    def failed(cls, order: Read | Write, error: str) -> DiskResult:
        return cls(order.ticket, (False,) * len(order.hashes), error)


class FoundBlocks(NamedTuple):
    """Blocks that an instance held when it was opened, oldest first.

    `is_last` marks the final batch. `notes` and `tenants` have one entry per block, empty without one, or none at all.
    `written`: in seconds since 1970, or nothing at all.
    """

    slots: list[int]
    hashes: list[bytes]
    is_last: bool
    notes: tuple[bytes, ...] = ()
    written: Sequence[int] = ()
    tenants: tuple[bytes, ...] = ()

    def ages_s(self, now_s: float) -> list[int]:
        """Return how many seconds ago each block was written; 0 if that is not known. `now_s`: since 1970."""
        return [int(now_s) - one for one in self.written] or [0] * len(self.slots)


REMOVED = 3  # exit code when the files were deleted: no block that the process writes could be found again
LOST_IO = 4  # exit code when some I/O ends only with the process


class Open(NamedTuple):
    """The first message. `cores`: allowed for the disk's threads. `instance`: this one, or a new one if that is not
    free. `device`: number of the file system that the directory must be on, if not 0."""

    settings: DiskSettings
    namespace: Namespace
    segments: Sequence[SegmentInfo]
    hash_bytes: int
    cores: frozenset[int]
    instance: Path | None = None
    device: int = 0


class Recover(NamedTuple):
    """Request some batches of blocks found at opening; the answer is a FoundBlocks for each, up to the last one."""


class Clear(NamedTuple):
    """`ends_persistence`: no block that is written later survives the engine."""

    tenant: bytes | None
    ends_persistence: bool = False


class SpaceTaken(NamedTuple):
    """Allocated bytes of the arena."""

    done: int
    total: int


class Opened(NamedTuple):
    """`device`: number of the file system."""

    path: Path
    slot_count: int
    io_name: str
    counters: DiskStorageCounters
    device: int
    earlier_rates: KnownRates | None


class Cleared(NamedTuple):
    """So many clears, those that were sent first, are durable."""

    clears: int
