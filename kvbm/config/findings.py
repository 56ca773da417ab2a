"""Mistakes of a profile while its layers are read: in their order, without what only follows from another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvbm.config.document import Document, Entry, Mistake, Source
from kvbm.errors import ProfileError


@dataclass(slots=True)
class Findings:
    """What was found while layers were read. `labels` are the files in the order in which mistakes are told."""

    mistakes: list[ProfileError] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    own: set[str] = field(default_factory=set)  # those of them that are no shipped profile
    wrong: set[str] = field(default_factory=set)  # keys that were taken away, and what unknown ones stood for
    extends: list[Source] = field(default_factory=list)
    is_incomplete: bool = False  # a file could not be read, and what is missing may be in it

    def add(self, found: Iterable[Mistake]) -> list[Mistake]:
        """Adds and returns those that do not follow from earlier ones."""
        new = [one for one in found if not self._is_consequence(one)]
        self.mistakes += new
        self.wrong |= {key for one in new for key in (one.key, one.meant) if key}
        return new

    def _is_consequence(self, mistake: Mistake) -> bool:
        """A section is said to lack what was taken away from it, and what a key needs may have been taken away."""
        return any(is_within(mistake.key, key) or is_within(key, mistake.key) for key in self.wrong)

    def in_order(self) -> tuple[ProfileError, ...]:
        """Those of files by file and line; then variables and the command line, which have no lines."""
        return tuple(sorted({one.message: one for one in self.mistakes}.values(), key=self._place))

    def _place(self, mistake: ProfileError) -> tuple[int, float, int]:
        file = mistake.file if isinstance(mistake, Mistake) else ""
        rank = self.labels.index(file) if file in self.labels else len(self.labels)
        source = mistake.source if isinstance(mistake, Mistake) else None
        line = source.line if source is not None else None
        return rank, float("inf") if line is None else line, source.column if source is not None and line else 0


def is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def take_away(document: Document, mistakes: Sequence[Mistake]) -> bool:
    """Removes what mistakes are about from the document; whether there was anything to remove."""
    removed = [_remove(document, mistake.key.split(".")) for mistake in mistakes]
    return any(removed)


def _remove(document: Document, names: Sequence[str]) -> bool:
    """Removes the entry at `names`, or the one above it that is no section. A name may have dots in it."""
    for depth in range(len(names), 0, -1):
        name, below = ".".join(names[:depth]), names[depth:]
        entry = document.get(name)
        if entry is None:
            continue
        if below and entry.section is not None:
            inside = dict(entry.section)
            is_removed = _remove(inside, below)
            document[name] = Entry(entry.key, entry.source, inside)
            return is_removed
        del document[name]
        return True
    return False
