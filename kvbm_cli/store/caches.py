"""The caches in a directory of the disk tier, as commands see them: read-only, also while an engine uses one."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm.tiers.disk.directory import (
    INDEX,
    LEVELS,
    LOCK,
    NAMESPACE_NAME,
    SUPERBLOCK,
    Skipped,
    arena_bytes,
    instances,
    instances_of,
    is_locked,
    is_of_user,
    last_used,
)
from kvbm.tiers.disk.files import open_private, open_private_directory, private_file
from kvbm.tiers.disk.index import LOG, BlockIndex
from kvbm.tiers.disk.superblock import OtherFormat, Superblock, read_superblock

COPY_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """One instance on disk. A field is None if it cannot be read; `problem` says why.

    `is_locked`: an engine uses it. `last_used`: last opening, closing or (within 30 s) transfer, in seconds since 1970.
    """

    path: Path
    namespace: str
    is_locked: bool
    last_used: float | None
    arena_bytes: int
    superblock: Superblock | None
    block_count: int | None
    last_written: float | None
    problem: str | None

    @property
    def facts(self) -> Mapping[str, object]:
        return {} if self.superblock is None else self.superblock.facts

    @property
    def model(self) -> str | None:
        model = self.facts.get("model")
        return None if model is None else str(model)

    @property
    def byte_count(self) -> int | None:
        """Bytes of its blocks, None if unknown."""
        if self.superblock is None or self.block_count is None:
            return None
        return self.block_count * self.superblock.payload_bytes


def list_caches(directory: Path, skipped: list[Skipped] | None = None) -> list[CacheFacts]:
    """Return all instances, most recently used first, and append to `skipped`. Read-only."""
    skipped = [] if skipped is None else skipped
    return [_facts_of(instance) for instance in reversed(instances(directory, skipped))]


def why_not_own(instance: Path) -> Skipped | None:
    """Return why a cache must not be changed by this user, None if its directories and its lock are private."""
    try:
        with open_private_directory(instance, levels=LEVELS) as directory, suppress(FileNotFoundError):
            os.close(private_file(directory.open_file(LOCK, os.O_RDONLY), instance / LOCK))
    except EnvironmentProblem as error:
        remedy = "" if error.hint is None else f" ({error.hint})"
        return Skipped(instance, f"{error.message}{remedy}", is_failure=is_of_user(instance / LOCK))
    except OSError as error:
        return Skipped(instance, reason_of(error), is_failure=is_of_user(instance))
    return None


def directory_around(place: Path) -> Path | None:
    """Return the disk directory that contains `place`, an instance or a namespace; None if `place` is neither."""
    place = Path(os.path.abspath(place))
    for directory, inside in ((place.parent.parent, [place]), (place.parent, instances_of(place))):
        name = inside[0].parent.name if inside else ""
        if NAMESPACE_NAME.fullmatch(name) and any((instance / LOCK).is_file() for instance in inside):
            return directory
    return None


def _facts_of(instance: Path) -> CacheFacts:
    superblock, why = None, None
    try:
        superblock = read_superblock(instance / SUPERBLOCK)
        why = "superblock missing or damaged" if superblock is None else None
    except OtherFormat as error:
        why = f"unsupported format: {error.message}"
    except EnvironmentProblem as error:
        why = error.message
    block_count = last_written = None
    if superblock is not None:
        try:
            with closing(index_to_read(instance / INDEX)) as index:
                block_count, last_written = index.block_count(), index.last_written()
        except sqlite3.Error as error:
            why = f"cannot read its index: {error}"
    return CacheFacts(
        path=instance,
        namespace=instance.parent.name,
        is_locked=is_locked(instance),
        last_used=last_used(instance),
        arena_bytes=arena_bytes(instance),
        superblock=superblock,
        block_count=block_count,
        last_written=last_written,
        problem=why,
    )


def index_to_read(path: Path) -> BlockIndex:
    """Open a copy of the current state of an index, also while an engine has it open. Raises sqlite3.Error."""
    for attempt in range(COPY_ATTEMPTS):
        with TemporaryDirectory(prefix="kvbm-index-") as directory:
            copy = Path(directory) / path.name
            try:
                is_still = _copy_at_rest(path, copy)
                if not is_still and attempt < COPY_ATTEMPTS - 1:
                    continue
                return BlockIndex.open_copy(copy)
            except (OSError, EnvironmentProblem) as error:
                raise sqlite3.OperationalError(f"cannot read {path}: {error}") from error
    raise AssertionError("the last attempt returns")


def _copy_at_rest(path: Path, copy: Path) -> bool:
    """Copy a database and its log. Return False if the database changed meanwhile; the log may grow. Raises OSError or
    EnvironmentProblem."""
    before = os.lstat(path)
    _copy_private(path, copy)
    with suppress(FileNotFoundError):
        _copy_private(path.with_name(path.name + LOG), copy.with_name(copy.name + LOG))
    after = os.lstat(path)
    return (before.st_ino, before.st_mtime_ns, before.st_size) == (after.st_ino, after.st_mtime_ns, after.st_size)


def _copy_private(path: Path, copy: Path) -> None:
    """May raise OSError or EnvironmentProblem."""
    with open(open_private(path, os.O_RDONLY), "rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target)
