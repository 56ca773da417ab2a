"""Instance: one open cache on disk, with its lock, its arena, its index and the blocks recovered from them.

Opening returns a usable cache or raises an EnvironmentProblem. Damage raises nothing: invalid rows are dropped, counted
in `losses` and logged; in the worst case the cache starts empty. An instance whose files cannot be used, as those of
another user, is left as it is, and another one is used. The superblock is written last, so that an instance
whose creation was interrupted counts as damaged.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvbm.errors import EnvironmentProblem, TierProblem
from kvbm.tiers.disk.directory import (
    ARENA,
    INDEX,
    RATES,
    SUPERBLOCK,
    InstanceLock,
    claim,
    claim_new,
    instances_of,
    reclaim_oldest,
    remove_instance,
)
from kvbm.tiers.disk.files import (
    FREE_HINT,
    NO_ROOM,
    PAGE_BYTES,
    ROOM_HINT,
    UNSUPPORTED,
    Arena,
    NoRoom,
    make_private_directory,
    open_private,
    problem,
    require_usable_parent,
    sync_directory,
)
from kvbm.tiers.disk.health import DiskStorageCounters
from kvbm.tiers.disk.index import PRIMARY_CODE, BlockIndex, Recovered, index_files, is_damage
from kvbm.tiers.disk.io.threads import BlockIO, IoRun, ThreadsIO
from kvbm.tiers.disk.settings import DiskSettings, Namespace, Progress
from kvbm.tiers.disk.superblock import Superblock, read_superblock, write_superblock

WORD_BYTES = 8
FIT_ATTEMPTS = 3
MAX_GENERATION = 1 << 62  # leaves enough larger ones for every later write
PROBE_BYTES = PAGE_BYTES  # after the last slot, for probing the disk

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WantedInstance:
    """The cache that an engine asks for."""

    settings: DiskSettings
    namespace: Namespace
    payload_bytes: int
    hash_bytes: int
    progress: Progress | None = None

    def with_room(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns. If it finds no room, call it again: with `fit` because another engine may
        have taken the space meanwhile, with `reclaim` after removing an unused cache."""
        attempts = FIT_ATTEMPTS if self.settings.fit else 1
        while True:
            try:
                return function()
            except NoRoom:
                attempts -= 1
                if attempts > 0:
                    continue
                if not self.settings.reclaim or not reclaim_oldest(self.settings.directory):
                    raise


