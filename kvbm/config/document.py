"""YAML reader that records where each key and value was written.

A document is a tree of `Entry`. Each entry has the `Source` of its key and value, so that a later error can show file,
line and caret, whichever layer the value came from. Only a subset of YAML is allowed: booleans are `true` and `false`
(`off` is text, which a boolean key refuses), a key may appear once, and aliases and tags are refused (profiles share
keys by `extends`). The reader continues after a mistake, so that it finds all of them.
"""

from __future__ import annotations

import bisect
import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

from kvbm.errors import ProfileError, ProfileMistakes
from kvbm.text.reading import read_at_most

EXCERPT_WIDTH = 100
MAX_FILE_BYTES = 1 << 17  # so many unknown keys are reported within two seconds
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Source:
    """A span of text: `width` characters at `column` of `text`, which is line `line` of `label` if that is a file.

    `variables` names the environment variables that were inserted into the text.
    """

    label: str
    text: str
    column: int = 0
    width: int = 1
    line: int | None = None
    variables: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        place = self.label if self.line is None else f"{self.label}:{self.line}"
        return " ".join([place, *(f"${{{name}}}" for name in self.variables)])

    @property
    def written(self) -> str:
        return self.text[self.column : self.column + self.width]

    def excerpt(self) -> str:
        """Format the line with carets under the span, indented by two; a very long line is cut."""
        start = max(0, self.column - EXCERPT_WIDTH // 2) if self.column + self.width > EXCERPT_WIDTH else 0
        written = _CONTROL.sub(" ", self.text[start : start + EXCERPT_WIDTH])
        text = "".join(one if one.isprintable() else "·" for one in written).rstrip()
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


class Mistake(ProfileError):
    """A ProfileError with a place: `text` is the message, `source` the place, `key` the key.

    `meant` is the key for which an unknown key was probably meant.
    """

    def __init__(
        self, text: str, place: Source | Path | str, *, hint: str | None = None, key: str = "", meant: str = ""
    ) -> None:
        self.text, self.key, self.meant = _visible(text), key, meant
        self.source = place if isinstance(place, Source) else None
        self.file = place.label if isinstance(place, Source) else str(place)
        shown = place.excerpt() if isinstance(place, Source) else f"  {place}"
        super().__init__(f"{self.text}\n{shown}", hint=hint)


def _visible(text: str) -> str:
    """Return the text with an escape such as `\\u200b` for each character that an editor does not show."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def together(mistakes: Sequence[ProfileError]) -> ProfileError:
    """Combine mistakes into one error; a single mistake is returned as it is."""
    return mistakes[0] if len(mistakes) == 1 else ProfileMistakes(mistakes)


_WHOLE = "(?:0|[1-9][0-9]{0,29})"  # `010` is text: YAML 1.1 reads it as 8, YAML 1.2 as 10
_SCALARS = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(rf"[-+]?{_WHOLE}"), int),
    (re.compile(rf"[-+]?(?:\.[0-9]+|{_WHOLE}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{{1,4}})?"), float),
)


def plain_scalar(text: str) -> object:
    """Convert unquoted text: null, a boolean, a number, or else the text itself."""
    return next((convert(text) for pattern, convert in _SCALARS if pattern.fullmatch(text)), text)


def read_file(path: Path, *, noun: str) -> Document:
    """Read a YAML file. `noun` names the kind of file in messages, such as `profile`."""
    document, mistakes = parse_file(path, noun=noun)
    if mistakes:
        raise together(mistakes)
    return document


def parse_file(path: Path, *, noun: str) -> tuple[Document, list[ProfileError]]:
    """Return the valid entries of a YAML file and its mistakes. ProfileError if the file cannot be read."""
    try:
        text = decoded(read_at_most(path, MAX_FILE_BYTES))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise cannot_read(f"the {noun} `{path}`", error) from None
    return parse_document(text, label=str(path), noun=noun)


def cannot_read(what: str, error: OSError | ValueError) -> ProfileError:
    reason = getattr(error, "strerror", None) or str(error)
    return ProfileError(f"cannot read {what}: {reason[0].lower()}{reason[1:]}")


def decoded(contents: bytes) -> str:
    """Decode UTF-8 text. ValueError with the place of the first byte that is not."""
    if contents.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is UTF-16 text, not UTF-8")
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = contents.count(b"\n", 0, error.start) + 1
        raise ValueError(f"not UTF-8 text: byte 0x{contents[error.start]:02x} in line {line}") from None


def parse_document(text: str, *, label: str, noun: str = "profile") -> tuple[Document, list[ProfileError]]:
    """Return the valid entries of YAML text and its mistakes; no entries if the text is not YAML."""
    reader = _EntryReader(text, label)
    try:
        return reader.read(noun), reader.mistakes
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None
        return {}, [reader.yaml_error(error, mark)]
    except yaml.reader.ReaderError as error:
        message = f"not valid YAML: the character U+{ord(text[error.position]):04X} is not allowed"
        return {}, [Mistake(message, reader.character(error.position))]
    except RecursionError:
        return {}, [Mistake("the YAML is nested too deeply", label)]


def parse_value(text: str, place: Source) -> tuple[object, list[ProfileError]]:
    """Parse a list or mapping in brackets on a command line. Returns the value and its mistakes."""
    reader = _EntryReader(place.text, place.label, is_file=False)
    try:
        node = yaml.compose(" " * place.column + text, Loader=_Loader)
        assert node is not None, "a bracket starts a node"
        return reader.value(node), reader.mistakes
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None
        return None, [reader.yaml_error(error, mark)]
    except (yaml.YAMLError, RecursionError):
        return None, [Mistake("not valid YAML", place)]


# Beginning of a message of the YAML parser -> our message.
_PROBLEMS = {
    "expected <block end>": "the indentation does not match the lines above",
    "but found another document": "a second document starts here",
    "found character '\\t'": "a tab in place of spaces",
    "found unexpected end of stream": "a quote is not closed",
    "mapping values are not allowed here": "a `: ` is not allowed here; put text that contains it in quotes",
    "could not find expected ':'": "a key without a `:` after it",
    "expected the node content, but found '<stream end>'": "a bracket is not closed",
    "expected ',' or ']', but got '<stream end>'": "a bracket is not closed",
    "expected ',' or '}', but got '<stream end>'": "a bracket is not closed",
    "found undefined alias": "an alias without an anchor; text that begins with `*` requires quotes",
    "expected '<document start>'": "text after the end of the document",
}


def yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong with the YAML, in our words if they are known."""
    message = str(error.problem)
    return next((ours for start, ours in _PROBLEMS.items() if message.startswith(start)), message)


_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # of YAML


class PlainLoader(yaml.SafeLoader):
    """Composes nodes without the implicit types of YAML 1.1; `plain_scalar` converts scalars instead."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (yaml reads the class attribute)


class _Loader(PlainLoader):
    """Refuses aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="aliases are not supported; use `extends` to share keys", problem_mark=mark
            )
        return super().compose_node(parent, index)


