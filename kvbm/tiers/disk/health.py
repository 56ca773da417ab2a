"""Health: state and counters of the disk tier. The owner's thread and the disk's threads share it under one lock.

The disk is turned off by consecutive errors of one step (read, write, flush, index) or by I/O that hangs. A successful
probe turns it on again.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections import Counter
from dataclasses import dataclass, field

from kvbm.child.child import ServiceCounters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Thresholds for turning the disk off, and timeouts."""

    errors_until_off: int = 5
    stall_s: float = 10.0
    probe_interval_s: float = 5.0


@dataclass(slots=True)
class DiskStorageCounters(ServiceCounters):
    """Counters since opening. Bytes are payload bytes.

    `io_errors` counts by name (EIO, ENOSPC, ..., "index" for SQLite errors). `flushes` counts syncs of the arena.
    """

    blocks_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    flushes: int = 0
    checksum_misses: int = 0
    io_errors: Counter[str] = field(default_factory=Counter)
    damaged_superblocks: int = 0
    damaged_indexes: int = 0
    dropped_rows: int = 0
    unusable_instances: int = 0

    @property
    def damaged_files(self) -> int:
        return self.damaged_superblocks + self.damaged_indexes + self.unusable_instances


class Health:
    """State and counters. `counters` is written under `lock` and read without it."""

    def __init__(self, limits: HealthLimits, counters: DiskStorageCounters) -> None:
        self.limits = limits
        self.lock = threading.Lock()
        self.counters = counters
        self.off_because: str | None = None
        self.is_removed = False  # the arena was deleted; permanent
        self.has_lost_io = False  # only the end of the process ends some I/O; permanent
        self._errors_in_a_row: Counter[str] = Counter()

    @property
    def is_on(self) -> bool:
        return self.off_because is None

    def count(self, step: str, **increments: int) -> None:
        """Note a step without an error, and increase these counters."""
        with self.lock:
            self._errors_in_a_row[step] = 0
            for name, increment in increments.items():
                setattr(self.counters, name, getattr(self.counters, name) + increment)
        if increments.get("checksum_misses"):
            logger.warning("blocks on disk have a wrong checksum: %d until now", self.counters.checksum_misses)

    def count_error(self, step: str, error: BaseException) -> None:
        with self.lock:
            self.counters.io_errors[error_name(error)] += 1
            self._errors_in_a_row[step] += 1
            is_too_many = self._errors_in_a_row[step] >= self.limits.errors_until_off
        if is_too_many:
            self.turn_off(f"{self.limits.errors_until_off} consecutive {step} errors, last: {error}")

    def lose_io(self, why: str) -> None:
        """Note I/O whose end cannot be detected, so that its ticket never ends."""
        self.has_lost_io = True
        self.turn_off(why)

    def turn_off(self, why: str) -> None:
        with self.lock:
            if self.off_because is not None:
                return
            self.off_because = why
            self.counters.times_off += 1
        logger.warning("the disk tier is off: %s", why)

    def turn_on(self) -> None:
        with self.lock:
            self.off_because = None
            self._errors_in_a_row.clear()
        logger.warning("the disk tier is on again")


def error_name(error: BaseException) -> str:
    """Return the metric label of an error, from a small fixed set."""
    if isinstance(error, sqlite3.Error):
        return "index"
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number or 0, "other")
