"""NoteTable: notes of blocks in the index, bytes of their writer that a restart returns with them.

The table exists only after the first note was inserted. A note counts only with the generation of its block's row and
with its own checksum, so a damaged one, or one of an earlier block in the same slot, is lost. It costs no block.

Called only by BlockIndex, in its transactions. Failures raise sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

ROWS_PER_STATEMENT = 256
SEED_BYTES = 8
MAX_NOTE_BYTES = 1 << 20
SCHEMA = """
CREATE TABLE notes (
    slot INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    note BLOB NOT NULL
)
"""


class Note(NamedTuple):
    """The note of the block with this row in the index."""

    slot: int
    generation: int
    sequence_hash: bytes
    content: bytes


class NoteTable:
    """See the module's text. `exists`: whether there is a table; without one, nothing is executed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.exists = bool(connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'notes'").fetchall())

    def insert(self, notes: Sequence[Note]) -> None:
        """Insert notes. The caller sets `exists` when its transaction has been committed."""
        if notes and not self.exists:
            self._connection.execute(SCHEMA)
        for start in range(0, len(notes), ROWS_PER_STATEMENT):
            some = notes[start : start + ROWS_PER_STATEMENT]
            values: list[Any] = []
            for note in some:
                values += (note.slot, note.generation, _checksum(note.sequence_hash, note.content), note.content)
            places = ",".join(["(?,?,?,?)"] * len(some))
            self._connection.execute(f"INSERT OR REPLACE INTO notes VALUES {places}", values)

    def clear(self, tenant: bytes | None) -> None:
        """Delete all notes, or those of one tenant. Call it before the rows of the blocks are deleted."""
        if tenant is None:
            self._connection.execute("DELETE FROM notes")
        else:
            blocks = "SELECT slot FROM blocks WHERE tenant = ?"
            self._connection.execute(f"DELETE FROM notes WHERE slot IN ({blocks})", [tenant])

    def drop(self) -> None:
        self._connection.execute("DROP TABLE notes")
        self.exists = False

    def load(self, blocks: Mapping[int, tuple[int, bytes]]) -> dict[int, bytes]:
        """Return the sound notes by slot. `blocks`: generation and hash of each slot."""
        return dict(_sound(self._connection.execute("SELECT slot, generation, checksum, note FROM notes"), blocks))


def _sound(rows: Iterable[Sequence[Any]], blocks: Mapping[int, tuple[int, bytes]]) -> Iterable[tuple[int, bytes]]:
    for slot, generation, checksum, content in rows:
        block = blocks.get(slot)
        is_whole = type(content) is bytes and len(content) <= MAX_NOTE_BYTES
        if is_whole and block is not None and block[0] == generation and checksum == _checksum(block[1], content):
            yield slot, content


def _checksum(sequence_hash: bytes, content: bytes) -> int:
    """Return xxh3-64 of a note, seeded with the first bytes of its block's hash, as SQLite's signed integer."""
    return signed(xxhash.xxh3_64_intdigest(content, int.from_bytes(sequence_hash[:SEED_BYTES], "little")))


def delete_slots(connection: sqlite3.Connection, table: str, slots: Sequence[int]) -> None:
    for start in range(0, len(slots), ROWS_PER_STATEMENT):
        some = slots[start : start + ROWS_PER_STATEMENT]
        connection.execute(f"DELETE FROM {table} WHERE slot IN ({','.join('?' * len(some))})", some)


def signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
