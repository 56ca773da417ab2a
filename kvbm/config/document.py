"""Where each value of a profile was written, and the YAML reader that knows it.

A document is a tree of `Entry`; each carries the `Source` of its key and of its value, so that every later error can
show file, line and caret, whichever layer the value came from. The YAML is deliberately narrow: only `true` and `false`
are booleans (`off` is text, and a boolean key then refuses it), a key may appear once, and aliases and tags are refused
(`extends` is how profiles share).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvbm.errors import ProfileError

EXCERPT_WIDTH = 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Source:
    """One span of text: `width` characters at `column` of `text`, which is line `line` of `label` if it is a file."""

    label: str
    text: str
    column: int = 0
    width: int = 1
    line: int | None = None

    @property
    def origin(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"

    def excerpt(self) -> str:
        """The line with carets under the span, indented by two, cut where it is very long."""
        start = max(0, self.column - EXCERPT_WIDTH // 2) if self.column + self.width > EXCERPT_WIDTH else 0
        text = _CONTROL.sub(" ", self.text)[start : start + EXCERPT_WIDTH].rstrip()
        column = self.column - start
        carets = "^" * max(1, min(self.width, len(text) - column))
        if self.line is None:
            return f"  {text}\n  {' ' * column}{carets}"
        number = str(self.line)
        gutter = " " * len(number)
        head = f"  {self.label}:{self.line}:{self.column + 1}\n  {gutter} |"
        return f"{head}\n  {number} | {text}\n  {gutter} | {' ' * column}{carets}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value: a scalar, a list of plain values, or the entries of a section."""

    key: Source
    source: Source
    value: object

    @property
    def section(self) -> Mapping[str, Entry] | None:
        return self.value if isinstance(self.value, dict) else None


Document = dict[str, Entry]


def located(message: str, source: Source, *, hint: str | None = None) -> ProfileError:
    return ProfileError(f"{message}\n{source.excerpt()}", hint=hint)


_SCALARS = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]{1,30}"), int),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]{1,30}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,4})?"), float),
)


def plain_scalar(text: str) -> object:
    """What unquoted text means: nothing, a boolean, a number, or else the text itself."""
    return next((convert(text) for pattern, convert in _SCALARS if pattern.fullmatch(text)), text)


def read_file(path: Path, *, noun: str) -> Document:
    """The entries of a YAML file; `noun` is what the file is to its user, such as `profile`."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ProfileError(f"`{path}` is not a text file in UTF-8") from None
    except OSError as error:
        raise ProfileError(f"cannot read the {noun} `{path}`: {(error.strerror or str(error)).lower()}") from None
    return read_document(text, label=str(path), noun=noun)


def read_document(text: str, *, label: str, noun: str = "profile") -> Document:
    """The entries of YAML text. ProfileError shows the place of whatever is not a plain mapping of unique keys."""
    lines = text.splitlines() or [""]
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None
        raise located(f"not valid YAML: {error.problem}", _at(mark, mark, lines, label)) from None
    except yaml.YAMLError as error:
        raise ProfileError(f"`{label}` is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ProfileError(f"`{label}` is nested too deeply") from None
    if node is None:
        return {}
    value = _value(node, lines, label)
    if not isinstance(value, dict):
        raise located(f"a {noun} is a mapping of keys", _at(node.start_mark, node.end_mark, lines, label))
    return value


class _Loader(yaml.SafeLoader):
    """Composes nodes without YAML 1.1's idea of scalars; `plain_scalar` decides what they mean."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (yaml reads the class attribute)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not supported; `extends` shares keys", problem_mark=mark)
        return super().compose_node(parent, index)


_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq")}


def _value(node: yaml.Node, lines: list[str], label: str) -> object:
    if node.tag not in _TAGS:
        raise located("tags are not supported", _at(node.start_mark, node.end_mark, lines, label))
    if isinstance(node, yaml.MappingNode):
        return _section(node, lines, label)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(_value(item, lines, label)) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    if "\0" in node.value:
        raise located("a value may not hold a NUL", _at(node.start_mark, node.end_mark, lines, label))
    return plain_scalar(node.value) if node.style is None else node.value


def _section(node: yaml.MappingNode, lines: list[str], label: str) -> Document:
    document: Document = {}
    for key_node, value_node in node.value:
        key = _at(key_node.start_mark, key_node.end_mark, lines, label)
        if not isinstance(key_node, yaml.ScalarNode):
            raise located("a key must be text", key)
        name = key_node.value
        if name in document:
            raise located(f"`{name}` appears twice; it is already on line {document[name].key.line}", key)
        value = _value(value_node, lines, label)
        document[name] = Entry(key, _at(value_node.start_mark, value_node.end_mark, lines, label), value)
    return document


def entry_at(document: Mapping[str, Entry], names: Sequence[object]) -> Entry | None:
    """The entry at `names`, or None where the document does not go that far."""
    entry: Entry | None = None
    section: Mapping[str, Entry] | None = document
    for name in names:
        entry = section.get(str(name)) if section is not None else None
        if entry is None:
            return None
        section = entry.section
    return entry


def _plain(value: object) -> object:
    return plain_values(value) if isinstance(value, dict) else value


def plain_values(document: Mapping[str, Entry]) -> dict[str, object]:
    """The document without its sources."""
    return {name: _plain(entry.value) for name, entry in document.items()}


def _at(start: yaml.Mark, end: yaml.Mark, lines: list[str], label: str) -> Source:
    """The span from `start` to `end`, or to the end of its first line; what lies after the last line is its end."""
    if start.line >= len(lines):
        return Source(label, lines[-1], len(lines[-1]), 1, len(lines))
    text = lines[start.line]
    stop = end.column if end.line == start.line else len(text.rstrip())
    return Source(label, text, start.column, max(1, stop - start.column), start.line + 1)
