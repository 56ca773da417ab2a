"""Finds the starts of engines in a text that is no YAML: a script, a Dockerfile, a unit of systemd, a page, Python."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvbm_cli.profile.import_launch import NOT_SHOWN, START_OF_LINE, STARTS_IN_LISTS, Launch, Left, Word, exports
from kvbm_cli.profile.import_shell import (
    MAX_LAUNCHES,
    CommandText,
    OpenQuote,
    characters_of,
    finished,
    marked,
    require_few,
)

_FENCE = re.compile(r"[ \t>]*(```+|~~~+)")
_INSTRUCTION = re.compile(r"^[ \t]*([A-Z]+)[ \t]+((?:[^\\\n]|\\.)*)", re.MULTILINE | re.DOTALL)  # of a Dockerfile
_COMMENTS = re.compile(r"\\\n(?:[ \t]*(?:#[^\n]*)?\n)+")  # between the lines of an instruction
_PAIR = re.compile(r"(\w+)[ \t]+(.*)", re.DOTALL)  # of ENV
_QUOTE = re.compile(r"(?<!\\)['\"]")
_AS_SHELL = tuple(  # a prompt, a unit of systemd
    (re.compile(pattern, re.MULTILINE), instead)
    for pattern, instead in (
        (r"^[ \t]*\$ ", ""),
        (r"^Environment=", "export "),
        (r"^EnvironmentFile=-?", "source "),
        (r"^Description=.*|^ExecStart\w*=[-@:+!]*", ""),
    )
)
_LINE = re.compile(
    r"^[ \t]*(?:[$@!>-][ \t]*)?((?:[A-Z_]+=[^\s\"']*[ \t]+)*(?:(?:sudo|nohup|exec|uv run|[\w./-]*python3?)[ \t]+)*"
    rf"{START_OF_LINE}(?:[^\\\n]|\\.)*)",
    re.MULTILINE | re.DOTALL,
)
_STRING = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_OF_SHELL = re.compile(rf"{_STRING}|\\.|([;&|()<>#`])", re.DOTALL)  # characters that are text in ENV
_ITEM = re.compile(
    rf"\s+|,|\\\n|\#[^\n]*|(?P<text>{_STRING})(?=\s*[,\]\)\#])"
    rf"|(?P<other>(?:{_STRING}|\([^()]*\)|\[[^\[\]]*\]|[^\s,\[\]()\"'#]|[ ](?![\s,\])]))+)"
)
_OF_PYTHON = re.compile(r"(?<![-\w.])env(?=\s*=[^=])|\bos\.environ(?=\[)")  # variables for the engine
_ENV_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=\s*(?:(['\"])(.*)\2\s*(?:#.*)?|(.*?)(?:\s#.*|\s*))")


def fenced(text: str, exported: Mapping[str, Word], line: int = 1) -> Iterator[tuple[str, int]]:
    """Yield the blocks of code of a page of Markdown, or else the text, with their first lines. Each block has the
    variables `exported` of those above it. ProfileError if these are too many."""
    found: list[tuple[str, int]] = []
    fence, first = "", 0
    lines = text.split("\n")
    for at, one in enumerate(lines):
        match = _FENCE.match(one)
        if match is not None and not fence:
            fence, first = match[1], at + 1
        elif match is not None and match[1].startswith(fence):
            found.append(("\n".join(lines[first:at]), line + first))
            fence = ""
    spent = 0
    for block in found or [(text, line)]:
        spent = require_few(spent + characters_of(exported))
        yield block


def read_page(text: Word, environment: Mapping[str, Word]) -> list[Launch]:
    """Return every start of an engine in the scripts of a text."""
    exported = dict(environment)
    blocks = fenced(text, exported, text.line)
    return [found for one, line in blocks for found in read_text(one, line, exported).results()]


def read_text(text: str, line: int, exported: dict[str, Word]) -> CommandText:
    """Read what a text starts. OpenQuote if it is not read to its end, and no line of it starts an engine.

    `exported` are variables of the shell; those of a script are added, for the next block of its page.
    """
    of_image = _dockerfile(text, line)
    if of_image is not None and of_image.launches:
        return of_image
    given = exported if of_image is None else exported | of_image.environment()
    as_shell = text
    for pattern, instead in _AS_SHELL:
        as_shell = pattern.sub(instead, as_shell)
    found = CommandText(given)
    try:
        for name, value in _slurm_variables(text, line):
            if value is None:
                found.left[name] = Left(finished(name), NOT_SHOWN, name.line)
            else:
                found.variables[name], found.exported[name] = [value], None
        found.read(as_shell, line)
    except OpenQuote:  # another language, or prose
        found = read_lines(as_shell, line, given | found.environment())
        if not found.launches:
            raise
    exported |= found.environment()
    if of_image is not None:
        found.launches = [replace(one, is_elsewhere=True) for one in found.launches]
    return found if found.launches or found.documents else _lists(as_shell, line, given)


def _slurm_variables(text: str, line: int) -> Iterator[tuple[Word, Word | None]]:
    """Yield what `#SBATCH --export` sets, in front of the first command; None for the value of a variable of the
    caller."""
    for at, one in enumerate(text.split("\n"), start=line):
        if one.startswith("#SBATCH") and "--export" in one:
            yield from exports(CommandText().words(one.removeprefix("#SBATCH"), at))
        elif one.strip() and not one.startswith("#"):
            return


def read_lines(text: str, line: int, exported: Mapping[str, Word]) -> CommandText:
    """Read the lists of words in a text, or else the lines that begin with the start of an engine."""
    found = _lists(text, line, exported)
    for match in itertools.islice(() if found.launches else _LINE.finditer(text), MAX_LAUNCHES):
        with contextlib.suppress(OpenQuote):
            found.read(match[1], line + text.count("\n", 0, match.start(1)))
    return found


def variables_of(text: str) -> dict[str, Word]:
    """Return the variables of an env file; none if a line is not one."""
    lines = [(at, one) for at, one in enumerate(text.splitlines(), start=1) if not re.match(r"\s*(#|$)", one)]
    found = [(match, at) for at, one in lines if (match := _ENV_LINE.fullmatch(one))]
    values = {match[1]: Word(match[3] if match[2] else match[4].rstrip(), at) for match, at in found}
    return values if len(found) == len(lines) else {}


def _dockerfile(text: str, line: int) -> CommandText | None:
    """Read what the image of the last stage starts, with what it has of the stages that it is built on. None for a text
    that is no Dockerfile."""
    script: CommandText | None = None
    parts: dict[str, Word] = {}
    stages: dict[str, tuple[str, CommandText, dict[str, Word]]] = {}  # by name: the first image, and what is set
    command: Word | None = None  # of the stage below
    image, at = "", 0
    for one in _INSTRUCTION.finditer(_COMMENTS.sub(lambda found: "\\\n" * found[0].count("\n"), text)):
        line, at = line + one.string.count("\n", at, one.start(2)), one.start(2)
        if one[1] == "FROM":
            image, *name = [word for word in one[2].split() if not word.startswith("--")] or [""]
            image, below, inherited = stages.get(image.lower(), (image, CommandText(), {}))
            spent = 0 if script is None else script.spent
            script = CommandText(below.environment(), spent=spent)
            parts, command = dict(inherited), inherited.get("CMD")
            stages["".join(name[1:]).lower()] = image, script, parts
        elif script is not None and one[1] == "ENV":
            pair = _PAIR.fullmatch(one[2])
            given = one[2] if pair is None else f'{pair[1]}="{_QUOTE.sub("", pair[2])}"'
            script.read("export " + _OF_SHELL.sub(lambda found: f"\\{found[1]}" if found[1] else found[0], given), line)
        elif one[1] in ("ENTRYPOINT", "CMD"):
            if one[1] == "ENTRYPOINT" and parts.get("CMD") is command:
                parts.pop("CMD", None)  # Docker forgets the one of the stage below
            parts[one[1]] = Word(one[2], line)
    if script is None:
        return None
    words: list[Word] = []
    for part in (parts[name] for name in ("ENTRYPOINT", "CMD") if name in parts):
        if not part.startswith("["):  # of a shell, which does not read what is behind it
            words += [Word("sh"), Word("-c"), part]
            break
        words += _items(part, 1, part.line)[0]
    script.find(words, image="" if "ENTRYPOINT" in parts or not parts else image)
    script.launches = [replace(one, is_elsewhere=True) for one in script.launches]
    return script


def _lists(text: str, line: int, exported: Mapping[str, Word]) -> CommandText:
    """Read the starts of engines in lists of words, as Python and JSON write them."""
    script, end = CommandText(exported), 0
    for match in itertools.islice(STARTS_IN_LISTS.finditer(text), MAX_LAUNCHES):
        if match.start() >= end:
            words, end = _items(text, match.start(), line + text.count("\n", 0, match.start()))
            script.find(words)
    if script.launches and (found := _OF_PYTHON.search(text)):
        at = line + text.count("\n", 0, found.start())
        script.left["env"] = Left(found[0], "variables next to a list of words are not read", at)
    return script


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
