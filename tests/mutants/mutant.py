"""A planted bug: a text of one file, what replaces it, and the tests that must fail then."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`old` occurs exactly once in `file`, a path from the repository's root. `fails` are arguments of pytest."""

    name: str
    bug: str
    file: str
    old: str
    new: str
    fails: str

    def applied_to(self, text: str) -> str:
        """Return `text`, the contents of `file`, with the bug. Raises ValueError unless `old` is there exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"the old text occurs {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)
