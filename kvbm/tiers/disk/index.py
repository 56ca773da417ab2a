"""BlockIndex: maps slots of the arena to blocks, in one SQLite file next to it.

The index is authoritative: a slot without a row is free. A row is inserted only after the slot's bytes are durable, and
deleted before they change. Commits are not flushed individually, so a power cut may lose the latest ones. A lost
insertion is a miss; a lost deletion is a checksum miss. `clear` is flushed. Of two rows with one hash, the later
generation counts; a UNIQUE constraint on the hash would double the cost of a commit.

A block can have a note: bytes of its writer, which a restart returns with it. Their table exists only after the first
note was inserted. A note counts only with the generation of its block's row and with its own checksum. So a damaged
one, or one of an earlier block in the same slot, is lost. It costs no block.

Checksums cover the payload and are seeded with the namespace and the block's hash (`checksum`). So a row with a damaged
slot or hash does not match its bytes, nor do the files of another model: vLLM gives its blocks the same hashes. One
thread at a time uses an index. Failures raise sqlite3.Error.

SQLite must not map files: if the disk is full (btrfs) or fails, access to such a mapping kills the process with SIGBUS.
The index is therefore opened for a single connection, and readers of an index in use read a copy.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvbm.tiers.disk.files import open_private

ROWS_PER_STATEMENT = 256
ROWS_PER_FETCH = 500  # fewer than the allocations that trigger the garbage collector
BUSY_TIMEOUT_S = 5.0
SEED_BYTES = 8
MAX_NOTE_BYTES = 1 << 20
LOG = "-wal"
SIDE_FILES = (LOG, "-shm", "-journal")

FORMAT_BYTE = 18  # of the header: the version that is needed to write
WRITABLE_FORMATS = (1, 2)
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
NOTES_SCHEMA = """
CREATE TABLE notes (
    slot INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    note BLOB NOT NULL
)
"""


class IndexRow(NamedTuple):
    """One block. `checksum` is unsigned here, signed in SQLite; `written` is in seconds since 1970. No bytes: no
    note."""

    slot: int
    hash: bytes
    generation: int
    length: int
    checksum: int
    tenant: bytes
    written: float
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class Recovered:
    """All rows of an index, unordered. `misfits` are slots of rows with a wrong type, or a hash of another length.

    `written`: in seconds since 1970. `tenants` has those rows with one, by slot.
    """

    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    lengths: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    written: NDArray[np.int64]
    hashes: NDArray[np.void]
    tenants: dict[int, bytes]
    misfits: tuple[int, ...] = ()

    def at(self, positions: NDArray[np.intp]) -> Recovered:
        """Return these rows, in this order."""
        return Recovered(
            slots=self.slots[positions],
            generations=self.generations[positions],
            lengths=self.lengths[positions],
            checksums=self.checksums[positions],
            written=self.written[positions],
            hashes=self.hashes[positions],
            tenants=self.tenants,
        )


def checksum(namespace: bytes, sequence_hash: bytes, shards: Sequence[NDArray[np.uint8]]) -> int:
    """Return xxh3-64 of a block's payload, seeded with the first bytes of its namespace and of its hash."""
    seed = int.from_bytes(namespace[:SEED_BYTES], "little") ^ int.from_bytes(sequence_hash[:SEED_BYTES], "little")
    if len(shards) == 1:  # same value, without the cost of a state object
        return xxhash.xxh3_64_intdigest(shards[0].data, seed)
    state = xxhash.xxh3_64(seed=seed)
    for shard in shards:
        state.update(shard.data)
    return state.intdigest()


class _Connection(sqlite3.Connection):
    """Raises sqlite3.Error also if SQLite's message quotes damaged bytes, which Python's module cannot decode."""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*arguments)
        except UnicodeDecodeError as error:
            raise sqlite3.DatabaseError(f"damaged text: {error}") from error


