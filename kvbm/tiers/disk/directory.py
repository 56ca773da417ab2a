"""The directory of the disk tier: its caches, which of them are in use, and which one an engine gets.

    <directory>/<namespace>/<instance>/lock           held (flock) by the user of the instance; names its parent
                                       superblock     description of the instance
                                       arena          bytes of the blocks
                                       index.sqlite   slot of each block
    <directory>/<namespace>/rates.json                measured speed of its engines

Each engine has its own instance. An engine takes over the most recently used free instance of its namespace, or creates
one. An instance is changed only by the holder of its lock; its engine may remove the superblock, which forgets all. A
disk process whose engine has died holds its lock until it has exited. `await_predecessor` waits for that, so that a
restarted engine finds its cache.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbm.errors import EnvironmentProblem, TierProblem
from kvbm.host.processes import process_namespace, stat_of
from kvbm.host.tree import Tree
from kvbm.tiers.disk.files import (
    make_private_directory,
    open_private,
    open_private_directory,
    private_file,
    problem,
)
from kvbm.tiers.disk.index import index_files
from kvbm.tiers.disk.superblock import read_superblock

LOCK, SUPERBLOCK, ARENA, INDEX = "lock", "superblock", "arena", "index.sqlite"
LEVELS = 2  # of an instance below the directory
RATES = "rates.json"  # of a namespace: measured speed of its engines
NAMESPACE_NAME = re.compile(r"[0-9a-f]{2,128}")
INSTANCE_NAME = re.compile(r"[0-9a-f]{16}")
LOCK_ATTEMPTS = 4
LOCK_PAUSE_S = 0.01  # `is_locked` holds a lock for less
PREDECESSOR_TIMEOUT_S = 10.0
PREDECESSOR_PAUSE_S = 0.05
HOLDER_BYTES = 256

logger = logging.getLogger(__name__)


class InstanceLock:
    """Exclusive lock of an instance, held until `release` or the end of this process and of its forked children."""

    def __init__(self, path: Path, directory: Tree, fd: int) -> None:
        """*Consumes* the open directory of the instance."""
        self.path = path
        self.directory = directory
        self._fd = fd

    @classmethod
    def take(cls, instance: Path) -> InstanceLock | None:
        """Return None if another process holds it, or the instance was just removed. Raises EnvironmentProblem."""
        for attempt in range(LOCK_ATTEMPTS):
            if attempt:
                time.sleep(LOCK_PAUSE_S)
            try:
                directory = open_private_directory(instance, levels=LEVELS)
                try:
                    fd = private_file(directory.open_file(LOCK, os.O_RDWR | os.O_CREAT), instance / LOCK)
                except BaseException:
                    directory.close()
                    raise
            except FileNotFoundError:
                return None
            except OSError as error:
                raise problem(f"cannot open {instance / LOCK}", error) from error
            if _lock(fd, fcntl.LOCK_EX) and directory.has_at(LOCK, fd):
                _write_holder(fd)
                return cls(instance, directory, fd)
            os.close(fd)
            directory.close()
        return None

    def touch(self) -> None:
        """Record that the instance is in use now, as the mtime of the lock file."""
        with suppress(OSError):
            os.utime(self._fd)

    def release(self) -> None:
        """Record that no engine owns the instance, and unlock it. May be called twice."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        self.directory.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A name in a directory of caches that is not used. `is_failure`: it may be a cache of this user."""

    path: Path
    why: str
    is_failure: bool = False


def claim(instance: Path) -> InstanceLock | None:
    """Lock an existing instance; None if it is in use. Raises EnvironmentProblem if it cannot be used, and OtherFormat.

    Its files are not changed.
    """
    make_private_directory(instance)
    lock = InstanceLock.take(instance)
    if lock is not None:
        try:
            read_superblock(instance / SUPERBLOCK)
        except BaseException:
            lock.release()
            raise
    return lock


def claim_new(home: Path) -> InstanceLock:
    """Create and lock an instance. Raises EnvironmentProblem."""
    while True:
        instance = home / secrets.token_hex(8)
        make_private_directory(instance)
        try:
            if (lock := InstanceLock.take(instance)) is not None:
                return lock
        except BaseException:
            with suppress(OSError):  # without a lock, another engine may use it
                os.rmdir(instance)
            raise


def await_predecessor(
    directory: Path, namespace: str, *, timeout_s: float = PREDECESSOR_TIMEOUT_S, on_wait: Callable[[], None]
) -> None:
    """Wait while the most recently used instance that this engine could get is locked by a process that is exiting.

    Calls `on_wait` after a log record. Does nothing if the directory cannot be read, which `claim` reports.
    """
    predecessor = None
    with suppress(EnvironmentProblem):
        instances = reversed(instances_of(directory / namespace))
        predecessor = next((instance for instance in instances if not _is_in_use(instance)), None)
    if predecessor is None or not is_locked(predecessor):
        return
    logger.info("waiting for the disk cache %s, whose engine has ended", predecessor)
    on_wait()
    began_s = time.monotonic()
    while is_locked(predecessor):
        if time.monotonic() - began_s > timeout_s:
            logger.warning("the disk cache %s is still locked after %g s: using another one", predecessor, timeout_s)
            return
        time.sleep(PREDECESSOR_PAUSE_S)
    logger.info("the disk cache %s is free after %.1f s", predecessor, time.monotonic() - began_s)


