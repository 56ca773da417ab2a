"""Delete one tenant from a cache that is not in use: first its index rows, then the bytes of its blocks.

When this returns, the rows are deleted durably and the bytes read as zeros. Copies in flash cells that the drive has
remapped cannot be erased from here.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

from kvbm.host.layout import consecutive
from kvbm.tiers.disk.directory import ARENA, INDEX
from kvbm.tiers.disk.files import UNSUPPORTED, fallocate, open_private, write_zeros
from kvbm.tiers.disk.index import BlockIndex
from kvbm.tiers.disk.superblock import Superblock

FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE = 0x01, 0x10


def clear_tenant(instance: Path, superblock: Superblock, tenant: bytes) -> int:
    """Return the number of deleted blocks. The caller holds the lock.

    Raises OSError, EnvironmentProblem or sqlite3.Error.
    """
    with closing(BlockIndex.open(instance / INDEX)) as index:
        slots = index.slots_of(tenant)
        index.clear(tenant)
    fd = open_private(instance / ARENA, os.O_RDWR)
    try:
        for begin, end in consecutive(slots):
            _erase(fd, slots[begin] * superblock.slot_bytes, (end - begin) * superblock.slot_bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return len(slots)


def _erase(fd: int, offset: int, length: int) -> None:
    """Zero a range, by fallocate where the file system supports it; ignore bytes past the end of the arena."""
    length = min(length, os.fstat(fd).st_size - offset)
    if length <= 0:
        return
    try:
        fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_ZERO_RANGE, offset, length)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EPERM):
            raise
        write_zeros(fd, offset, offset + length)