_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq")}


@dataclass(frozen=True)
class _EntryReader:
    """Converts YAML nodes to entries. A mistake goes to `mistakes`, and reading continues without that node."""

    text: str
    label: str
    is_file: bool = True
    mistakes: list[ProfileError] = field(default_factory=list)

    @cached_property
    def lines(self) -> list[str]:
        return _LINE_BREAK.split(self.text.rstrip("\n"))

    @cached_property
    def starts(self) -> list[int]:
        """Index of the first character of each line."""
        return [0, *(found.end() for found in _LINE_BREAK.finditer(self.text))]

    def read(self, noun: str) -> Document:
        node = yaml.compose(self.text, Loader=_Loader)
        if isinstance(node, yaml.MappingNode) and node.tag in _TAGS:
            return self._section(node, "")
        if node is not None:
            place = self.at(node.start_mark, node.end_mark)
            self.mistakes.append(Mistake(f"a {noun} must be a mapping of keys", place))
        return {}

    def at(self, start: yaml.Mark, end: yaml.Mark) -> Source:
        """Return the span from `start` to `end`, or to the end of the first line; never beyond the last line."""
        if start.line >= len(self.lines):
            return self._source(len(self.lines) - 1, len(self.lines[-1]), 1)
        text = self.lines[start.line]
        stop = end.column if end.line == start.line else len(text.rstrip())
        return self._source(start.line, start.column, max(1, stop - start.column))

    def _source(self, index: int, column: int, width: int) -> Source:
        return Source(self.label, self.lines[index], column, width, index + 1 if self.is_file else None)

    def yaml_error(self, error: yaml.MarkedYAMLError, mark: yaml.Mark) -> Mistake:
        problem, source = yaml_problem(error), self.at(mark, mark)
        if source.text[: source.column].endswith("$"):
            problem = "inside brackets, `${NAME}` requires quotes"
        return Mistake(f"not valid YAML: {problem}", source, hint=self._unseen())

    def _unseen(self) -> str | None:
        """Return where the first character is that no editor shows, None if there is none. YAML reads it as text."""
        for number, line in enumerate(self.lines, start=1):
            for column, one in enumerate(line, start=1):
                if not one.isprintable() and one != "\t":
                    return f"replace or remove the character U+{ord(one):04X} in line {number}, column {column}"
        return None

    def character(self, index: int) -> Source:
        line = bisect.bisect_right(self.starts, index) - 1
        return Source(self.label, self.lines[min(line, len(self.lines) - 1)], index - self.starts[line], 1, line + 1)

    def _section(self, node: yaml.MappingNode, prefix: str) -> Document:
        document: Document = {}
        for key_node, value_node in node.value:
            key = self.at(key_node.start_mark, key_node.end_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self.mistakes.append(Mistake("a key must be text", key, key=prefix.rstrip(".")))
                continue
            name, path = key_node.value, f"{prefix}{key_node.value}"
            if name in document:
                message = f"`{name}` appears twice; the first is on line {document[name].key.line}"
                self.mistakes.append(Mistake(message, key, key=path))
                continue
            value = self.value(value_node, path)
            document[name] = Entry(key, self.at(value_node.start_mark, value_node.end_mark), value)
        return document

    def value(self, node: yaml.Node, path: str = "") -> object:
        if node.tag not in _TAGS:
            self._refuse("YAML tags are not supported", node, path)
        if isinstance(node, yaml.MappingNode):
            return self._section(node, f"{path}.")
        if isinstance(node, yaml.SequenceNode):
            return [_plain(self.value(item, path)) for item in node.value]
        assert isinstance(node, yaml.ScalarNode)
        if "\0" in node.value:
            self._refuse("a value must not contain a NUL character", node, path)
        return plain_scalar(node.value) if node.style is None else node.value

    def _refuse(self, message: str, node: yaml.Node, path: str) -> None:
        self.mistakes.append(Mistake(message, self.at(node.start_mark, node.end_mark), key=path))


def entry_at(document: Mapping[str, Entry], names: Sequence[object]) -> Entry | None:
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
    """Return the document without its sources."""
    return {name: _plain(entry.value) for name, entry in document.items()}