class BlockIndex:
    """The index of one arena; see the module docstring."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._has_notes = bool(connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'notes'").fetchall())

    @classmethod
    def open(cls, path: Path) -> BlockIndex:
        """Open or initialize. The caller has created the file. Raises sqlite3.Error, OSError, and EnvironmentProblem if
        it is a link, or not private: SQLite follows links."""
        for file in index_files(path):
            if os.path.lexists(file):
                os.close(open_private(file, os.O_RDWR))
        _require_format(path)
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, factory=_Connection
        )
        try:
            _use_write_ahead_log(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(SCHEMA)
            _require_table(connection)
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def open_copy(cls, copy: Path) -> BlockIndex:
        """Open a copy of an index and its log. They can be deleted when it returns. Raises sqlite3.Error."""
        connection = sqlite3.connect(copy, isolation_level=None, factory=_Connection)
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("SELECT count(*) FROM blocks").fetchone()
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    def load(self, hash_bytes: int) -> Recovered:
        """Load all rows of one snapshot. Raises sqlite3.Error, also for a row whose slot is not a number."""
        cursor = self._connection.execute(
            "SELECT slot, generation, length, checksum, CAST(written AS INTEGER), CAST(tenant AS BLOB), hash "
            "FROM blocks"
        )
        parts = [np.empty((5, 0), np.int64)]
        hashes: list[bytes] = []
        tenants: dict[int, bytes] = {}
        misfits: list[int] = []
        while rows := cursor.fetchmany(ROWS_PER_FETCH):
            *columns, owners, found = zip(*rows, strict=True)
            if not _are_sound(columns, found, hash_bytes):
                sound = [row for row in rows if _are_sound([row[:-2]], [row[-1]], hash_bytes)]
                misfits += _slots_of(set(rows).difference(sound))
                if not sound:
                    continue
                *columns, owners, found = zip(*sound, strict=True)
            if any(owners):
                tenants |= {slot: owner for slot, owner in zip(columns[0], owners, strict=True) if owner}
            parts.append(np.array(columns, np.int64))
            hashes.append(b"".join(found))
        slots, generations, lengths, checksums, written = np.concatenate(parts, axis=1)
        names = np.frombuffer(b"".join(hashes), f"V{hash_bytes}")
        return Recovered(
            slots, generations, lengths, checksums.view(np.uint64), written, names, tenants, tuple(misfits)
        )

    def block_count(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM blocks").fetchone()[0])

    def last_written(self) -> float | None:
        """Return when the newest block was written."""
        row = self._connection.execute("SELECT max(written) FROM blocks WHERE typeof(written) = 'real'").fetchone()
        return None if row[0] is None else float(row[0])

    def slots_of(self, tenant: bytes) -> list[int]:
        """Return the slots with blocks of a tenant, in order."""
        found = self._connection.execute("SELECT slot FROM blocks WHERE tenant = ? ORDER BY slot", [tenant])
        return [slot for (slot,) in found]

    def load_notes(self, found: Recovered) -> dict[int, bytes]:
        """Return the sound notes of these blocks by slot. A damaged table is deleted. Raises sqlite3.Error."""
        if not self._has_notes:
            return {}
        names = zip(found.generations.tolist(), found.hashes.tolist(), strict=True)
        blocks = dict(zip(found.slots.tolist(), names, strict=True))
        try:
            rows = self._connection.execute("SELECT slot, generation, checksum, note FROM notes")
            return {slot: note for slot, *rest, note in rows if _is_sound_note(note, rest, blocks.get(slot))}
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self._connection.execute("DROP TABLE notes")
            self._has_notes = False
            return {}

    def change(self, inserted: Sequence[IndexRow], deleted: Sequence[int]) -> bool:
        """Insert rows and their notes, then delete slots, in one transaction. Return whether anything has changed.

        Raises sqlite3.Error; nothing has changed then.
        """
        notes = [
            (row.slot, row.generation, _note_checksum(row.hash, row.note), row.note) for row in inserted if row.note
        ]
        before, has_notes = self._connection.total_changes, self._has_notes or bool(notes)
        with _transaction(self._connection):
            if has_notes and not self._has_notes:
                self._connection.execute(NOTES_SCHEMA)
            self._insert("blocks", [row._replace(checksum=_signed(row.checksum))[:-1] for row in inserted])
            self._insert("notes", notes)
            for table in ("blocks", "notes") if has_notes else ("blocks",):
                self._delete(table, deleted)
        self._has_notes = has_notes
        return self._connection.total_changes != before

    def delete(self, slots: Sequence[int]) -> None:
        """Raise sqlite3.Error."""
        self.change((), slots)

    def clear(self, tenant: bytes | None) -> None:
        """Delete all blocks, or those of one tenant. Durable when it returns. Raises sqlite3.Error."""
        self._connection.execute("PRAGMA synchronous=FULL")
        try:
            with _transaction(self._connection):
                values = [] if tenant is None else [tenant]  # without WHERE, SQLite does not visit each row
                if self._has_notes:
                    where = "WHERE slot IN (SELECT slot FROM blocks WHERE tenant = ?)" if values else ""
                    self._connection.execute(f"DELETE FROM notes {where}", values)
                self._connection.execute(f"DELETE FROM blocks {'WHERE tenant = ?' if values else ''}", values)
                # A commit without changes writes nothing, and would not flush the earlier commits.
                self._connection.execute("PRAGMA user_version = 1")
        finally:
            self._connection.execute("PRAGMA synchronous=NORMAL")

    def prove(self) -> None:
        """Check that a commit works. Raises sqlite3.Error."""
        with _transaction(self._connection):
            self._connection.execute("PRAGMA user_version = 1")

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.close()

    def _insert(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows by one statement: each statement takes the GIL once."""
        for start in range(0, len(rows), ROWS_PER_STATEMENT):
            some = rows[start : start + ROWS_PER_STATEMENT]
            places = ",".join([f"({','.join('?' * len(some[0]))})"] * len(some))
            values = list(itertools.chain.from_iterable(some))
            self._connection.execute(f"INSERT OR REPLACE INTO {table} VALUES {places}", values)

    def _delete(self, table: str, slots: Sequence[int]) -> None:
        for start in range(0, len(slots), ROWS_PER_STATEMENT):
            some = slots[start : start + ROWS_PER_STATEMENT]
            self._connection.execute(f"DELETE FROM {table} WHERE slot IN ({','.join('?' * len(some))})", some)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction, which is rolled back on an exception."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error is caused by the file's content, not by the machine."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # errors raised here have no code
    return code & PRIMARY_CODE in DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ


