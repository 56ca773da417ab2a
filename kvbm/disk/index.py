"""BlockIndex: which block lies in which slot of the arena, in one SQLite file beside it.

The index is the truth about the arena: a slot without a row is free. A row is inserted only after the slot's bytes are
safe on the disk, and deleted before they change. Commits are not flushed one by one: a power cut may lose the last of
them, which costs a miss where a row is lost, and a miss by the checksum where a deletion is. `clear` is flushed. Of two
rows with one hash, the later generation counts; that SQLite keeps them apart would double what a commit costs.

Checksums cover the payload and are seeded with the block's hash (`checksum`), so that a row whose slot or whose hash
was damaged does not fit its bytes either. One thread at a time uses an index; sqlite3.Error tells what went wrong.

SQLite is kept from mapping files: where a disk is full (btrfs) or fails, a page of such a mapping ends the process with
SIGBUS. So the index is opened for one connection alone, and who wants to look at one that is in use reads a copy.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

ROWS_PER_STATEMENT = 256
ROWS_PER_FETCH = 500  # fewer than the garbage collector looks at together
BUSY_TIMEOUT_S = 5.0
SEED_BYTES = 8
COPY_ATTEMPTS = 10
LOG = "-wal"
SIDE_FILES = (LOG, "-shm", "-journal")

PRIMARY_CODE = 0xFF
DAMAGE = {
    sqlite3.SQLITE_ERROR,  # other tables or columns
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_INTERNAL,
}

SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    slot INTEGER PRIMARY KEY,
    hash BLOB NOT NULL,
    generation INTEGER NOT NULL,
    length INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    tenant BLOB NOT NULL,
    written REAL NOT NULL
)
"""


class IndexRow(NamedTuple):
    """One block. `checksum` is unsigned here and signed in SQLite; `written` is in seconds since 1970."""

    slot: int
    hash: bytes
    generation: int
    length: int
    checksum: int
    tenant: bytes
    written: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """All rows of an index, in no order; of those whose hash has another length only the slots, in `misfits`."""

    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    lengths: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    hashes: NDArray[np.void]
    misfits: tuple[int, ...] = ()

    def at(self, positions: NDArray[np.intp]) -> Recovered:
        """These rows, in this order."""
        return Recovered(
            slots=self.slots[positions],
            generations=self.generations[positions],
            lengths=self.lengths[positions],
            checksums=self.checksums[positions],
            hashes=self.hashes[positions],
        )


def checksum(sequence_hash: bytes, shards: Sequence[NDArray[np.uint8]]) -> int:
    """xxh3-64 of a block's payload, seeded with the first bytes of its hash."""
    seed = int.from_bytes(sequence_hash[:SEED_BYTES], "little")
    if len(shards) == 1:  # the same number, for less than keeping a state costs
        return xxhash.xxh3_64_intdigest(shards[0].data, seed)
    state = xxhash.xxh3_64(seed=seed)
    for shard in shards:
        state.update(shard.data)
    return state.intdigest()


