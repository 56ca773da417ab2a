"""Reads the starts of engines from a shell script or a command line, without running anything.

Quotes, continued lines, here documents, assignments, `export`, arrays and `${NAME:-text}` are understood. A word with
`$(...)`, a template or a variable that the script does not set is `unknown`. What variables insert is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from kvbm.errors import ProfileError
from kvbm_cli.profile.import_launch import Launch, Left, Word, started
from kvbm_cli.profile.import_secrets import names_secret

MAX_INSERTED = 1 << 20  # characters
MAX_DEPTH = 8
MAX_LAUNCHES = 200

_SINGLE, _DOUBLE = r"'[^']*'", r"\"(?:\\.|[^\"\\])*\""
_BRACES = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
_ASIDE = r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\{\{[^{}]*\}\}"  # commands and templates
_TOKEN = re.compile(
    rf"(?P<blank>[ \t\r]+|\\\n|\#[^\n]*)|(?P<end>[\n;&|()]+)|(?P<away>\d*[<>]+[&|]?[ \t]*)"
    rf"|(?P<array>[A-Za-z_]\w*\+?=\((?:{_SINGLE}|{_DOUBLE}|{_ASIDE}|[^()'\"])*+\))"
    rf"|(?P<word>(?:\\.|{_SINGLE}|{_DOUBLE}|{_ASIDE}|{_BRACES}|[^\s;&|()<>'\"\\])+)",
    re.DOTALL,
)
_VARIABLE = rf"(?P<braces>{_BRACES})|\$(?P<name>[A-Za-z_]\w*|[0-9@*?$#])|(?P<aside>{_ASIDE})"
_PIECE = re.compile(
    rf"{_VARIABLE}|(?P<single>{_SINGLE})|(?P<double>{_DOUBLE})|\\(?P<escaped>.)|[^$`{{'\"\\]+|.", re.DOTALL
)
_PIECE_IN_QUOTES = re.compile(rf"{_VARIABLE}|\\(?P<escaped>[\"\\$`\n])|[^$`{{\\]+|.", re.DOTALL)
_BODY = re.compile(r"([A-Za-z_]\w*|[0-9@*])(?:\[[@*]\])?(?::?([-=+])(.*))?", re.DOTALL)
_ARRAY = re.compile(r'"\$(?:@|\{\w+\[@\]\})"')
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_HERE = re.compile(r"(?<!<)<<-?[ \t]*['\"]?([A-Za-z_]\w*)")
_TARGET = re.compile(r">[ \t]*(?:[^\s<>;|&]*/)?([^\s<>;|&/]+)")
_CONDITIONS = frozenset({"if", "elif", "while", "until", "for", "case"})
_IN_FRONT = frozenset({"exec", "nohup", "env", "sudo", "time", "command", "then", "else", "do", "{", "!"}) | _CONDITIONS
_PULLED = re.compile(r"[\w.-]+(?::\d+)?/(?:(?!:/).)*")  # an image of a registry, and no path or volume
_ENV_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=\s*(.*)")
_END_OF_QUOTE = {quote: re.compile(rf"{quote}(?:\s*$|\s+#)") for quote in "'\""}


def read_script(
    text: str, *, environment: Mapping[str, Word] | None = None, arguments: Sequence[Word] | None = None, line: int = 1
) -> list[Launch]:
    """Return every start of an engine. `arguments` are `$1` and so on, if they are known."""
    script = _Script(environment or {}, arguments)
    script.read(text, line)
    return [replace(one, left=tuple(script.left.values()), files=script.files) for one in script.launches]


def read_variables_file(text: str) -> Launch | None:
    """Return the variables of an env file, None if a line is not one."""
    lines = [(at, line) for at, line in enumerate(text.splitlines(), start=1) if not re.match(r"\s*(#|$)", line)]
    found = [(_ENV_LINE.fullmatch(line), at) for at, line in lines]
    values = {match[1]: Word(_env_value(match[2]), at) for match, at in found if match is not None}
    return Launch("environment", None, environment=values) if values and all(match for match, _ in found) else None


def _env_value(text: str) -> str:
    """Return what the last quote like the first one ends, else the text in front of a comment."""
    quote = _END_OF_QUOTE.get(text[:1])
    ends = [found.start() for found in quote.finditer(text, 1)] if quote is not None else []
    return text[1 : ends[-1]] if ends else re.split(r"\s#", text, maxsplit=1)[0].rstrip()


def words_of(text: str, line: int, variables: Mapping[str, Word]) -> list[Word]:
    """Return the words of a text as a shell reads them."""
    return [word for command in _Script(variables).commands(text, line) for word in command]


def inserted(word: Word) -> Word:
    """Return the word with its variables inserted, as Compose does: `$$` is one `$`."""
    text, unknown = _Script({}).quoted(word.replace("\\", "\\\\").replace("$$", "\\$"))
    return Word(text, word.line, unknown=unknown)


class _Script:
    """State of a script, whose commands are read in order. A variable has the value that it has at that place."""

    def __init__(
        self, environment: Mapping[str, Word], arguments: Sequence[Word] | None = None, *, inserted_count: int = 0
    ) -> None:
        self.variables: dict[str, list[Word]] = {name: [word] for name, word in environment.items()}
        self.exported = dict.fromkeys(environment)
        self.launches: list[Launch] = []
        self.left: dict[str, Left] = {}
        self.files: dict[str, str] = {}
        self.inserted_count = inserted_count
        if arguments is not None:
            self.variables |= {"@": list(arguments), **{str(at): [one] for at, one in enumerate(arguments, start=1)}}

    def read(self, text: str, line: int, depth: int = 0) -> None:
        if depth > MAX_DEPTH:
            raise ProfileError(f"line {line}: more than {MAX_DEPTH} scripts inside each other")
        for words in self.commands(self._without_documents(text), line):
            self._command(words, depth)

    def _without_documents(self, text: str) -> str:
        """Move here documents to `files`; empty lines take their place."""
        lines = text.split("\n")
        ends, end, name, kept = {line.strip() for line in lines}, "", "", []
        files: dict[str, list[str]] = {}
        for line in lines:
            kept.append("" if end else line)
            if end and line.strip() == end:
                end = ""
            elif end:
                files[name].append(f"{line}\n")
            elif (match := _HERE.search(line)) is not None and match[1] in ends:
                target = _TARGET.search(line)
                end, name = match[1], target[1] if target is not None else ""
                files[name] = []
        self.files |= {name: "".join(inside) for name, inside in files.items()}
        return "\n".join(kept)

    def commands(self, text: str, line: int) -> Iterator[list[Word]]:
        words: list[Word] = []
        at, is_target = 0, False
        while at < len(text):
            if (match := _TOKEN.match(text, at)) is None:
                raise ProfileError(f"line {line}: a quote is not closed")
            if match["end"] and words:
                yield words
                words = []
            elif match["array"]:
                name, _, inside = match[0][:-1].partition("=(")
                found = [word for command in self.commands(inside, line) for word in command]
                before = self.variables.get(name[:-1], []) if name.endswith("+") else []
                self._count(len(before))
                self.variables[name.rstrip("+")] = before + found
            elif match["word"] and not is_target:
                words += self._words(match[0], line)
            at, is_target = match.end(), match["away"] is not None
            line += match[0].count("\n")
        if words:
            yield words

    def _words(self, token: str, line: int) -> list[Word]:
        """Return the word, or several if a variable without quotes has several."""
        fields: list[str] = []
        text: list[str] = []  # of the last field
        unknown, is_there, assigned = "", False, _ASSIGNED.match(token)
        for piece in _PIECE.finditer(token):
            parts, why = self._value(piece)
            if (piece["braces"] or piece["name"]) and not why and (assigned is None or piece.start() < assigned.end()):
                parts = [one for part in parts for one in part.split()]
            if parts:
                is_there, unknown = True, unknown or why
                text.append(parts[0])
                if len(parts) > 1:
                    fields += ["".join(text), *parts[1:-1]]
                    text = [parts[-1]]
        return [Word(one, line, unknown=unknown) for one in [*fields, "".join(text)]] if is_there else []

    def _value(self, piece: re.Match[str]) -> tuple[list[str], str]:
        """Return what stands for a piece of a word, and its text if that is unknown."""
        given = piece.groupdict()
        if given["braces"] or given["name"]:
            return self._variable(given["name"] or given["braces"][2:-1], piece[0])
        if given["escaped"] is not None:
            return [given["escaped"].replace("\n", "")], ""
        if given.get("double") is None:
            return [given["single"][1:-1] if given.get("single") else piece[0]], given["aside"] or ""
        if _ARRAY.fullmatch(piece[0]):
            return self._variable(piece[0][1:-1].strip("${}"), piece[0])
        text, unknown = self.quoted(piece[0][1:-1])
        return [text], unknown

    def quoted(self, text: str) -> tuple[str, str]:
        """Return the text in double quotes with its variables inserted, and the part of it that is unknown."""
        found = [self._value(piece) for piece in _PIECE_IN_QUOTES.finditer(text)]
        return "".join(" ".join(parts) for parts, _ in found), next((why for _, why in found if why), "")

    def _variable(self, body: str, written: str) -> tuple[list[str], str]:
        match = _BODY.fullmatch(body)
        if match is not None and names_secret(match[1]):
            return [f"${match[1]}"], f"${match[1]}"
        value = self.variables.get(match[1]) if match is not None else None
        is_set = value is not None and any(value)
        if match is not None and match[2] == "+" and not is_set:
            return [], ""
        if match is not None and match[2] and is_set == (match[2] == "+"):
            text, unknown = self.quoted(re.sub(r"^(['\"])(.*)\1$", r"\2", match[3], flags=re.DOTALL))
            return [text], unknown
        if value is None:
            return [written], written
        self._count(sum(map(len, value)) + len(value))
        return [str(one) for one in value], next((one.unknown for one in value if one.unknown), "")

    def _count(self, inserted_count: int) -> None:
        self.inserted_count += inserted_count
        if self.inserted_count > MAX_INSERTED:
            raise ProfileError(f"variables insert more than {MAX_INSERTED >> 10} KiB of text")

    def _command(self, words: list[Word], depth: int) -> None:
        assigned: dict[str, Word] = {}
        words.reverse()  # the next one is the last, which is removed in constant time
        while words and ((match := _ASSIGNED.match(words[-1])) or words[-1] in _IN_FRONT):
            word = words.pop()
            if match is not None:
                assigned[match[1]] = self._assigned(match, word)
            elif word in _CONDITIONS:
                reason = "conditions and loops are not evaluated; every command is read once"
                self.left.setdefault("if", Left(word, reason, word.line))
            elif words and words[-1].startswith("-"):
                words.pop()
        words.reverse()
        name = words[0].rpartition("/")[2] if words else ""
        if not words:
            self.variables |= {name: [word] for name, word in assigned.items()}
        elif name in ("export", "declare", "readonly", "typeset", "local"):
            self._declare(words)
        elif name in ("sh", "bash", "dash", "zsh") and len(words) > 2 and re.fullmatch("-[a-z]*c", words[1]):
            environment = self._environment() | assigned
            self._count(len(environment))
            inside = _Script(environment, words[4:], inserted_count=self.inserted_count)  # words[3] is `$0`
            inside.read(words[2], words[2].line, depth + 1)
            self.inserted_count = inside.inserted_count
            self.launches += inside.launches
            self.left |= inside.left
        elif name == "eval":
            self.read(" ".join(words[1:]), words[0].line, depth + 1)
        elif name in ("source", ".") and len(words) > 1:
            what = f"{name} {words[1]}"
            self.left.setdefault(what, Left(what, "other files are not read", words[0].line))
        else:
            self._start(words, assigned)

    def _start(self, words: list[Word], assigned: dict[str, Word]) -> None:
        line, image, given = words[0].line, "", None
        if words[0] in ("docker", "podman") and "run" in words[1:3]:
            at = next((at for at, one in enumerate(words) if _PULLED.fullmatch(one) and started([], one)), len(words))
            pairs = [two for one, two in pairwise(words[:at]) if one in ("-e", "--env")]
            given = {match[1]: self._assigned(match, one) for one in pairs if (match := _ASSIGNED.match(one))}
            image, words = "".join(words[at : at + 1]), words[at + 1 :]
        if (found := started(words, image)) is None:
            return
        if len(self.launches) == MAX_LAUNCHES:
            raise ProfileError(f"more than {MAX_LAUNCHES} commands start an engine")
        kind, arguments, is_of_dynamo = found
        environment = self._environment() | assigned if given is None else given
        launch = Launch(f"line-{line}", kind, arguments, environment, line=line, is_of_dynamo=is_of_dynamo)
        self.launches.append(launch)

    def _declare(self, words: list[Word]) -> None:
        for word in words[1:]:
            match = _ASSIGNED.match(word)
            if match is not None:
                self.variables[match[1]] = [self._assigned(match, word)]
            if words[0] == "export" or "-x" in words:
                self.exported[match[1] if match is not None else str(word)] = None

    def _assigned(self, match: re.Match[str], word: Word) -> Word:
        before = " ".join(self.variables.get(match[1], [])) if match[2] else ""
        self._count(len(before))
        return Word(f"{before}{word[match.end() :]}", word.line, unknown=word.unknown)

    def _environment(self) -> dict[str, Word]:
        known = ((name, self.variables.get(name, [])) for name in self.exported)
        return {name: value[0] for name, value in known if len(value) == 1}