def index_files(path: Path) -> list[Path]:
    """Return the paths of the index and of SQLite's side files."""
    return [path, *(path.with_name(path.name + side) for side in SIDE_FILES)]


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Use a write-ahead log whose index is in process memory: SQLite does that in exclusive locking mode."""
    connection.execute("PRAGMA mmap_size=0")
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"write-ahead log not available here, only journal mode {mode}")


def _require_format(path: Path) -> None:
    """Raise sqlite3.DatabaseError for a file that SQLite would open for reading only, because of its format."""
    with path.open("rb") as file:
        header = file.read(FORMAT_BYTE + 1)
    if len(header) > FORMAT_BYTE and header[FORMAT_BYTE] not in WRITABLE_FORMATS:
        raise sqlite3.DatabaseError(f"format {header[FORMAT_BYTE]} cannot be written")


def _require_table(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError for a view, whose rows may never end."""
    kinds = dict(connection.execute("SELECT name, type FROM sqlite_schema WHERE name IN ('blocks', 'notes')"))
    if kinds.get("blocks") != "table" or kinds.get("notes", "table") != "table":
        raise sqlite3.DatabaseError("`blocks` or `notes` is not a table")


def _are_sound(columns: Sequence[Sequence[object]], hashes: Sequence[Any], hash_bytes: int) -> bool:
    """Return whether all values have the type of their column, and all hashes their length."""
    if any(set(map(type, column)) != {int} for column in columns):
        return False
    return set(map(type, hashes)) == {bytes} and set(map(len, hashes)) == {hash_bytes}


def _is_sound_note(note: object, found: Sequence[object], block: tuple[int, bytes] | None) -> bool:
    """Return whether a note, with this generation and checksum, is whole and of this block (generation, hash)."""
    if block is None or type(note) is not bytes or len(note) > MAX_NOTE_BYTES:
        return False
    return list(found) == [block[0], _note_checksum(block[1], note)]


def _note_checksum(sequence_hash: bytes, note: bytes) -> int:
    """Return xxh3-64 of a note, seeded with the first bytes of its block's hash, as SQLite's signed integer."""
    return _signed(xxhash.xxh3_64_intdigest(note, int.from_bytes(sequence_hash[:SEED_BYTES], "little")))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _slots_of(rows: Iterable[Sequence[Any]]) -> list[int]:
    """Return the slots of unsound rows. Raises sqlite3.DatabaseError if one is not a number: the table is another."""
    slots = [row[0] for row in rows]
    if any(type(slot) is not int for slot in slots):
        raise sqlite3.DatabaseError("a row has no slot")
    return slots
