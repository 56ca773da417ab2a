"""Digest of one file: of all its bytes, or of blocks that are spread over a large weight file.

    file                                      bytes that the digest covers
    up to FULL_BYTES, and every small kind    all
    .safetensors                              the header, and 4 to 64 blocks of each tensor, its first and last included
    other weight files                        the first and the last MiB, and one block of each MiB

Two large files with equal digests therefore have the same tensors, of the same types and shapes. A change of a few
values in a tensor of a large file can be missed: training changes all values of a tensor, an editor may not.

The digest is xxh3 with 128 bits: it finds accidents, not attacks. A user who can write the weights controls the
answers.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvbm.host.libc import LIBC, last_error

FULL_BYTES = 128 << 20
METHOD = "xxh3-128, sampled above 128 MiB, 2"  # to be changed with everything that changes a digest
BLOCK_BYTES = 4096
BLOCKS_PER_FILE = 8192
MOST_BLOCKS, FEWEST_BLOCKS = 64, 4  # of one tensor
STRIDE_BYTES = 1 << 20
READ_BYTES = 4 << 20
LENGTH_BYTES = 8  # of the length in front of a safetensors header
MAX_HEADER_BYTES = 100_000_000  # limit of the format

# Types of file systems (`f_type` of statfs) that set ctime at each change, from the system's or the server's clock.
# Images (squashfs, erofs) store what their builder wrote; FUSE and FAT take mtime for ctime; overlay hides the type.
LIVE_FILE_SYSTEMS = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x01021994,  # tmpfs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
        0x6969,  # nfs
        0x0BD00BD0,  # lustre
        0x00C36400,  # ceph
        0x47504653,  # gpfs
    }
)
STATFS_BYTES = 256  # more than `struct statfs`, whose first long is the type

Span = tuple[int, int]  # offset, length


class Signature(NamedTuple):
    """Metadata of a file that change when its bytes change. On a file system in use, no program can set `ctime_ns`,
    unlike `mtime_ns`; see `shows_changes`."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> Signature:
        return cls(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def shows_changes(path: Path) -> bool:
    """Return whether the metadata of a file show each later change of its bytes, also of the whole file system.

    A read-only file system can be exchanged for another image with equal metadata. Raises OSError.
    """
    return not os.statvfs(path).f_flag & os.ST_RDONLY and file_system_type(path) in LIVE_FILE_SYSTEMS


def file_system_type(path: Path) -> int:
    """Return `f_type` of statfs. Raises OSError."""
    facts = ctypes.create_string_buffer(STATFS_BYTES)
    if LIBC.statfs(os.fsencode(path), facts) != 0:
        raise last_error()
    return ctypes.c_long.from_buffer(facts).value


class FileChanged(OSError):
    """A file changed while it was read."""


def signature_of(path: Path) -> Signature:
    """Return the metadata of a regular file. Raises OSError.

    The file is opened: on NFS, `stat` alone may return metadata of a minute ago.
    """
    fd = _open_regular(path)
    try:
        return Signature.of(os.fstat(fd))
    finally:
        os.close(fd)


def digest_file(path: Path, *, is_sampled: bool) -> tuple[Signature, str]:
    """Return the digest of a regular file, and its metadata while it was read. Symbolic links are followed.

    `is_sampled`: above FULL_BYTES, read only a sample. Raises OSError.
    """
    fd = _open_regular(path)
    try:
        signature = Signature.of(os.fstat(fd))
        if is_sampled and signature.size > FULL_BYTES:
            spans = _sample(fd, signature.size, path.suffix)
        else:
            spans = iter([(0, signature.size)])
        digest = _digest(fd, signature.size, spans)
        if Signature.of(os.fstat(fd)) != signature:
            raise FileChanged(f"{path} changed while it was read")
    finally:
        os.close(fd)
    return signature, digest


def _open_regular(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd


def _digest(fd: int, size: int, spans: Iterator[Span]) -> str:
    hasher = xxhash.xxh3_128(size.to_bytes(8, "little"))
    for offset, length in spans:
        end = offset + length
        while offset < end:
            piece = os.pread(fd, min(READ_BYTES, end - offset), offset)
            if not piece:
                raise FileChanged("a file became shorter while it was read")
            hasher.update(piece)
            offset += len(piece)
    return hasher.hexdigest()


def _sample(fd: int, size: int, suffix: str) -> Iterator[Span]:
    tensors = _tensors(fd, size) if suffix == ".safetensors" else None
    if tensors is None:
        yield 0, STRIDE_BYTES
        yield from ((offset, BLOCK_BYTES) for offset in range(STRIDE_BYTES, size - STRIDE_BYTES, STRIDE_BYTES))
        yield size - STRIDE_BYTES, STRIDE_BYTES
        return
    yield 0, min((start for start, _ in tensors), default=size)  # the header
    blocks = min(MOST_BLOCKS, max(FEWEST_BLOCKS, BLOCKS_PER_FILE // max(1, len(tensors))))
    for start, length in tensors:
        yield from _spread(start, length, blocks)


def _spread(start: int, length: int, blocks: int) -> Iterator[Span]:
    """Yield blocks at equal distances; the first and the last one are at the ends."""
    if length <= blocks * BLOCK_BYTES:
        yield start, length
        return
    for index in range(blocks):
        yield start + index * (length - BLOCK_BYTES) // (blocks - 1), BLOCK_BYTES


def _tensors(fd: int, size: int) -> list[Span] | None:
    """Return offset and length of each tensor in the order of the file, None if the header is not valid."""
    header_bytes = int.from_bytes(os.pread(fd, LENGTH_BYTES, 0), "little")
    first = LENGTH_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES or first > size:
        return None
    try:
        header = json.loads(os.pread(fd, header_bytes, LENGTH_BYTES))
        spans = sorted(_span(entry, size - first) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return [(first + offset, length) for offset, length in spans]


def _span(entry: dict[str, list[int]], limit: int) -> Span:
    """Raises ValueError, TypeError or KeyError unless the entry names a range within `limit` bytes."""
    start, end = entry["data_offsets"]
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= limit:
        raise ValueError("data_offsets")
    return start, end - start
