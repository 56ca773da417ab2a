"""Messages between the leader and its disk process.

leader ──▶ Open, Recover, Read, Write, Forget, Clear, KnownRates, Close ──▶ child
leader ◀── Opening, SpaceTaken, Problem, Opened, FoundBlocks, Status, Cleared, Logged ◀── child

Those that are not here are in orders.py, known_rates.py and process/child.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvbm.disk.health import DiskCounters
from kvbm.disk.known_rates import KnownRates
from kvbm.disk.settings import DiskSettings, Namespace
from kvbm.types import SegmentInfo

REMOVED = 3  # exit code when the files were deleted: no block that the process writes could be found again
LOST_IO = 4  # exit code when some I/O ends only with the process


class Open(NamedTuple):
    """The first message. `cores`: allowed for the disk's threads. `instance`: this one or a new one. `device`: number
    of the file system that the directory must be on, if not 0."""

    settings: DiskSettings
    namespace: Namespace
    segments: Sequence[SegmentInfo]
    hash_bytes: int
    cores: frozenset[int]
    instance: Path | None
    device: int


class Recover(NamedTuple):
    """Request the next batch of blocks found at opening; the answer is a FoundBlocks."""


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
    counters: DiskCounters
    device: int
    earlier_rates: KnownRates | None


class Cleared(NamedTuple):
    """All clears that were sent are durable."""
