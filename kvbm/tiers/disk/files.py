"""Files of the disk tier: private, preallocated, read and written with O_DIRECT.

Private means: directories 0700, files 0600, owned by this user, opened without following a link in the last component.
An operation that the file system refuses raises an EnvironmentProblem with the path, the error and, if one applies, the
setting. If an operation fails, the space that it has allocated is released.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shlex
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from kvbm.errors import EnvironmentProblem, TierProblem, path_hint
from kvbm.host.directories import make_private_directories
from kvbm.host.libc import LIBC, last_error
from kvbm.host.machine_memory import margin_of
from kvbm.host.tree import Tree
from kvbm.tiers.disk.settings import Progress

PAGE_BYTES = 4096
MAX_DIRECTORY_BYTES = 440  # SQLite opens no file whose path has more than 504 bytes; its index is 64 bytes longer
FALLOCATE_BYTES = 1 << 30
ZERO_BYTES = 4 << 20
ZERO_FLUSH_BYTES = 256 << 20
OTHERS = stat.S_IRWXG | stat.S_IRWXO

UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FREE_HINT = "free some, or use another `tiers.disk.directory`"
ROOM_HINT = "lower `tiers.disk.capacity`, or set `tiers.disk.reclaim: true`"

LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class NoRoom(TierProblem):
    """The file system, a quota or a process limit does not allow that much space."""


def make_private_directory(path: Path) -> None:
    """Create a directory, or check that the existing one is private. Raises EnvironmentProblem."""
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            sync_directory(path.parent)
        found = os.lstat(path)
    except OSError as error:
        raise problem(f"cannot create directory {path}", error) from error
    if not stat.S_ISDIR(found.st_mode):
        raise TierProblem(f"{path} is not a directory (links are not followed)")
    _require_private(path, found)


def open_private(path: Path, flags: int) -> int:
    """Return a descriptor of a private regular file. Raises OSError, or EnvironmentProblem if it is not private."""
    return private_file(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600), path)


def open_private_directory(path: Path, *, levels: int) -> Tree:
    """Open a directory that is `levels` below one that the user named. It and those in between must be private, and no
    links. Raises OSError or EnvironmentProblem."""
    parents = list(path.parents)
    directory = Tree.open(parents[levels - 1])
    for each in reversed([path, *parents[: levels - 1]]):
        with directory:
            inner = directory.directory(each.name)
        directory = inner
        try:
            _require_private(each, os.fstat(directory.descriptor))
        except BaseException:
            directory.close()
            raise
    return directory


def require_usable_parent(directory: Path) -> None:
    """Check the directory of the profile, and create it if it is missing. Raises EnvironmentProblem.

    It may belong to another user, but other users must not be able to rename our directories in it.
    """
    if (length := len(os.fsencode(directory))) > MAX_DIRECTORY_BYTES:
        raise EnvironmentProblem(
            f"the path of the directory has {length} bytes; the index of the disk tier allows {MAX_DIRECTORY_BYTES}",
            hint="set `tiers.disk.directory` to a shorter path",
        )
    try:
        if not os.path.lexists(directory):
            make_private_directories(directory)
        found = os.lstat(directory)
    except OSError as error:
        cause = path_hint(error, directory)
        hint = f"{cause}, or set another `tiers.disk.directory`" if cause else "set `tiers.disk.directory`"
        raise problem(f"cannot create directory {directory}", error, hint=hint) from error
    is_link = stat.S_ISLNK(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        raise TierProblem(
            f"{directory} is {'a symbolic link, which is not followed' if is_link else 'not a directory'}",
            hint="set `tiers.disk.directory` to the directory itself",
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        is_own = found.st_uid == os.geteuid()
        raise TierProblem(
            f"{directory} is writable by everyone (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"run `chmod o-w {shlex.quote(str(directory))}`" if is_own else "set another `tiers.disk.directory`",
        )


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def problem(what: str, error: OSError, *, hint: str | None = None) -> TierProblem:
    """Translate an OSError, with its errno name."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    kind = NoRoom if error.errno in NO_ROOM else TierProblem
    return kind(f"{what}: {error.strerror or error} ({name})", hint=hint or (ROOM_HINT if kind is NoRoom else None))


