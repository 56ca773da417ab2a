"""Digest of the content of files: of all their bytes.

    piece      PIECE_BYTES of a file, digested by one thread
    file       digest of its length and of the digests of its pieces

The digest is xxh3 with 128 bits: it finds accidents, not attacks. A user who can write the weights controls the
answers. xxh3 reads faster than memory delivers, so pieces pass through a buffer that stays in the cache of a core.

Whether a file changed is read from its metadata. That is exact on some file systems only (file_systems.yaml), and only
for bytes that have been written back: a store through a mapping sets the times of a file at the first store to a clean
page, not at later ones, and a call of `write` sets them when it begins. So every look at the metadata waits for such a
call, and writes back what is dirty before it (`signature_of`). Where that has no effect, as on an overlay, a file that
was quiet for QUIET_NS has no dirty pages (`writes_back`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import xxhash
import yaml

from kvbm.host.libc import LIBC, last_error

METHOD = "xxh3-128 of pieces of 16 MiB, 3"  # to be changed with everything that changes a digest
PIECE_BYTES = 16 << 20
READ_BYTES = 256 << 10  # fits into the second cache of a core: 7 GB/s per core, 4 GB/s with 4 MiB
QUIET_NS = 60_000_000_000  # within it the kernel writes dirty pages back by itself
SECOND_NS = 1_000_000_000
WRITE_BACK = 7  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER

_TYPES = yaml.safe_load(Path(__file__).with_name("file_systems.yaml").read_text())
LIVE_FILE_SYSTEMS = frozenset(_TYPES["live"].values())
BUILT_FILE_SYSTEMS = frozenset(_TYPES["live"][name] for name in _TYPES["built"])
SILENT_FILE_SYSTEMS = frozenset(_TYPES["silent"].values())
OVERLAY = 0x794C7630
FIEMAP = 0xC020660B
FIEMAP_REQUEST = struct.Struct("QQIIII")  # start, length, flags, mapped extents, extents that fit, reserved
STATFS_BYTES = 256  # more than `struct statfs`, whose first long is the type


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


class FileChanged(OSError):
    """A file is not the one that was looked at, or changed while it was read."""


def shows_changes(path: Path, ctime_ns: int) -> bool:
    """Return whether the metadata of a file show each later change of its bytes, also of the whole file system.

    An image can be exchanged for another one with equal metadata. Read-only file systems can be images, and so can
    writable ones with files that no kernel has written: the tools that build them store whole seconds. Raises OSError.
    """
    kind = file_system_type(path)
    is_built = kind in BUILT_FILE_SYSTEMS and ctime_ns % SECOND_NS == 0
    return kind in LIVE_FILE_SYSTEMS and not is_built and not os.statvfs(path).f_flag & os.ST_RDONLY


def hides_changes(path: Path) -> bool:
    """Return whether the bytes of a file can change without a trace in its metadata. Raises OSError."""
    kind = file_system_type(path)
    return kind in SILENT_FILE_SYSTEMS or (kind == OVERLAY and not _has_extents(path))


def writes_back(path: Path) -> bool:
    """Return whether `signature_of` leaves no dirty page. Raises OSError."""
    return file_system_type(path) in LIVE_FILE_SYSTEMS


def file_system_type(path: Path) -> int:
    """Return `f_type` of statfs. Raises OSError."""
    facts = ctypes.create_string_buffer(STATFS_BYTES)
    if LIBC.statfs(os.fsencode(path), facts) != 0:
        raise last_error()
    return ctypes.c_long.from_buffer(facts).value


def _has_extents(path: Path) -> bool:
    """Return whether an overlay has a file from a disk. Its layers can be on tmpfs, where files have no extents."""
    fd = _open_regular(path)
    try:
        fcntl.ioctl(fd, FIEMAP, FIEMAP_REQUEST.pack(0, 1, 0, 0, 0, 0))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def signature_of(path: Path) -> Signature:
    """Return the metadata of a regular file, whose every later change moves them. Raises OSError.

    The file is opened: on NFS, `stat` alone may return metadata of a minute ago.
    """
    fd = _open_regular(path)
    try:
        _settle(fd)
        return Signature.of(os.fstat(fd))
    finally:
        os.close(fd)


def digest_files(files: Sequence[tuple[str, Signature]], threads: int) -> list[str]:
    """Return the digests of files. Raises OSError, FileChanged if one is not the file that its metadata describe."""
    for path, expected in files:
        with _opened(path, expected) as fd:
            _settle(fd)
    pieces = [[(path, expected, offset) for offset in _offsets(expected)] for path, expected in files]
    ordered = chain.from_iterable(pieces)
    with ThreadPoolExecutor(threads, thread_name_prefix="kvbm-digest") as pool:  # after an error, the rest is left out
        found = iter(list(pool.map(_digest_piece, ordered) if threads > 1 else map(_digest_piece, ordered)))
    digests = []
    for (_, expected), of_file in zip(files, pieces, strict=True):
        hasher = xxhash.xxh3_128(expected.size.to_bytes(8, "little"))
        for digest in islice(found, len(of_file)):
            hasher.update(digest)
        digests.append(hasher.hexdigest())
    return digests


def _offsets(expected: Signature) -> range:
    """Return where the pieces of a file begin. An empty file has one."""
    return range(0, max(1, expected.size), PIECE_BYTES)


def _digest_piece(piece: tuple[str, Signature, int]) -> bytes:
    """Return the digest of the piece at an offset. Raises OSError, FileChanged if the file changed before its end."""
    path, expected, offset = piece
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    end = min(offset + PIECE_BYTES, expected.size)
    with _opened(path, expected) as fd:
        while offset < end:
            count = os.preadv(fd, [buffer[: min(len(buffer), end - offset)]], offset)
            if not count:
                raise FileChanged(f"{path} became shorter while it was read")
            hasher.update(buffer[:count])
            offset += count
    return hasher.digest()


@contextmanager
def _opened(path: str, expected: Signature) -> Iterator[int]:
    """Raise FileChanged at the end if this is not the file that its metadata describe."""
    fd = _open_regular(Path(path))
    try:
        yield fd
        if Signature.of(os.fstat(fd)) != expected:
            raise FileChanged(f"{path} changed")
    finally:
        os.close(fd)


def _open_regular(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd


def _settle(fd: int) -> None:
    """Wait for a call of `write` that is under way, and write dirty pages back. Later changes then set the times.

    Such a call holds the lock of the file, which ext4, btrfs and f2fs take for SEEK_HOLE, and XFS and NFS for a read. A
    direct write may share it: `ChangeWatch` notices its end. `fsync` would write back too, but takes milliseconds for a
    clean file. A file system that cannot do this has no dirty pages of mappings, or is silent.
    """
    with suppress(OSError):  # an empty file has no hole
        os.lseek(fd, 0, os.SEEK_HOLE)
    os.pread(fd, 1, 0)
    LIBC.sync_file_range(ctypes.c_int(fd), ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(WRITE_BACK))


class DigestOrder(NamedTuple):
    """What an engine sends to the process that digests the files of its model. `cores`: allowed for the threads."""

    files: Sequence[tuple[str, Signature]]
    cores: frozenset[int]


class Digests(NamedTuple):
    """The answer: digests of the files, in order. Other messages are in kvbm/child/child.py."""

    digests: Sequence[str]