class BlockIndex:
    """See the module's text."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> BlockIndex:
        """Open or create; the file itself is made by the caller, private. Raises sqlite3.Error."""
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _use_write_ahead_log(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(SCHEMA)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    @classmethod
    def open_to_read(cls, path: Path) -> BlockIndex:
        """As it is now, for `kvbm cache`, also while an engine has it open. Raises sqlite3.Error."""
        for attempt in range(COPY_ATTEMPTS):
            with TemporaryDirectory(prefix="kvbm-index-") as directory:
                copy = Path(directory) / path.name
                try:
                    is_still = _copy_at_rest(path, copy)
                    if not is_still and attempt < COPY_ATTEMPTS - 1:
                        continue
                    return cls._open_copy(copy)
                except OSError as error:
                    raise sqlite3.OperationalError(f"{path} cannot be read: {error}") from error
        raise AssertionError("the last attempt returns")

    @classmethod
    def _open_copy(cls, copy: Path) -> BlockIndex:
        """Read once, it needs its names no more."""
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("SELECT count(*) FROM blocks").fetchone()
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def load(self, hash_bytes: int) -> Recovered:
        """Everything, as of one moment. Raises sqlite3.Error, also where SQLite finds a type that cannot be."""
        cursor = self._connection.execute("SELECT slot, generation, length, checksum, hash FROM blocks")
        parts = [np.empty((4, 0), np.int64)]
        hashes: list[bytes] = []
        misfits: list[int] = []
        try:
            while rows := cursor.fetchmany(ROWS_PER_FETCH):
                *columns, found = zip(*rows, strict=True)
                numbers = np.array(columns, np.int64)
                if set(map(type, found)) != {bytes}:
                    raise sqlite3.DatabaseError("a hash that is none")
                if set(map(len, found)) != {hash_bytes}:
                    fits = np.array([len(sequence_hash) == hash_bytes for sequence_hash in found])
                    misfits += numbers[0, ~fits].tolist()
                    numbers, found = numbers[:, fits], tuple(itertools.compress(found, fits))
                parts.append(numbers)
                hashes.append(b"".join(found))
        except (TypeError, ValueError, OverflowError) as error:
            raise sqlite3.DatabaseError(f"a row of a type that no index holds: {error}") from error
        slots, generations, lengths, checksums = np.concatenate(parts, axis=1)
        names = np.frombuffer(b"".join(hashes), f"V{hash_bytes}")
        return Recovered(slots, generations, lengths, checksums.view(np.uint64), names, tuple(misfits))

    def block_count(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM blocks").fetchone()[0])

    def last_written(self) -> float | None:
        """When the newest block was written."""
        row = self._connection.execute("SELECT max(written) FROM blocks").fetchone()
        return None if row[0] is None else float(row[0])

    def rows(self) -> Iterable[IndexRow]:
        """Every row, in the order of slots."""
        for row in self._connection.execute("SELECT * FROM blocks ORDER BY slot"):
            found = IndexRow(*row)
            yield found._replace(checksum=_unsigned(found.checksum))

    def change(self, inserted: Sequence[IndexRow], deleted: Sequence[int]) -> bool:
        """Insert, then delete slots, in one transaction. Returns whether there was anything to write.

        Raises sqlite3.Error, and then nothing has changed.
        """
        before = self._connection.total_changes
        with _Transaction(self._connection):
            for start in range(0, len(inserted), ROWS_PER_STATEMENT):
                self._insert(inserted[start : start + ROWS_PER_STATEMENT])
            self._delete(deleted)
        return self._connection.total_changes != before

    def delete(self, slots: Sequence[int]) -> None:
        """Raises sqlite3.Error."""
        self.change((), slots)

    def clear(self, tenant: bytes | None) -> None:
        """Forget all blocks, or one tenant's. On the disk when it returns. Raises sqlite3.Error."""
        self._connection.execute("PRAGMA synchronous=FULL")
        try:
            with _Transaction(self._connection):
                if tenant is None:
                    self._connection.execute("DELETE FROM blocks")  # without a condition SQLite does not walk the rows
                else:
                    self._connection.execute("DELETE FROM blocks WHERE tenant = ?", [tenant])
                # A commit that changes nothing writes nothing, and would leave earlier ones without a flush.
                self._connection.execute("PRAGMA user_version = 1")
        finally:
            self._connection.execute("PRAGMA synchronous=NORMAL")

    def prove(self) -> None:
        """Commit something. Raises sqlite3.Error."""
        with _Transaction(self._connection):
            self._connection.execute("PRAGMA user_version = 1")

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.close()

    def _insert(self, rows: Sequence[IndexRow]) -> None:
        """One statement for many rows: each costs the interpreter's lock once."""
        values: list[Any] = list(itertools.chain.from_iterable(rows))
        checksums = slice(IndexRow._fields.index("checksum"), None, len(IndexRow._fields))
        values[checksums] = map(_signed, values[checksums])
        places = ",".join(["(?,?,?,?,?,?,?)"] * len(rows))
        self._connection.execute(f"INSERT OR REPLACE INTO blocks VALUES {places}", values)

    def _delete(self, slots: Sequence[int]) -> None:
        for start in range(0, len(slots), ROWS_PER_STATEMENT):
            some = slots[start : start + ROWS_PER_STATEMENT]
            self._connection.execute(f"DELETE FROM blocks WHERE slot IN ({','.join('?' * len(some))})", some)


class _Transaction:
    """All of it or nothing."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error speaks of what is in the file, and not of the machine around it."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # ours have none
    return code & PRIMARY_CODE in DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ


def index_files(path: Path) -> list[Path]:
    """The index and what SQLite puts beside it."""
    return [path, *(path.with_name(path.name + side) for side in SIDE_FILES)]


def remove_index(path: Path) -> None:
    """Raises OSError."""
    for file in index_files(path):
        with suppress(FileNotFoundError):
            os.unlink(file)


def _copy_at_rest(path: Path, copy: Path) -> bool:
    """Copy a database and its log. False if it changed meanwhile other than by its log's growing. Raises OSError."""
    before = os.stat(path)
    shutil.copyfile(path, copy)
    with suppress(FileNotFoundError):
        shutil.copyfile(f"{path}{LOG}", f"{copy}{LOG}")
    after = os.stat(path)
    return (before.st_ino, before.st_mtime_ns, before.st_size) == (after.st_ino, after.st_mtime_ns, after.st_size)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """With its index in memory of this process, which SQLite does where nobody else may open the file."""
    connection.execute("PRAGMA mmap_size=0")
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"no write-ahead log here, only a journal of mode {mode}")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _unsigned(number: int) -> int:
    return number + (1 << 64) if number < 0 else number
