"""Interpolation of environment variables: `${NAME}` in the keys of `schema.INTERPOLATED`.

    ${NAME}             value of the variable; a mistake if it is not set
    ${NAME:-default}    the text after `:-` if the variable is not set or empty; it contains no `$`, `{` or `}`
    $$                  one dollar sign: `$${NAME}` is the text `${NAME}`

Variables cannot be nested, and the value of a variable is inserted as it is, also if it contains `${`. In these keys
`$NAME` is a mistake too, because it would not be replaced, unlike in a shell. In all other keys `${` is a mistake,
because no variable is replaced there; `$` is literal and `$${` is the text `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvbm.config.document import Document, Entry, Mistake, Source
from kvbm.config.schema import INTERPOLATED

_PIECES = re.compile(
    r"(?P<escaped>\$\$)"
    r"|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^${}]*))?\}"
    r"|(?P<broken>\$\{.*)"  # to the end: nothing after it is certain
    r"|(?P<bare>\$[A-Za-z_][A-Za-z0-9_]*)",
    re.DOTALL,
)
_ELSEWHERE = re.compile(r"(?P<escaped>\$\$\{)|(?P<broken>\$\{.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Interpolation:
    """One pass over a document. A mistake goes to `mistakes`, and its entry is not changed."""

    environment: Mapping[str, str]
    mistakes: list[Mistake]

    def document(self, document: Mapping[str, Entry], prefix: str = "") -> Document:
        """Return a copy of the document with variables replaced."""
        return {name: self._entry(entry, f"{prefix}{name}") for name, entry in document.items()}

    def _entry(self, entry: Entry, path: str) -> Entry:
        if entry.section is not None:
            return Entry(entry.key, entry.source, self.document(entry.section, f"{path}."))
        if isinstance(entry.value, str):
            return self._text(entry, entry.value, path)
        if isinstance(entry.value, list):
            return replace(entry, value=self._inside(entry.value, entry, path))
        return entry

    def _inside(self, value: object, entry: Entry, path: str) -> object:
        """Process the texts in a list or mapping."""
        if isinstance(value, list):
            return [self._inside(one, entry, path) for one in value]
        if isinstance(value, dict):
            return {name: self._inside(one, entry, path) for name, one in value.items()}
        return self._text(entry, value, path).value if isinstance(value, str) else value

    def _text(self, entry: Entry, text: str, path: str) -> Entry:
        is_declared = is_interpolated(path)
        variables: list[str] = []
        pattern = _PIECES if is_declared else _ELSEWHERE

        def replaced(piece: re.Match[str]) -> str:
            if piece["escaped"]:
                return "$" if is_declared else "${"
            if is_declared and piece["name"]:
                variables.append(piece["name"])
                return self._value(piece, entry, path)
            self.mistakes.append(self._refused(piece, entry, path, is_declared=is_declared))
            return piece[0]

        value = pattern.sub(replaced, text)
        source = replace(entry.source, variables=tuple(dict.fromkeys(variables)))
        return Entry(entry.key, source, value)

    def _value(self, piece: re.Match[str], entry: Entry, path: str) -> str:
        name, default = piece["name"], piece["default"]
        value = self.environment.get(name)
        if default is not None:
            return value or default
        if value is None:
            message = f"`{path}` refers to the variable `{name}`, which is not set"
            hint = f"`export {name}=...`, or write `${{{name}:-default}}`"
            self.mistakes.append(Mistake(message, _at(piece[0], entry), hint=hint, key=path))
            return piece[0]
        return value

    def _refused(self, piece: re.Match[str], entry: Entry, path: str, *, is_declared: bool) -> Mistake:
        written = _to_its_bracket(piece[0])
        source = _at(written, entry)
        if not is_declared:
            keys = ", ".join(f"`{key}`" for key in INTERPOLATED)
            hint = f"variables are replaced in {keys}; write `$${{` for the text `${{`"
            return Mistake(f"`{path}` does not support variables: `{written}`", source, hint=hint, key=path)
        if piece["bare"]:
            name = written.removeprefix("$")
            hint = f"write `${{{name}}}` for the variable, or `$${name}` for the text `${name}`"
            return Mistake(f"`{path}`: `{written}` would not be replaced", source, hint=hint, key=path)
        message = f"`{path}`: `{written}` is neither `${{NAME}}` nor `${{NAME:-default}}`"
        hint = "a default has no `$`, `{` or `}`, so variables cannot be nested; write `$${` for the text `${`"
        return Mistake(message, source, hint=hint, key=path)


def is_interpolated(path: str) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in INTERPOLATED)


def _to_its_bracket(text: str) -> str:
    """Return the text to the bracket that closes its first one, or all of it."""
    depth = 0
    for end, character in enumerate(text, 1):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "}" and depth == 0:
            return text[:end]
    return text


def _at(piece: str, entry: Entry) -> Source:
    """Return the place of the piece, or of the whole value if it was escaped."""
    source = entry.source
    start = source.text.find(piece, source.column, source.column + source.width)
    return source if start < 0 else replace(source, column=start, width=len(piece))
