"""DirectoryStore: objects as files of a directory, which may be a parallel file system that many machines mount.

    <directory>/<key>                  an object
    <directory>/<key>#<digits>         the same while it is written

Links in the directory are not followed, and what is mounted in it is not entered (kvbm/host/tree.py): such an object is
a miss. Objects may belong to other users, because engines of several users may share a store.

A file gets its name when all of it is written, by a hard link, which fails if the object exists; where the file system
has no hard links, by renaming. Bytes go straight between the file and host memory, which is why this is not left to
obstore: it copies them a second time (bench/micro/shared_obstore.py compares both).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvbm.errors import TierProblem
from kvbm.host.threads import allowed_cores
from kvbm.host.tree import NOT_ENTERED, Tree
from kvbm.tiers.shared.object_store import Incoming, Outgoing, StoreAnswer, most_writing, wrong_length
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.protection import Buffer
from kvbm.tiers.shared.stores.request_limit import TimedStore

DIRECTORY_MODE = 0o700
FILE_MODE = 0o666  # less the umask
REMAINS = re.compile("[0-9a-f]+#[0-9]+")  # a file that is being written, by this version or by obstore
REMAINS_S = 3600.0
CHECKED_BYTES = 1 << 20  # of one read of an object that is only checked
MOST_PARTS = os.sysconf("SC_IOV_MAX")  # of one write
OF_ONE_FILE = (
    *NOT_ENTERED,
    *(errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO, errno.EPERM),
)
ENOTSUPP = 524  # of some network file systems
WITHOUT_LINKS = (  # what a file system without hard links answers
    errno.EINVAL,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EXDEV,
    ENOTSUPP,
)


class DirectoryStore(TimedStore):
    name = "directory"
    measured = (Outcome.GOOD, Outcome.EXISTS)

    def __init__(self, root: Path, facts: Path, *, threads: int, writes: bool) -> None:
        """`facts` is the description of the namespace. Raises OSError."""
        super().__init__()
        self.threads = threads
        # Checksum and copy take processor time: more threads than that only displace each other's bytes in its cache.
        self.write_threads = min(most_writing(threads), 2 * len(allowed_cores()))
        self._root = root
        self._facts = facts
        self._device = os.stat(root).st_dev
        self._writes = writes

    @classmethod
    def open(cls, root: Path, *, threads: int, facts_key: str, facts: bytes, writes: bool) -> DirectoryStore:
        """Create the directory and write the description of the namespace, unless this engine only reads. Raises
        TierProblem if the directory cannot be used."""
        require_directory(root)
        try:
            with os.scandir(root) as entries:
                next(entries, None)
            if writes:
                _describe(root, facts_key, facts)
            return cls(root, root / facts_key, threads=threads, writes=writes)
        except OSError as error:
            only_reads = "; set `tiers.shared.write: false` for an engine that only reads" if writes else ""
            raise TierProblem(
                f"cannot use the directory {root} of `tiers.shared.url`: {_reason(error)}",
                hint=f"check its permissions with `ls -ld {shlex.quote(str(root))}`{only_reads}",
            ) from error

    def are_present(self, keys: Sequence[str]) -> list[bool | None]:
        return [self._is_present(key) for key in keys]

    def keys(self, prefix: str) -> Iterator[list[str]]:
        """Yield the files in the directories of a namespace. Links, and directories that cannot be read, are left out.
        An engine that writes deletes what killed engines have left of a write. Raises OSError."""
        try:
            with Tree.open(self._root) as root, root.directory(prefix) as home, home.scan() as entries:
                directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in NOT_ENTERED and self._is_mounted():  # another user has put a link there
                return
            raise
        for directory in directories:
            with suppress(OSError):
                yield [f"{prefix}/{directory}/{name}" for name in self._files_of(f"{prefix}/{directory}")]

    def check(self, key: str | None) -> str | None:
        if not self._is_mounted():
            return f"{self._root} is not the directory that was opened: its file system is not mounted"
        try:
            with Tree.open(self._root) as root:
                if key is not None:
                    _read_all(root.open_file(key))
        except OSError as error:
            if error.errno not in (errno.ENOENT, *OF_ONE_FILE):  # says nothing about the others
                return str(error)
        return None

    def close(self) -> None:
        """Nothing to do."""

    def _get(self, one: Incoming) -> StoreAnswer:
        try:
            with Tree.open(self._root) as root:
                return read_file(root.open_file(one.key), one)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *OF_ONE_FILE) or not self._is_mounted():
                raise
            is_absent = error.errno == errno.ENOENT  # either says nothing about the others
            return StoreAnswer(Outcome.ABSENT) if is_absent else StoreAnswer(Outcome.BAD, str(error))

    def _put(self, one: Outgoing) -> StoreAnswer:
        is_written = self._write(one, creates=not one.replaces)
        return StoreAnswer(Outcome.GOOD if is_written else Outcome.EXISTS)

    def _is_present(self, key: str) -> bool | None:
        """Return whether there is an object. A file that cannot be read is not there; that says nothing about the
        others."""
        try:
            with Tree.open(self._root) as root:
                about = root.about(key)
        except OSError as error:
            is_absent = error.errno in (errno.ENOENT, *OF_ONE_FILE) and self._is_mounted()
            return False if is_absent else None
        return stat.S_ISREG(about.st_mode)

    def _files_of(self, directory: str) -> list[str]:
        """Return the names of the objects in a directory. Raises OSError."""
        with Tree.open(self._root) as root, root.directory(directory) as inner, inner.scan() as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            for entry in files if self._writes else []:
                with suppress(OSError):
                    if (
                        REMAINS.fullmatch(entry.name)
                        and entry.stat(follow_symlinks=False).st_mtime < time.time() - REMAINS_S
                    ):
                        inner.unlink_file(entry.name)
            return [entry.name for entry in files if not REMAINS.fullmatch(entry.name)]

    def _write(self, one: Outgoing, *, creates: bool) -> bool:
        """May raise OSError."""
        with Tree.open(self._root) as root:
            try:
                return write_file(root, one.key, one.buffers, creates=creates)
            except FileNotFoundError:
                if not self._is_mounted():
                    raise
            root.make_directories(one.key.rpartition("/")[0])
            return write_file(root, one.key, one.buffers, creates=creates)

    def _is_mounted(self) -> bool:
        """Whether the directory is the one that was opened: without its file system, a mount point is an empty
        directory on the disk of this machine, which must not be filled."""
        try:
            about = os.stat(self._root)
            return stat.S_ISDIR(about.st_mode) and (about.st_dev == self._device or self._facts.is_file())
        except OSError:
            return False


def read_file(descriptor: int, one: Incoming) -> StoreAnswer:
    """Read a file straight into the buffers. *Consumes* its descriptor. Raises OSError."""
    try:
        about = os.fstat(descriptor)
        if (wrong := wrong_length(about.st_size, one)) is not None:
            return wrong
        at = 0
        for buffer in one.buffers:
            if isinstance(buffer, int):
                at += buffer
                continue
            left = buffer
            while left:
                size = os.preadv(descriptor, [left], at)
                if size == 0:
                    return StoreAnswer(Outcome.BAD, f"{at} bytes, not {one.length}")
                left, at = left[size:], at + size
        return StoreAnswer(Outcome.GOOD, age_s=max(0.0, time.time() - about.st_mtime))
    finally:
        os.close(descriptor)


def _read_all(descriptor: int) -> None:
    """Read a file to its end: a part of it may be on a server that hangs. *Consumes* the descriptor. Raises OSError."""
    try:
        while os.read(descriptor, CHECKED_BYTES):
            pass
    finally:
        os.close(descriptor)


def write_file(root: Tree, key: str, buffers: Sequence[Buffer], *, creates: bool) -> bool:
    """Write a file whole or not at all. With `creates`, return False if there is one, and leave it. Raises OSError."""
    holder, name = root.parent(key)
    with holder:
        at = holder.descriptor
        staged, descriptor = _staged(name, at)
        try:
            try:
                write_all(descriptor, buffers)
            finally:
                os.close(descriptor)  # some file systems report only now that they are full
            if not creates:
                os.replace(staged, name, src_dir_fd=at, dst_dir_fd=at)
                return True
            is_first = _link(staged, name, at)
        except BaseException:
            with suppress(OSError):
                os.unlink(staged, dir_fd=at)
            raise
        with suppress(OSError):  # the object is there; what is left of its first name is deleted by a later listing
            os.unlink(staged, dir_fd=at)
        return is_first


def _link(staged: str, name: str, directory: int) -> bool:
    """Give a file its name; return False if another file has it. A link with this name is replaced, and without hard
    links, a file that another engine writes at the same time. Raises OSError."""
    try:
        os.link(staged, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        return True
    except FileExistsError:
        if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            return False
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
    os.replace(staged, name, src_dir_fd=directory, dst_dir_fd=directory)
    return True


def write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Write to an open file. Raises OSError."""
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        written = os.writev(descriptor, left[:MOST_PARTS])
        if written == 0:
            raise OSError(errno.EIO, "the file system takes no bytes")
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def require_directory(root: Path) -> None:
    """Create the directory, in an existing one: a missing mount point must not become a directory. Raises
    TierProblem."""
    try:
        root.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    except FileExistsError as error:
        raise TierProblem(
            f"{root} of `tiers.shared.url` is not a directory", hint="set the path of a directory"
        ) from error
    except OSError as error:
        raise TierProblem(
            f"cannot use the directory {root} of `tiers.shared.url`: {error.strerror}",
            hint=f"mount its file system, or run `mkdir -p {shlex.quote(str(root))}`",
        ) from error


def _describe(path: Path, key: str, facts: bytes) -> None:
    """Write the description of the namespace, if there is none. Otherwise create and delete an empty file next to it,
    because an engine that may not write has to know now. Raises OSError."""
    with Tree.open(path) as root:
        root.make_directories(key.rpartition("/")[0])
        with suppress(FileNotFoundError):
            if stat.S_ISREG(root.about(key).st_mode):
                holder, name = root.parent(key)
                with holder:
                    staged, descriptor = _staged(name, holder.descriptor)
                    os.close(descriptor)
                    os.unlink(staged, dir_fd=holder.descriptor)
                return
        write_file(root, key, [facts], creates=False)


def _staged(name: str, directory: int) -> tuple[str, int]:
    """Create an empty file next to a name: a listing deletes it if this process is killed. Raises OSError."""
    staged = f"{name}#{secrets.randbits(62)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return staged, os.open(staged, flags, FILE_MODE, dir_fd=directory)


def _reason(error: OSError) -> str:
    """Return why, with the name below the root that it is about."""
    name = error.filename
    is_below = isinstance(name, str) and not name.startswith(("/", "."))
    return f"`{name}`: {error.strerror}" if is_below else str(error.strerror)
