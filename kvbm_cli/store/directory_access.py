"""DirectoryAccess: a directory as a store, for people's commands. It never follows a link or enters another mount.

Engines of several users may share a store, and the permissions of a directory decide who may delete in it. So an object
is a regular file of any owner. Deleting removes its name here and nothing
else: a hard link's other names keep their content.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvbm.host.tree import NOT_ENTERED, Tree, kind_of
from kvbm.tiers.shared.stores.directory import write_file
from kvbm_cli.store.access import FoundObject, LeftOut, NoteLeftOut

LEVELS = 2  # of directories below a namespace that have objects, counting its own
BEING_WRITTEN = re.compile(r".*#[0-9]+", re.DOTALL)
READ_BYTES = 8 << 20
WHY_NOT_ENTERED = {
    errno.ELOOP: "a link, which kvbm does not follow",
    errno.ENOTDIR: "not a directory",
    errno.EXDEV: "on another file system",
}


class DirectoryAccess:
    def __init__(self, root: Path) -> None:
        self._root = root

    def directories(self, prefix: str, note: NoteLeftOut) -> list[str]:
        found = []
        for name, about in self._entries(prefix, note):
            if _is_directory(about):
                found.append(name)
            elif (why := _oddity(about)) is not None:
                note(LeftOut(f"{prefix}/{name}", why))
        return found

    def objects(self, prefix: str, note: NoteLeftOut) -> Iterator[list[FoundObject]]:
        yield from self._objects(prefix, note, LEVELS)

    def about(self, key: str) -> FoundObject:
        with Tree.open(self._root) as root:
            about = root.about(key)
        return FoundObject(key, about.st_size, about.st_mtime)

    def read(self, key: str, byte_count: int | None = None) -> bytes:
        with Tree.open(self._root) as root:
            descriptor = root.open_file(key)
        with open(descriptor, "rb", buffering=0) as file:
            left = os.fstat(descriptor).st_size if byte_count is None else byte_count
            parts = []
            while left and (part := file.read(min(left, READ_BYTES))):
                parts.append(part)
                left -= len(part)
        return b"".join(parts)

    def write(self, key: str, content: bytes) -> None:
        with Tree.open(self._root) as root:
            root.make_directories(key.rpartition("/")[0])
            write_file(root, key, [content], creates=False)

    def delete(self, keys: Sequence[str], note: NoteLeftOut) -> list[str]:
        remaining = []
        with Tree.open(self._root) as root:
            for key in keys:
                try:
                    root.unlink_file(key)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    note(LeftOut(key, _why(error), is_failure=True))
                    remaining.append(key)
        return remaining

    def remove_empty(self, prefix: str) -> None:
        """Remove the empty directories below a prefix, and its own."""
        names = self.directories(prefix, lambda left_out: None)
        with Tree.open(self._root) as root:
            for name in [*(f"{prefix}/{each}" for each in names), prefix]:
                try:
                    root.remove_directory(name)
                except OSError:  # not empty
                    continue

    def _objects(self, prefix: str, note: NoteLeftOut, levels: int) -> Iterator[list[FoundObject]]:
        found, inner = [], []
        for name, about in self._entries(prefix, note):
            key = f"{prefix}/{name}"
            if _is_directory(about):
                inner.append(key)
            elif (why := _oddity(about)) is not None:
                note(LeftOut(key, why))
            elif not BEING_WRITTEN.fullmatch(name):
                found.append(FoundObject(key, about.st_size, about.st_mtime))
        if found:
            yield found
        for directory in inner if levels > 1 else ():
            yield from self._objects(directory, note, levels - 1)

    def _entries(self, prefix: str, note: NoteLeftOut) -> list[tuple[str, os.stat_result]]:
        """Return the names in a directory, none if it is not there or cannot be entered. Raises OSError for a root that
        cannot be used."""
        with Tree.open(self._root) as root:
            try:
                with root.directory(prefix) as directory, directory.scan() as entries:
                    return sorted(_with_facts(entries), key=lambda entry: entry[0])
            except FileNotFoundError:
                return []
            except OSError as error:
                note(LeftOut(prefix, _why(error), is_failure=error.errno not in NOT_ENTERED))
                return []


def _with_facts(entries: Iterator[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
    for entry in entries:
        with suppress(FileNotFoundError):  # deleted meanwhile
            yield entry.name, entry.stat(follow_symlinks=False)


def _is_directory(about: os.stat_result) -> bool:
    return kind_of(about.st_mode) == "a directory"


def _oddity(about: os.stat_result) -> str | None:
    """Return what is neither a directory nor a regular file, None for one of these."""
    kind = kind_of(about.st_mode)
    if kind in ("a directory", "a file"):
        return None
    return WHY_NOT_ENTERED[errno.ELOOP] if kind == "a link" else f"{kind}, not a file"


def _why(error: OSError) -> str:
    return WHY_NOT_ENTERED.get(error.errno or 0) or (error.strerror or str(error)).lower()
