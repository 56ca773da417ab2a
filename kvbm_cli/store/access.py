"""StoreAccess: how people's commands list, read, write and delete in a store. An engine uses an ObjectStore.

A store may hold anything. A user who may write to it can plant links, special files and names that are not text. What a
command leaves out is a LeftOut, and the rest is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FoundObject:
    """`written_s` is in seconds since 1970, by the clock of the store."""

    key: str
    byte_count: int
    written_s: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A name in a store that a command does not touch. `is_failure`: objects may be behind it, or it should have been
    deleted. A key may hold any bytes (`os.fsdecode`)."""

    key: str
    why: str
    is_failure: bool = False


NoteLeftOut = Callable[[LeftOut], None]


class StoreAccess(Protocol):
    """Calls raise OSError with a message of one line; FileNotFoundError if the object is not there."""

    def directories(self, prefix: str, note: NoteLeftOut) -> list[str]:
        """Return the names of the directories below a prefix that have no slash in them."""
        ...

    def objects(self, prefix: str, note: NoteLeftOut) -> Iterator[list[FoundObject]]:
        """Yield the objects below a prefix."""
        ...

    def about(self, key: str) -> FoundObject: ...

    def read(self, key: str, byte_count: int | None = None) -> bytes:
        """Return the whole object or its first bytes."""
        ...

    def write(self, key: str, content: bytes) -> None: ...

    def delete(self, keys: Sequence[str], note: NoteLeftOut) -> list[str]:
        """Delete objects; one that is missing is ignored. Return the keys that remain, after a note for each."""
        ...
