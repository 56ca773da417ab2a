"""Disk quotas of this user, which the free space of statvfs mostly ignores.

Covers quotas of users and groups (ext4, xfs: quotactl_fd, Linux 5.14) and of btrfs subvolumes (quota tree, readable
only by root). Quotas that cannot be read are omitted, so an empty result proves nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbm.host.libc import LIBC

SYSCALL_QUOTACTL_FD = 443
Q_GETQUOTA = 0x800007
KINDS = {"user": 0, "group": 1}
BLOCK_BYTES = 1024  # unit of a limit; usage is in bytes (Linux quota.h)
DQBLK = struct.Struct("=8QI4x")

BTRFS_IOC_TREE_SEARCH = 0xD0009411
BTRFS_IOC_INO_LOOKUP = 0xD0009412
BTRFS_ARGUMENT_BYTES = 4096
BTRFS_FIRST_FREE_OBJECT = 256
BTRFS_QUOTA_TREE = 8
BTRFS_QGROUP_INFO, BTRFS_QGROUP_LIMIT = 242, 244
BTRFS_LIMITS = {1: (0, "subvolume"), 2: (1, "subvolume's own data")}  # flag: (index of the number, name)
SEARCH_KEY = struct.Struct("=7Q4I4Q")
SEARCH_HEADER = struct.Struct("=3Q2I")
MAX_ID = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Quota:
    """One quota: its kind, the limit and the bytes left."""

    kind: str
    limit_bytes: int
    left_bytes: int


def quotas(directory: Path, filesystem: str) -> tuple[Quota, ...]:
    """Return every readable quota; the smallest applies."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        if filesystem == "btrfs":
            return tuple(_of_subvolume(fd))
        owners = ("user", os.geteuid()), ("group", os.getegid())
        return tuple(quota for kind, number in owners if (quota := _of_owner(fd, kind, number)) is not None)
    except OSError:
        return ()
    finally:
        os.close(fd)


def _of_owner(fd: int, kind: str, number: int) -> Quota | None:
    """Return None without a limit."""
    buffer = ctypes.create_string_buffer(DQBLK.size)
    command = ctypes.c_uint(Q_GETQUOTA << 8 | KINDS[kind])
    if LIBC.syscall(SYSCALL_QUOTACTL_FD, fd, command, ctypes.c_uint(number), buffer):
        return None
    if (found := limit_of(buffer.raw)) is None:
        return None
    limit, used = found
    return Quota(kind, limit, max(0, limit - used))


def limit_of(block: bytes) -> tuple[int, int] | None:
    """Return the hard limit, else the soft limit, and the usage of a struct if_dqblk."""
    hard, soft, used, *_ = DQBLK.unpack(block)
    limit = hard or soft
    return (limit * BLOCK_BYTES, used) if limit else None


def _of_subvolume(fd: int) -> Iterator[Quota]:
    """Limits of the subvolume's own quota group; parent groups are ignored."""
    lookup = bytearray(struct.pack("=2Q", 0, BTRFS_FIRST_FREE_OBJECT).ljust(BTRFS_ARGUMENT_BYTES, b"\0"))
    fcntl.ioctl(fd, BTRFS_IOC_INO_LOOKUP, lookup)
    (subvolume,) = struct.unpack_from("=Q", lookup)
    info, limits = (_qgroup_item(fd, kind, subvolume) for kind in (BTRFS_QGROUP_INFO, BTRFS_QGROUP_LIMIT))
    if info is None or limits is None:
        return
    _, referenced, _, exclusive, _ = struct.unpack_from("<5Q", info)
    flags, most_referenced, most_exclusive, *_ = struct.unpack_from("<5Q", limits)
    for flag, (which, name) in BTRFS_LIMITS.items():
        if flags & flag:
            limit, used = ((most_referenced, referenced), (most_exclusive, exclusive))[which]
            yield Quota(name, limit, max(0, limit - used))


def _qgroup_item(fd: int, kind: int, subvolume: int) -> bytes | None:
    """Return the item (0, kind, subvolume) of the quota tree, or None."""
    key = SEARCH_KEY.pack(BTRFS_QUOTA_TREE, 0, 0, subvolume, subvolume, 0, MAX_ID, kind, kind, 1, 0, 0, 0, 0, 0)
    argument = bytearray(key.ljust(BTRFS_ARGUMENT_BYTES, b"\0"))
    fcntl.ioctl(fd, BTRFS_IOC_TREE_SEARCH, argument)
    (count,) = struct.unpack_from("=I", argument, 7 * 8 + 2 * 4)
    if not count:
        return None
    *_, length = SEARCH_HEADER.unpack_from(argument, SEARCH_KEY.size)
    start = SEARCH_KEY.size + SEARCH_HEADER.size
    return bytes(argument[start : start + length])
