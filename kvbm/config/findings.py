"""Findings: collects the mistakes of a profile in order, without those that only follow from other mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvbm.config.document import Document, Entry, Mistake, Source
from kvbm.errors import ProfileError


@dataclass(slots=True)
class Findings:
    """Mistakes of all layers. `given` are the profiles of the command line; `labels` are the files, in the order in
    which their mistakes are reported."""

    given: tuple[str, ...] = ()
    mistakes: list[ProfileError] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    own: set[str] = field(default_factory=set)  # the files that are not shipped profiles
    wrong: set[str] = field(default_factory=set)  # removed keys, and the keys meant by unknown ones
    around: set[str] = field(default_factory=set)  # `wrong`, and the sections of these keys
    extends: list[Source] = field(default_factory=list)
    is_incomplete: bool = False  # a file could not be read; missing keys may be in it

    def add(self, found: Iterable[Mistake]) -> list[Mistake]:
        """Add the mistakes that are not consequences of earlier ones, and return them."""
        new = [one for one in found if not self._is_consequence(one)]
        self.mistakes += new
        wrong = {key for one in new for key in (one.key, one.meant) if key}
        self.wrong |= wrong
        self.around.update(*map(_with_sections, wrong))
        return new

    def _is_consequence(self, mistake: Mistake) -> bool:
        """Return whether the mistake only follows from the removal of a wrong key."""
        return mistake.key in self.around or not self.wrong.isdisjoint(_with_sections(mistake.key))

    def in_order(self) -> tuple[ProfileError, ...]:
        """Return all mistakes: those in files by file and line, then those in variables and on the command line."""
        return tuple(sorted({one.message: one for one in self.mistakes}.values(), key=self._place))

    def _place(self, mistake: ProfileError) -> tuple[int, float, int]:
        file = mistake.file if isinstance(mistake, Mistake) else ""
        rank = self.labels.index(file) if file in self.labels else len(self.labels)
        source = mistake.source if isinstance(mistake, Mistake) else None
        line = source.line if source is not None else None
        return rank, float("inf") if line is None else line, source.column if source is not None and line else 0


def _with_sections(key: str) -> list[str]:
    """Return the key and the sections that it is in."""
    return [key, *(key[:at] for at, character in enumerate(key[:1000]) if character == ".")]


def is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def remove_mistaken(document: Document, mistakes: Sequence[Mistake]) -> bool:
    """Remove the entries of the mistakes from the document. Returns whether anything was removed."""
    removed = [remove(document, mistake.key.split(".")) for mistake in mistakes]
    return any(removed)


def remove(document: Document, names: Sequence[str]) -> bool:
    """Remove the entry at `names`, or a parent that is not a section. A name may contain dots. Returns whether there
    was one."""
    for depth in range(len(names), 0, -1):
        name, below = ".".join(names[:depth]), names[depth:]
        entry = document.get(name)
        if entry is None:
            continue
        if below and entry.section is not None:
            inside = dict(entry.section)
            is_removed = remove(inside, below)
            document[name] = Entry(entry.key, entry.source, inside)
            return is_removed
        del document[name]
        return True
    return False
