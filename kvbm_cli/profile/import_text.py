"""Finds the starts of engines in a text of any kind: a script, YAML, a Dockerfile, a unit of systemd, Markdown."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence

from kvbm.config.variables import variable_names
from kvbm.errors import ProfileError
from kvbm_cli.profile.import_launch import START_OF_LINE, STARTS_IN_LISTS, Launch, Word
from kvbm_cli.profile.import_profile import OF_LMCACHE
from kvbm_cli.profile.import_shell import MAX_LAUNCHES, CommandText, OpenQuote, marked, read_variables_file
from kvbm_cli.profile.import_yaml import read_yaml

# The first line that is no comment has a key, or begins a document.
_YAML = re.compile(r"(?:[ \t]*(?:#.*)?\n)*(?:---|%YAML|\{|[\"']?[A-Za-z_][\w./-]*[\"']?:(?:\s|$))")
_FENCE = re.compile(r"[ \t>]*(```+|~~~+)")
_PROMPT = re.compile(r"^[ \t]*\$ ", re.MULTILINE)
_UNIT = re.compile(r"^\[(?:Unit|Service|Container)\]", re.MULTILINE)
_OF_UNIT = (
    (re.compile(r"^ExecStart\w*=[-@:+!]*", re.MULTILINE), ""),
    (re.compile(r"^Environment=", re.MULTILINE), "export "),
    (re.compile(r"^EnvironmentFile=-?", re.MULTILINE), "source "),
    (re.compile(r"^(?:\[[^\n]*|\w+=[^\n]*(?<!\\))$", re.MULTILINE), ""),
)
_FROM = re.compile(r"FROM\s+\S", re.IGNORECASE)
_INSTRUCTION = re.compile(r"^[ \t]*(FROM|ENV|ENTRYPOINT|CMD)[ \t]+((?:[^\\\n]|\\.)*)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(
    r"^[ \t]*(?:[$@!>-][ \t]*)?((?:[A-Z_]+=[^\s\"']*[ \t]+)*(?:(?:sudo|nohup|exec|uv run|python3?)[ \t]+)*"
    rf"{START_OF_LINE}\b"
    r"(?:[^\\\n]|\\.)*)",
    re.MULTILINE | re.DOTALL,
)
_STRING = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_ITEM = re.compile(
    rf"\s+|,|\\\n|\#[^\n]*|(?P<text>{_STRING})(?=\s*[,\]\)\#])"
    rf"|(?P<other>(?:{_STRING}|\([^()]*\)|\[[^\[\]]*\]|[^\s,\[\]()\"'#]|[ ](?![\s,\])]))+)"
)


def launches_of(text: str) -> list[Launch]:
    """Return every start of an engine. ProfileError for a text that is not read to its end."""
    text = text.translate({0xE000: None, 0xE001: None})  # the marks of the reader
    fenced = list(_fenced(text))
    return _of_page(fenced) if fenced else _of_block(text, 1)


def _of_block(text: str, line: int) -> list[Launch]:
    if _YAML.match(text):
        try:
            return read_yaml(text, line)
        except ProfileError:
            if found := _of_lines(text, line):  # a Makefile
                return found
            raise
    instructions = list(_INSTRUCTION.finditer(text))
    if any(_FROM.match(one[0].lstrip()) for one in instructions) and (found := _of_dockerfile(instructions)):
        return found
    if _UNIT.search(text):
        for pattern, instead in _OF_UNIT:
            text = pattern.sub(instead, text)
    script = CommandText()
    try:
        found = script.read(_PROMPT.sub("", text), line)
    except OpenQuote:
        if found := _of_lists(text, line) or _of_lines(text, line):  # another language, or prose
            return found
        raise
    for document in () if found else script.documents:
        if _YAML.match(document.text):
            found += read_yaml(document.text, document.line)
    variables = None if found else read_variables_file(text)
    if variables is None:
        return found or _of_lists(text, line)
    names = variables.environment
    return [variables] if variable_names(names) or OF_LMCACHE.keys() & names else []


def launches_of_words(words: Sequence[str]) -> list[Launch]:
    """Return every start of an engine in a command whose words a shell has made."""
    script = CommandText()
    script.find([Word(one, 1) for one in words])
    return script.results()


def _fenced(text: str) -> Iterator[tuple[str, int]]:
    """Yield the blocks of code of a page of Markdown, with their first lines."""
    fence, first = "", 0
    lines = text.split("\n")
    for at, line in enumerate(lines):
        match = _FENCE.match(line)
        if match is None:
            continue
        if not fence:
            fence, first = match[1], at + 1
        elif match[1].startswith(fence):
            yield "\n".join(lines[first:at]), first + 1
            fence = ""


def _of_page(blocks: list[tuple[str, int]]) -> list[Launch]:
    """Return the starts of engines in the blocks of code of a page."""
    found: list[Launch] = []
    problem: ProfileError | None = None
    for text, line in blocks:
        try:
            found += _of_block(text, line)
        except ProfileError as error:  # another language
            problem = problem or error
    if problem is not None and not found:
        raise problem
    return found[:MAX_LAUNCHES]


def _of_dockerfile(instructions: list[re.Match[str]]) -> list[Launch]:
    """Return the start of the image that the last stage makes."""
    environment = CommandText()
    parts: dict[str, list[Word]] = {}
    image, line, at = "", 1, 0
    for one in instructions:
        line, at = line + one.string.count("\n", at, one.start(2)), one.start(2)
        if one[1] == "FROM":
            image, environment, parts = one[2].split()[0], CommandText(), {}
        elif one[1] == "ENV":
            pair = re.match(r"(\w+)[ \t]+([^=]*)$", one[2], re.DOTALL)
            text = one[2] if pair is None else pair[1] + '="' + pair[2].replace('"', '\\"') + '"'
            environment.read(f"export {text}", line)
        elif one[2].startswith("["):
            parts[one[1]] = _items(one[2], 1, line)[0]
        else:
            parts[one[1]] = [Word("sh"), Word("-c"), Word(one[2], line)]
    words = [*parts.get("ENTRYPOINT", ()), *parts.get("CMD", ())]
    environment.find(words, image="" if "ENTRYPOINT" in parts else image)
    return environment.results()


def _of_lists(text: str, line: int) -> list[Launch]:
    """Return the starts of engines in lists of words, as Python and JSON write them."""
    script, end = CommandText(), 0
    for match in itertools.islice(STARTS_IN_LISTS.finditer(text), MAX_LAUNCHES):
        if match.start() >= end:
            words, end = _items(text, match.start(), line + text.count("\n", 0, match.start()))
            script.find(words)
    return script.results()


def _of_lines(text: str, line: int) -> list[Launch]:
    """Return the starts of engines with which a line begins, read with the lines that continue it."""
    found: list[Launch] = []
    for match in itertools.islice(_LINE.finditer(text), MAX_LAUNCHES):
        with contextlib.suppress(OpenQuote):
            found += CommandText().read(match[1], line + text.count("\n", 0, match.start(1)))
    return found


def _items(text: str, at: int, line: int) -> tuple[list[Word], int]:
    """Return the words of a list, and where it ends. What is not a text stays unresolved."""
    found: list[Word] = []
    while (match := _ITEM.match(text, at)) is not None:
        if match["text"]:
            try:
                found.append(Word(str(ast.literal_eval(match["text"])), line))
            except (ValueError, SyntaxError):
                found.append(Word(marked(match["text"]), line))
        elif match["other"]:
            found.append(Word(marked(match["other"].strip()), line))
        line += match[0].count("\n")
        at = match.end()
    return found, at