def _is_in_use(instance: Path) -> bool:
    """Return whether its lock is held by a process whose parent, an engine, is alive or not visible from here."""
    return is_locked(instance) and _has_living_engine(instance) is not False


def _has_living_engine(instance: Path) -> bool | None:
    """Return whether the engine that has not released it is alive, None if there is none or it is not visible."""
    try:
        fd = open_private(instance / LOCK, os.O_RDONLY)
        with open(fd, encoding="ascii", errors="replace") as lock:
            holder = lock.read(HOLDER_BYTES).split()
        if len(holder) != 3 or not holder[0].isdecimal() or holder[2] != _process_namespace():
            return None
        engine = stat_of(int(holder[0]))
    except (OSError, EnvironmentProblem):
        return None
    return engine is not None and str(engine.started) == holder[1]


def _write_holder(fd: int) -> None:
    """Write pid, start and namespace of the parent of this process, which is the engine of a disk process."""
    pid = os.getppid()
    with suppress(OSError):  # a full disk
        engine = stat_of(pid)
        started = None if engine is None else engine.started
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{pid} {started} {_process_namespace()}\n".encode("ascii"), 0)


def _process_namespace() -> str:
    """Return in which boot and container a process id is valid; without /proc, a text that no other process writes."""
    try:
        return "/".join(process_namespace())
    except OSError:
        return f"unknown/{os.getpid()}"


def reclaim_oldest(directory: Path) -> bool:
    """Remove the least recently used free instance of any namespace. Return False if there is none.

    An instance of another format is never removed, nor one whose disk process has died while its engine lives.
    """
    for instance in instances(directory, []):
        with suppress(EnvironmentProblem):
            lock = None if _has_living_engine(instance) else InstanceLock.take(instance)
            if lock is None:
                continue
            try:
                read_superblock(instance / SUPERBLOCK)  # raises if it has another format
                size = arena_bytes(instance)
                remove_instance(lock)
            finally:
                lock.release()
            logger.warning("removed the unused disk cache %s (%d bytes) to make room", instance, size)
            return True
    return False


def remove_instance(lock: InstanceLock) -> None:
    """Remove all its files, the lock last. Raises EnvironmentProblem."""
    instance = lock.path
    names = (*(file.name for file in index_files(instance / INDEX)), ARENA, SUPERBLOCK, SUPERBLOCK + ".new", LOCK)
    try:
        with Tree.open(instance.parent.parent) as directory, directory.directory(instance.parent.name) as home:
            if not home.has_at(instance.name, lock.directory.descriptor):
                raise OSError(errno.ESTALE, "another directory has its name")
            for name in names:  # in the directory that was locked, whatever becomes of its name
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=lock.directory.descriptor)
            home.remove_directory(instance.name)
            with suppress(OSError):  # other instances
                home.unlink_file(RATES)
            with suppress(OSError):
                directory.remove_directory(instance.parent.name)
    except OSError as error:
        raise problem(f"cannot remove {instance}", error) from error


def device_of(directory: Path) -> int:
    """Return the device of the file system of `directory`, or of its nearest existing parent."""
    for path in (directory, *directory.parents):
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise problem(f"cannot use {path}", error) from error
    raise TierProblem(f"cannot find the file system of {directory}")


def instances(directory: Path, skipped: list[Skipped]) -> list[Path]:
    """Return the instances of all namespaces, least recently used first."""
    found: list[Path] = []
    for home in _directories(directory, NAMESPACE_NAME, skipped):
        try:
            found += _directories(home, INSTANCE_NAME, skipped)
        except EnvironmentProblem as error:
            skipped.append(Skipped(home, error.message.rpartition(": ")[2], is_failure=is_of_user(home)))
    return sorted(found, key=_age_key)


def instances_of(home: Path) -> list[Path]:
    """Return the instances of a namespace, least recently used first."""
    return sorted(_directories(home, INSTANCE_NAME, []), key=_age_key)


def _directories(holder: Path, names: re.Pattern[str], skipped: list[Skipped]) -> list[Path]:
    """Return the directories with such a name, without links. Raises EnvironmentProblem."""
    found = []
    try:
        with Tree.open(holder) as directory, directory.scan() as entries:
            for entry in entries:
                if not names.fullmatch(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    found.append(holder / entry.name)
                else:
                    skipped.append(Skipped(holder / entry.name, "a link, or another file, in place of a directory"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise problem(f"cannot read {holder}", error) from error
    return found


def is_of_user(path: Path) -> bool:
    with suppress(OSError):
        return os.lstat(path).st_uid == os.geteuid()
    return False


def last_used(instance: Path) -> float | None:
    with suppress(OSError):
        return os.lstat(instance / LOCK).st_mtime
    return None


def _age_key(instance: Path) -> float:
    return last_used(instance) or 0.0


def arena_bytes(instance: Path) -> int:
    """Return the space that the arena occupies on disk."""
    with suppress(OSError):
        return os.lstat(instance / ARENA).st_blocks * 512
    return 0


def is_locked(instance: Path) -> bool:
    """Test with a shared lock that is released at once."""
    try:
        fd = open_private(instance / LOCK, os.O_RDONLY)
    except (OSError, EnvironmentProblem):
        return False
    try:
        return not _lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
