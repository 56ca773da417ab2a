"""Tree: a directory and what is below it, for directories in which other users may create names.

The path of the root is the user's, and may lead through links. Below it, no call follows a link or enters another mount
(a bind mount too): it fails with ELOOP, ENOTDIR or EXDEV. Every call begins at an open directory, so that a directory
that becomes a link between two calls is not entered. Only regular files are opened, and opening never waits.

Linux 5.6 resolves a name that way in one call (openat2). Elsewhere, each component is opened by itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvbm.host.libc import LIBC, last_error

OPENAT2 = 437  # of every architecture
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x01, 0x02, 0x04, 0x08
RESOLVE = RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
NOT_ENTERED = (errno.ELOOP, errno.ENOTDIR, errno.EXDEV)  # a link, another kind of file, another mount
KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


class Tree:
    """See the module's text. Names may have several components, and are relative to this directory."""

    def __init__(self, descriptor: int) -> None:
        """*Consumes* a descriptor of a directory."""
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Tree:
        """Open a root. Raises OSError."""
        return cls(os.open(path, DIRECTORY))

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def directory(self, name: str) -> Tree:
        """Open a directory. Raises OSError."""
        return Tree(_open_below(self.descriptor, name, DIRECTORY))

    def parent(self, name: str) -> tuple[Tree, str]:
        """Open the directory that holds this name, and return it with the last component. Raises OSError."""
        directory, _, last = name.rpartition("/")
        return self.directory(directory or "."), last

    def open_file(self, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
        """Return a descriptor of a regular file. Raises OSError."""
        descriptor = _open_below(self.descriptor, name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENXIO, "Not a regular file", name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def about(self, name: str) -> os.stat_result:
        """Return the facts of a name itself, also of a link. Raises OSError."""
        holder, last = self.parent(name)
        with holder:
            return os.stat(last, dir_fd=holder.descriptor, follow_symlinks=False)

    def has_at(self, name: str, descriptor: int) -> bool:
        """Whether an open file or directory has this name now: others may remove or rename it at any time."""
        with suppress(OSError):
            return os.path.samestat(self.about(name), os.fstat(descriptor))
        return False

    def make_directories(self, name: str, mode: int = 0o777) -> None:
        """Create the directories of a name that are missing. Raises OSError."""
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            holder, last = self.parent("/".join(parts[:end]))
            with holder, suppress(FileExistsError):
                os.mkdir(last, mode, dir_fd=holder.descriptor)

    @contextmanager
    def scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Iterate over the entries. `stat` of an entry works until the end of the `with`. Raises OSError."""
        listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            with os.scandir(listing) as entries:
                yield entries
        finally:
            os.close(listing)

    def unlink_file(self, name: str) -> None:
        """Remove the name of a regular file; its other names keep its content. Raises OSError."""
        holder, last = self.parent(name)
        with holder:
            about = os.stat(last, dir_fd=holder.descriptor, follow_symlinks=False)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.ENXIO, f"{kind_of(about.st_mode)}, not a file", name)
            os.unlink(last, dir_fd=holder.descriptor)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory. Raises OSError."""
        holder, last = self.parent(name)
        with holder:
            os.rmdir(last, dir_fd=holder.descriptor)


def kind_of(mode: int) -> str:
    """Return what a file is, for a message."""
    return KINDS.get(stat.S_IFMT(mode), "a device")


def _open_below(holder: int, name: str, flags: int, mode: int = 0) -> int:
    """Open a name below a directory as the module's text says. Raises OSError."""
    if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise OSError(errno.EINVAL, "Not a name below this directory", name)
    return _openat2(holder, name, flags, mode) if _has_openat2() else _open_each(holder, name, flags, mode)


class _How(ctypes.Structure):
    """struct open_how"""

    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def _openat2(holder: int, name: str, flags: int, mode: int) -> int:
    how = _How(flags, mode if flags & os.O_CREAT else 0, RESOLVE)
    path, size = ctypes.c_char_p(os.fsencode(name)), ctypes.c_size_t(ctypes.sizeof(how))
    while True:
        descriptor: int = LIBC.syscall(ctypes.c_long(OPENAT2), ctypes.c_int(holder), path, ctypes.byref(how), size)
        if descriptor >= 0:
            return descriptor
        error = last_error()
        if error.errno != errno.EINTR:
            raise OSError(error.errno, error.strerror, name)


@cache
def _has_openat2() -> bool:
    """Older kernels lack it, and the filters of some containers refuse it."""
    root = os.open("/", DIRECTORY)
    try:
        os.close(_openat2(root, ".", DIRECTORY, 0))
    except OSError:
        return False
    finally:
        os.close(root)
    return True


def _open_each(holder: int, name: str, flags: int, mode: int) -> int:
    mount = _mount_of(holder)
    at = os.dup(holder)
    *directories, last = name.split("/")
    try:
        for step, how in [*((directory, DIRECTORY) for directory in directories), (last, flags)]:
            found = _open_one(at, step, how, mode)
            os.close(at)
            at = found
            if _mount_of(at) != mount:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    except BaseException:
        os.close(at)
        raise
    return at


def _open_one(holder: int, name: str, flags: int, mode: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=holder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=holder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def _mount_of(descriptor: int) -> str:
    """Return what differs between mounts: bind mounts of one file system have the same device."""
    with suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as facts:
        for line in facts:
            if line.startswith("mnt_id:"):
                return line
    return str(os.fstat(descriptor).st_dev)
