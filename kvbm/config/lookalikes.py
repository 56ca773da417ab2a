"""Characters that look like a space, a quote or nothing, and that YAML reads as part of a text.

They come from web pages, chats and word processors. In a key or in a value without quotes they are mistakes: the text
would mean something else than it shows. Text that needs them is written in quotes; a `description` may contain them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

SPACES = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
UNSEEN = "\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"
BREAKS = "\x85\u2028\u2029"
QUOTES = "\u2018-\u201f\u00ab\u00bb\uff02\uff07"

_SPACE = re.compile(f"[{SPACES}]")
_HIDDEN = re.compile(f"[{SPACES}{UNSEEN}]")
_QUOTE = re.compile(f"[{QUOTES}]")
_BREAK = re.compile(f"[{BREAKS}]")
_AT_END = re.compile(f"^\\s*[{QUOTES}]|[{QUOTES}]\\s*$")
# What a line may contain anywhere: quoted text, a comment, and the text of a description.
_FREE = re.compile(r"""(?<!\\)\"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|(?<!\S)\#.*|^[ \t]*description:.*""", re.MULTILINE)
_END_OF_VALUE = re.compile(f"(?<=[:,[{{-] )[{QUOTES}]|[{QUOTES}](?=\\s*(?:[],}}]|$))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Lookalike:
    """One character of a text, at `index`."""

    index: int
    character: str

    @property
    def message(self) -> str:
        name = unicodedata.name(self.character, "next line").lower()
        shown = f"{name} (U+{ord(self.character):04X})"
        if _BREAK.match(self.character):
            return f"a line break that editors do not show: {shown}"
        if _QUOTE.match(self.character):
            return f"a {shown}, which YAML does not read as a quote"
        if _SPACE.match(self.character):
            return f"{'an' if name[0] in 'aeiou' else 'a'} {shown}, which YAML does not read as a space"
        return f"an invisible character: {shown}"

    @property
    def hint(self) -> str:
        if _QUOTE.match(self.character):
            return 'remove it, or write `"`'
        if _BREAK.match(self.character):
            return "remove it, or end the line there"
        if _SPACE.match(self.character):
            return "replace it with a space; text that needs it must be in quotes"
        return "remove it; text that needs it must be in quotes"


def line_breaks(text: str) -> list[Lookalike]:
    """Return the characters at which YAML ends a line and an editor does not."""
    return [Lookalike(found.start(), found[0]) for found in _BREAK.finditer(text)]


def in_scalar(text: str, start: int, end: int, *, is_free: bool) -> Iterator[Lookalike]:
    """Yield those of the unquoted key or value `text[start:end]`. Free text may have quotes and hidden characters."""
    if is_free:
        return
    written = text[start:end]
    for found in (*_HIDDEN.finditer(written), *_AT_END.finditer(written)):
        quote = found[0].strip() if _QUOTE.search(found[0]) else found[0]
        yield Lookalike(start + found.start() + found[0].index(quote), quote)


def anywhere(text: str) -> list[Lookalike]:
    """Return those that can be the reason why a text is not valid YAML."""
    bare = _FREE.sub(lambda found: " " * len(found[0]), text)
    found = (*_HIDDEN.finditer(bare), *_END_OF_VALUE.finditer(bare))
    return sorted((Lookalike(one.start(), one[0]) for one in found), key=lambda one: one.index)


def without(text: str, found: list[Lookalike], *, quote: str = "") -> str:
    """Return the text with a space for each character like a space, `quote` for each quote, and without the others."""
    kept, start = [], 0
    for one in sorted(found, key=lambda one: one.index):
        is_space = _SPACE.match(one.character) or _BREAK.match(one.character)
        replacement = " " if is_space else quote if _QUOTE.match(one.character) else ""
        kept += [text[start : one.index], replacement]
        start = one.index + 1
    return "".join([*kept, text[start:]])


def with_dots(text: str) -> str:
    """Return the text with a dot for each hidden character, as many characters as before."""
    return _HIDDEN.sub("·", _BREAK.sub("·", text))