class Arena:
    """The file that holds the bytes of the blocks. Its opener closes it; `sync` may be called by any thread."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.is_direct = False

    @classmethod
    def open(cls, path: Path) -> Arena:
        """Open the file, or create it empty. Raises EnvironmentProblem."""
        try:
            return cls(path, open_private(path, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise problem(f"cannot open {path}", error) from error

    @classmethod
    def open_unnamed(cls, directory: Path) -> Arena:
        """Create a file without a name, deleted when the last process closes it. Raises EnvironmentProblem."""
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                return cls(directory, os.dup(file.fileno()))
        except OSError as error:
            raise problem(f"cannot create a file in {directory}", error) from error

    def length(self) -> int:
        return os.fstat(self.fd).st_size

    def resize(self, length: int, *, zerofill: bool, progress: Progress | None) -> None:
        """Allocate the space up to `length`, or release what is beyond it.

        Raises NoRoom or EnvironmentProblem; the file then keeps its former length.
        """
        before = self.length()
        try:
            if length < before:
                os.ftruncate(self.fd, length)
            else:
                _take_space(self.fd, before, length, zerofill=zerofill, progress=progress)
            os.fsync(self.fd)
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self.fd, min(before, length))
            if not isinstance(error, OSError):
                raise
            what = f"cannot resize {self.path} to {length} bytes"
            if error.errno in NO_ROOM:
                what = f"no space for {self.path}, which requires {length} bytes ({length / 2**30:.2f} GiB)"
            raise problem(what, error) from error

    def use_direct_io(self, allocator: str) -> None:
        """Bypass the page cache from here on, by a flag of the open file or by reopening it. Raises OSError."""
        if allocator == "open-direct":
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            os.close(self.fd)
            self.fd = fd
        else:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_DIRECT)
        self.is_direct = True

    def use_page_cache(self) -> None:
        """Use buffered I/O, without read-ahead because access is random. Raises OSError."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def sync(self) -> None:
        """Make all finished writes durable. Raises OSError."""
        os.fdatasync(self.fd)
        if not self.is_direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def spare_bytes(self) -> int:
        """Return the free space without the margin of `capacity: auto`. Raises OSError."""
        room = os.fstatvfs(self.fd)
        free_bytes = room.f_bavail * room.f_frsize if room.f_blocks else sys.maxsize  # some do not report it
        return max(0, free_bytes + self.length() - margin_of(free_bytes))

    def has_its_name(self) -> bool | None:
        """Return whether `path` still names this file; None if that is unknown."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return None

    def close(self) -> None:
        """May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2) itself: the emulation of the C library writes one byte per block. Raises OSError."""
    while LIBC.fallocate(fd, mode, offset, length) != 0:
        error = last_error()
        if error.errno != errno.EINTR:
            raise error


def _take_space(fd: int, start: int, end: int, *, zerofill: bool, progress: Progress | None) -> None:
    room = os.fstatvfs(fd)
    if room.f_blocks and end - start > room.f_bfree * room.f_frsize:  # other programs keep what is left
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        for at in range(start, end, FALLOCATE_BYTES):
            fallocate(fd, 0, at, min(FALLOCATE_BYTES, end - at))
            if progress is not None:
                progress(min(at + FALLOCATE_BYTES, end), end)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if not zerofill:
            raise EnvironmentProblem(
                f"this file system cannot preallocate space: {error.strerror}",
                hint="set `tiers.disk.zerofill: true` to fill the file with zeros instead",
            ) from error
        write_zeros(fd, start, end, progress)


def write_zeros(fd: int, start: int, end: int, progress: Progress | None = None) -> None:
    """Fill a range with zeros that are durable. Raises OSError."""
    zeros = memoryview(bytes(ZERO_BYTES))
    flushed = at = start
    while at < end:
        at += os.pwrite(fd, zeros[: end - at], at)
        if at - flushed >= ZERO_FLUSH_BYTES or at == end:
            os.fdatasync(fd)
            os.posix_fadvise(fd, flushed, at - flushed, os.POSIX_FADV_DONTNEED)
            flushed = at
        if progress is not None:
            progress(at, end)


def private_file(fd: int, path: Path) -> int:
    """Return the descriptor of a private regular file; otherwise close it and raise EnvironmentProblem."""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise TierProblem(f"{path} is not a regular file with a single hard link")
        _require_private(path, found)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise TierProblem(
            f"{path} belongs to user {found.st_uid}; kvbm runs as user {os.geteuid()}",
            hint=f"run `sudo chown -R {os.geteuid()} {shlex.quote(str(path))}`, or set `tiers.disk.directory`",
        )
    if found.st_mode & OTHERS:
        raise TierProblem(
            f"{path} is accessible to other users (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"run `chmod go-rwx {shlex.quote(str(path))}`",
        )
