"""Forgets one tenant of a cache that nobody uses: first its rows, then the bytes of its blocks.

The rows are gone from the disk when this returns, and the bytes read as zeros. What a drive keeps in cells that it has
replaced is out of reach.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbm.disk.directory import ARENA, INDEX
from kvbm.disk.files import UNSUPPORTED, fallocate, open_private
from kvbm.disk.index import BlockIndex
from kvbm.disk.superblock import Superblock

FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE = 0x01, 0x10
ZEROS = bytes(4 << 20)


def clear_tenant(instance: Path, superblock: Superblock, tenant: bytes) -> int:
    """How many blocks it had. The caller holds the lock. Raises OSError, EnvironmentProblem or sqlite3.Error."""
    index = BlockIndex.open(instance / INDEX)
    try:
        slots = [row.slot for row in index.rows() if row.tenant == tenant]
        index.clear(tenant)
    finally:
        index.close()
    fd = open_private(instance / ARENA, os.O_RDWR)
    try:
        for first, count in _neighbours(slots):
            _erase(fd, first * superblock.slot_bytes, count * superblock.slot_bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return len(slots)


def _neighbours(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first slot, how many) of each unbroken row of ascending slots."""
    start = 0
    for position in range(1, len(slots) + 1):
        if position == len(slots) or slots[position] != slots[position - 1] + 1:
            yield slots[start], position - start
            start = position


def _erase(fd: int, offset: int, length: int) -> None:
    """By the file system where it can; a slot beyond the end of a cut arena has no bytes."""
    length = min(length, os.fstat(fd).st_size - offset)
    if length <= 0:
        return
    try:
        fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_ZERO_RANGE, offset, length)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EPERM):
            raise
        for at in range(offset, offset + length, len(ZEROS)):
            _write(fd, memoryview(ZEROS)[: offset + length - at], at)


def _write(fd: int, zeros: memoryview, offset: int) -> None:
    while zeros:
        count = os.pwrite(fd, zeros, offset)
        zeros, offset = zeros[count:], offset + count
