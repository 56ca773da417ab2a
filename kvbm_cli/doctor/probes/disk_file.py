"""ProbeFile: a temporary file of the disk probe, and trials of what works in it.

Each trial writes and reads back, and returns an outcome instead of raising OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvbm.host.libc import LIBC
from kvbm.tiers.disk.files import PAGE_BYTES

PREFIX = ".kvbm-probe-"
TRIED_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
AREA_BYTES = 4 * TRIED_ALIGNMENTS[-1]
CACHED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """Whether a feature works. If not, `reason` is the name of the error, such as `EINVAL`."""

    works: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DirectIO:
    """O_DIRECT set by open or by fcntl. It works if the flag is kept and whole pages are read back unchanged.

    `alignment` is the smallest offset and length that worked. `is_cached` is true if the page cache held the bytes
    anyway.
    """

    works: bool
    reason: str | None = None
    alignment: int | None = None
    is_cached: bool = False


@dataclass(frozen=True, slots=True)
class ProbeFile:
    """An unnamed temporary file: created without a name (O_TMPFILE) or already unlinked.

    The trials after `write` require that it has succeeded.
    """

    fd: int
    direct_fd: int | None
    direct_error: str | None
    is_unnamed: bool

    @classmethod
    def create(cls, directory: Path) -> ProbeFile:
        """Raise OSError if no file can be created in the directory."""
        try:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS):
                raise
            return cls._create_named(directory / f"{PREFIX}{secrets.token_hex(8)}")
        return cls(fd, *_open_direct(f"/proc/self/fd/{fd}"), is_unnamed=True)

    @classmethod
    def _create_named(cls, path: Path) -> ProbeFile:
        """Open the file in both ways, then unlink it. The doctor removes the directory of a probe that is killed."""
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            direct = _open_direct(str(path))
        finally:
            os.unlink(path)
        return cls(fd, *direct, is_unnamed=False)

    def __enter__(self) -> ProbeFile:
        return self

    def __exit__(self, *ignored: object) -> None:
        for fd in (self.fd, self.direct_fd):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def write(self) -> ProbeOutcome:
        """Whether the area can be written and read back."""
        return attempt(lambda: _round_trip(self.fd, 0, AREA_BYTES))

    def direct_by_open(self) -> DirectIO:
        return DirectIO(False, self.direct_error) if self.direct_fd is None else _try_direct(self.direct_fd)

    def direct_by_fcntl(self) -> DirectIO:
        try:
            with direct_flag(self.fd) as carries:
                return _try_direct(self.fd) if carries else DirectIO(False, "the flag is not kept")
        except OSError as error:
            return DirectIO(False, name_of(error))


def _open_direct(path: str) -> tuple[int | None, str | None]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC), None
    except OSError as error:
        return None, name_of(error)


@contextlib.contextmanager
def direct_flag(fd: int) -> Iterator[bool]:
    """Set O_DIRECT by fcntl and yield whether the flag was kept. Raises OSError."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _try_direct(fd: int) -> DirectIO:
    """Write the whole area, then find the smallest alignment that works inside it."""
    whole = attempt(lambda: _round_trip(fd, 0, AREA_BYTES))
    if not whole.works:
        return DirectIO(False, whole.reason)
    is_cached = _cached_share(fd) > CACHED_SHARE
    alignment = next((size for size in TRIED_ALIGNMENTS if attempt(partial(_round_trip, fd, size, size)).works), None)
    if alignment is None or alignment > PAGE_BYTES:
        return DirectIO(
            False, f"requires an alignment of {alignment or f'more than {TRIED_ALIGNMENTS[-1]}'} bytes", alignment
        )
    return DirectIO(True, None, alignment, is_cached)


def _round_trip(fd: int, offset: int, length: int) -> None:
    """Write random bytes and read them back. OSError if they differ or are short."""
    with mmap.mmap(-1, length) as out, mmap.mmap(-1, length) as back:
        out[:] = os.urandom(length)
        done = os.pwritev(fd, [out], offset)
        if done != length:
            raise OSError(errno.EIO, f"{done} of {length} bytes written")
        os.fdatasync(fd)
        done = os.preadv(fd, [back], offset)
        if done != length:
            raise OSError(errno.EIO, f"{done} of {length} bytes read")
        if out[:] != back[:]:
            raise OSError(errno.EBADMSG, "the bytes read differ from the bytes written")


def _cached_share(fd: int) -> float:
    """Share of the area in the page cache. A direct write has dropped what buffered writes left there."""
    pages = AREA_BYTES // mmap.PAGESIZE
    states = (ctypes.c_ubyte * pages)()
    try:
        with mmap.mmap(fd, AREA_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
            start = ctypes.c_char.from_buffer(mapping)
            failed = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(AREA_BYTES), states)
            del start
    except (OSError, ValueError):
        return 0.0
    return 0.0 if failed else sum(state & 1 for state in states) / pages


def attempt(action: Callable[[], object]) -> ProbeOutcome:
    try:
        action()
    except OSError as error:
        return ProbeOutcome(False, name_of(error))
    return ProbeOutcome(True)


def name_of(error: OSError) -> str:
    """Name of the error, such as `EINVAL`, or our own text if bytes differ or are short."""
    number = error.errno or 0
    if number in (errno.EIO, errno.EBADMSG) and error.strerror and error.strerror != os.strerror(number):
        return error.strerror
    return errno.errorcode.get(number, str(error))