class Instance:
    """An open cache. `index` and `lock` are None if it is not persistent."""

    def __init__(self, path: Path, arena: Arena, superblock: Superblock) -> None:
        self.path = path
        self.arena = arena
        self.superblock = superblock  # what it says if the cache is persistent
        self.lock: InstanceLock | None = None
        self.index: BlockIndex | None = None
        self.recovered: Recovered | None = None
        self.notes: dict[int, bytes] = {}  # of recovered blocks, by slot
        self.losses = DiskStorageCounters()  # damage found at opening

    @property
    def rates_path(self) -> Path | None:
        """The file with the rates of the engines of this namespace; None if the cache is not persistent."""
        return None if self.index is None else self.path.parent / RATES

    @classmethod
    def open(cls, wanted: WantedInstance, only: Path | None = None) -> Instance:
        """Take over a free instance or create one; with `only`, that one or a new one. Raises EnvironmentProblem."""
        settings = wanted.settings
        require_usable_parent(settings.directory)
        if not settings.persist:
            return wanted.with_room(partial(cls._open_unnamed, wanted))
        home = settings.directory / wanted.namespace.digest.hex()
        wanted.with_room(partial(make_private_directory, home))
        unusable_count = 0
        for path in reversed(instances_of(home)):
            if only not in (None, path):
                continue
            try:
                if (lock := claim(path)) is not None:
                    opened = cls._open_locked(lock, wanted)
                    break
            except NoRoom:  # a new one needs even more
                raise
            except EnvironmentProblem as error:
                unusable_count += 1
                remedy = "" if error.hint is None else f" ({error.hint})"
                logger.warning("cannot use the disk cache %s, using another one: %s%s", path, error.message, remedy)
            except Exception:  # a damage that nothing foresees; a new instance has none
                unusable_count += 1
                logger.exception("cannot use the disk cache %s, using another one", path)
        else:
            opened = cls._open_locked(wanted.with_room(partial(claim_new, home)), wanted)
        opened.losses.unusable_instances = unusable_count
        return opened

    @classmethod
    def _open_unnamed(cls, wanted: WantedInstance) -> Instance:
        arena = Arena.open_unnamed(wanted.settings.directory)
        try:
            superblock = _described(arena, wanted)
            _take_space(arena, superblock, wanted)
        except BaseException:
            arena.close()
            raise
        return cls(wanted.settings.directory, arena, superblock)

    @classmethod
    def _open_locked(cls, lock: InstanceLock, wanted: WantedInstance) -> Instance:
        """*Consumes* the lock."""
        try:
            instance = wanted.with_room(partial(cls._recovered, lock, wanted))
        except BaseException:
            if not (lock.path / SUPERBLOCK).exists():
                with suppress(EnvironmentProblem):
                    remove_instance(lock)
            lock.release()
            raise
        lock.touch()
        return instance

    @classmethod
    def _recovered(cls, lock: InstanceLock, wanted: WantedInstance) -> Instance:
        arena = Arena.open(lock.path / ARENA)
        try:
            kept = read_superblock(lock.path / SUPERBLOCK) if wanted.settings.fit else None
            instance = cls(lock.path, arena, _described(arena, wanted, kept))
            instance.lock = lock
            instance._recover(wanted)
        except BaseException:
            arena.close()
            raise
        return instance

    def renew_index(self) -> BlockIndex:
        """Replace a damaged index by an empty one. Raises sqlite3.Error, OSError or EnvironmentProblem."""
        if self.index is not None:
            self.index.close()
        _remove(*index_files(self.path / INDEX))
        sync_directory(self.path)
        self.index = _open_index(self.path / INDEX)
        return self.index

    def touch(self) -> None:
        """Record that the instance is in use now."""
        if self.lock is not None:
            self.lock.touch()

    def close(self) -> None:
        """Close all files and release the lock. No I/O may be running."""
        if self.index is not None:
            self.index.close()
        self.arena.close()
        if self.lock is not None:
            self.lock.touch()
            self.lock.release()

    def _recover(self, wanted: WantedInstance) -> None:
        """Bring superblock, index and arena into one state, in an order that may be interrupted anywhere."""
        superblock, path = self.superblock, self.path
        former = self._read_superblock()
        if former is None or (why := self._mismatch(former)) is not None:
            if former is not None:
                logger.warning("disk cache %s has %s: starting empty", path, why)
            _remove(path / SUPERBLOCK)
            _remove(*index_files(path / INDEX))
            self.arena.resize(0, zerofill=False, progress=None)
        intact_bytes = min(self.arena.length(), _arena_bytes(superblock))
        try:
            self.recovered = self._load_index(intact_bytes // superblock.slot_bytes)
            _take_space(self.arena, superblock, wanted)
            self._write_superblock(former)
        except BaseException:
            if self.index is not None:
                self.index.close()
            raise

    def _read_superblock(self) -> Superblock | None:
        superblock = read_superblock(self.path / SUPERBLOCK)
        if superblock is None and (self.path / INDEX).exists():
            self.losses.damaged_superblocks += 1
            logger.warning("the superblock of the disk cache %s is damaged: starting empty", self.path)
        return superblock

    def _mismatch(self, former: Superblock) -> str | None:
        """Return why the blocks cannot be used, None if they can."""
        if former.namespace != self.superblock.namespace:
            return f"blocks of another model (namespace {former.namespace})"
        ours = self.superblock
        sizes = former.payload_bytes, former.hash_bytes, former.slot_bytes
        if sizes != (ours.payload_bytes, ours.hash_bytes, ours.slot_bytes):
            return f"blocks of {former.payload_bytes} bytes, not {ours.payload_bytes}"
        return None

    def _write_superblock(self, former: Superblock | None) -> None:
        superblock = self.superblock if former is None else replace(self.superblock, created=former.created)
        try:
            write_superblock(self.path / SUPERBLOCK, superblock)
        except OSError as error:
            if superblock != former or error.errno not in NO_ROOM:
                raise problem(f"cannot write {self.path / SUPERBLOCK}", error) from error

    def _load_index(self, slot_count: int) -> Recovered:
        """Load the valid rows: within the arena, of the right lengths, one per slot, and the newest per hash."""
        path = self.path / INDEX
        try:
            self.index = _open_index(path)
            found = self._drop_misfits(self.index.load(self.superblock.hash_bytes), slot_count)
            self.notes = self.index.load_notes(found)
            return found
        except sqlite3.Error as error:
            if not is_damage(error):
                raise _index_problem(f"cannot open {path}", error) from error
            logger.warning("the index %s is damaged (%s): starting with an empty disk cache", path, error)
        except OSError as error:
            raise problem(f"cannot open {path}", error) from error
        self.losses.damaged_indexes += 1
        try:
            return self.renew_index().load(self.superblock.hash_bytes)
        except sqlite3.Error as error:
            raise _index_problem(f"cannot create {path}", error) from error
        except OSError as error:
            raise problem(f"cannot create {path}", error) from error

    def _drop_misfits(self, found: Recovered, slot_count: int) -> Recovered:
        """Raise sqlite3.Error."""
        assert self.index is not None
        if len(np.unique(found.slots)) < len(found.slots):
            raise sqlite3.DatabaseError("two rows have one slot")
        fits = (found.slots >= 0) & (found.slots < slot_count) & (found.lengths == self.superblock.payload_bytes)
        fits &= (found.generations >= 0) & (found.generations <= MAX_GENERATION)
        misfits = [*found.misfits, *found.slots[~fits].tolist()]
        if misfits:
            logger.warning("dropped %d blocks of the disk cache %s that do not fit its arena", len(misfits), self.path)
            self.losses.dropped_rows += len(misfits)
            self.index.delete(misfits)
            found = found.at(np.flatnonzero(fits))
        if not (older := _older_of_a_hash(found)):
            return found
        self.index.delete(found.slots[older].tolist())
        return found.at(np.setdiff1d(np.arange(len(found.slots)), older))


def _described(arena: Arena, wanted: WantedInstance, former: Superblock | None = None) -> Superblock:
    """Return the superblock of an arena. With `fit`, `former` is what the arena was before, and a new one takes no more
    than is free, with `reclaim` after removing as many unused caches as it needs."""
    settings = wanted.settings
    slot_bytes = -(-wanted.payload_bytes // PAGE_BYTES) * PAGE_BYTES  # as direct I/O requires
    slot_count, capacity_bytes = settings.block_count, settings.capacity_bytes or 0
    if settings.fit and former is not None:
        capacity_bytes = former.slot_count * former.slot_bytes
    elif settings.fit and slot_count is None:
        while settings.reclaim and arena.spare_bytes() < capacity_bytes and reclaim_oldest(settings.directory):
            pass
        capacity_bytes = min(capacity_bytes, arena.spare_bytes())
        if capacity_bytes < slot_bytes:
            raise NoRoom(f"{settings.directory} has no space to spare for a cache", hint=FREE_HINT)
    if slot_count is None:
        slot_count = capacity_bytes // slot_bytes
    if slot_count < 1:
        raise EnvironmentProblem(
            f"a disk tier of {settings.capacity_bytes} bytes is smaller than one block ({slot_bytes} bytes)",
            hint="raise `tiers.disk.capacity`",
        )
    name, facts = wanted.namespace.digest.hex(), dict(wanted.namespace.facts)
    return Superblock(name, facts, wanted.hash_bytes, wanted.payload_bytes, slot_bytes, slot_count, time.time())


def _arena_bytes(superblock: Superblock) -> int:
    return superblock.slot_count * superblock.slot_bytes + PROBE_BYTES


def _older_of_a_hash(found: Recovered) -> list[int]:
    """Return the positions of rows whose hash also has a row of a later generation.

    Prefixes of the hashes are compared first: a set of millions of hashes would take too much memory.
    """
    positions = np.arange(len(found.hashes))
    if found.hashes.itemsize >= WORD_BYTES:
        bytes_of_hashes = found.hashes.view(np.uint8).reshape(-1, found.hashes.itemsize)
        words = np.ascontiguousarray(bytes_of_hashes[:, :WORD_BYTES]).view(np.uint64).ravel()
        in_order = np.sort(words)
        positions = np.flatnonzero(np.isin(words, in_order[1:][np.diff(in_order) == 0]))
    positions = positions[np.argsort(found.generations[positions], kind="stable")]
    newest: dict[bytes, int] = {}
    older: list[int] = []
    for position, sequence_hash in zip(positions.tolist(), found.hashes[positions].tolist(), strict=True):
        if sequence_hash in newest:
            older.append(newest[sequence_hash])
        newest[sequence_hash] = position
    return older


def _take_space(arena: Arena, superblock: Superblock, wanted: WantedInstance) -> None:
    """Allocate the arena, switch to direct I/O, and check it with one page that is written and read back."""
    settings = wanted.settings
    arena.resize(_arena_bytes(superblock), zerofill=settings.zerofill, progress=wanted.progress)
    try:
        if settings.o_direct:
            arena.use_direct_io(settings.allocator)
        else:
            arena.use_page_cache()
        prove_arena(arena, superblock, ThreadsIO(arena.fd, is_direct=arena.is_direct))
    except OSError as error:
        what = f"cannot write and read {arena.path}{' with O_DIRECT' if settings.o_direct else ''}"
        why = problem(what, error, hint="set `tiers.disk.o_direct: false`" if settings.o_direct else None)
        is_setting = settings.o_direct and error.errno in UNSUPPORTED
        raise (EnvironmentProblem(why.message, hint=why.hint) if is_setting else why) from error


def prove_arena(arena: Arena, superblock: Superblock, io: BlockIO) -> None:
    """Write a page behind the last slot, and read it back. Raises OSError."""
    pages = np.frombuffer(mmap.mmap(-1, 2 * PAGE_BYTES), np.uint8).reshape(2, PAGE_BYTES)
    pages[0] = np.frombuffer(secrets.token_bytes(PAGE_BYTES), np.uint8)
    offset = superblock.slot_count * superblock.slot_bytes
    io.write([IoRun(offset, [pages[0]])])
    arena.sync()
    io.read([IoRun(offset, [pages[1]])])
    if not np.array_equal(*pages):
        raise OSError(errno.EIO, "the bytes read differ from the bytes written")


def _open_index(path: Path) -> BlockIndex:
    """Raise sqlite3.Error or OSError."""
    os.close(open_private(path, os.O_RDWR | os.O_CREAT))
    return BlockIndex.open(path)


def _index_problem(what: str, error: sqlite3.Error) -> TierProblem:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code & PRIMARY_CODE == sqlite3.SQLITE_FULL:
        return NoRoom(f"{what}: {error}", hint=ROOM_HINT)
    return TierProblem(f"{what}: {error}")


def _remove(*paths: Path) -> None:
    """Raise EnvironmentProblem."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise problem(f"cannot remove {path}", error) from error
