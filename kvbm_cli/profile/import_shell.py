"""Finds the starts of engines among the commands of a text: a script, a here document, the text behind `bash -c`.

This is no shell. It splits words, inserts the variables that the text sets, and looks for the words that start an
engine, wherever they stand. What it does not resolve stays in the word between two marks, which `finished` takes out.
Not `shlex`: it drops quotes, which decide whether a `$` is text, and takes quadratic time for a long word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbm.errors import ProfileError
from kvbm_cli.profile.import_launch import STARTS, Container, Launch, Left, Word, contained, started
from kvbm_cli.profile.import_secrets import names_secret

MAX_INSERTED = 1 << 20  # characters
MAX_DEPTH = 8
MAX_LAUNCHES = 200

_SINGLE, _DOUBLE = r"'[^']*'", r"\"(?:\\.|[^\"\\])*\""
_BRACES = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
_ROUND = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ASIDE = rf"\${_ROUND}|`[^`]*`|\{{\{{[^{{}}]*\}}\}}|\ue000[^\ue001]*\ue001"  # commands, templates, and marked text
_TOKEN = re.compile(
    rf"(?P<blank>[ \t\r]+|\\\n|\#[^\n]*)|(?P<end>[\n;&|()]+)|(?P<away>\d*[<>]+[&|]?[ \t]*)"
    rf"|(?P<array>[A-Za-z_]\w*\+?=\((?:{_SINGLE}|{_DOUBLE}|{_ASIDE}|\#[^\n]*|[^()'\"])*+\))"
    rf"|(?P<word>(?:\\.|{_SINGLE}|{_DOUBLE}|{_ASIDE}|{_BRACES}|[^\s;&|()<>'\"\\])+)",
    re.DOTALL,
)
_VARIABLE = rf"(?P<braces>{_BRACES})|\$(?P<name>[A-Za-z_]\w*|[0-9@*?$#])|(?P<aside>{_ASIDE})"
_PIECE = re.compile(
    rf"{_VARIABLE}|(?P<single>{_SINGLE})|(?P<double>{_DOUBLE})|\\(?P<escaped>.)|[^$`{{'\"\\\ue000]+|.", re.DOTALL
)
_PIECE_IN_QUOTES = re.compile(rf"{_VARIABLE}|\\(?P<escaped>[\"\\$`\n])|[^$`{{\\\ue000]+|.", re.DOTALL)
_BODY = re.compile(r"([A-Za-z_]\w*|[0-9@*])(?:\[[@*]\])?(?::?([-=+])(.*))?", re.DOTALL)
_ARRAY = re.compile(r'"\$(?:@|\{\w+\[@\]\})"')
_MARKED = re.compile("\ue000([^\ue001]*)\ue001")
_OPTION = re.compile("\ue000\\$\\{?(?:[0-9]|OPTARG)")  # what a script is given
_FIELD = re.compile("(?:\ue000[^\ue001]*\ue001|\\S)+")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_HERE = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)")
_TARGET = re.compile(r">[ \t]*(?:[^\s<>;|&]*/)?([^\s<>;|&/]+)|\btee\s+(?:[^\s<>;|&]*/)?([^\s<>;|&/-]+)")
_OPENS, _CLOSES = frozenset({"if", "while", "until", "for", "case"}), frozenset({"fi", "done", "esac"})
_IN_FRONT = frozenset({"then", "else", "elif", "do", "{", "!", "time", "exec", "command"}) | _OPENS
_TESTS = frozenset({"[", "[[", "test"})
_DECLARES = frozenset({"export", "declare", "readonly", "typeset", "local"})
_NO_START = re.compile(
    r"echo|printf|pkill|pgrep|grep|which|type|trap|alias|curl|git|sed|awk|logger|log|info|warn|error|die|usage"
    r"|[A-Z][a-z]+"  # prose begins like this, and programs do not
)
_BEHIND = re.compile(r"-[a-z]*c|--")  # in front of a script
_ELSEWHERE = frozenset({"ssh", "kubectl", "oc"})  # these run a command on another machine
_LISTED = "conditions and loops are not evaluated; every command is read once"
_ENV_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=\s*(.*)")
_END_OF_QUOTE = {quote: re.compile(rf"{quote}(?:\s*$|\s+#)") for quote in "'\""}


class OpenQuote(ProfileError):
    """The text is not read to its end. It may be no script at all."""


def marked(text: str) -> str:
    """Return a text as a part that is not resolved."""
    return "\ue000" + _MARKED.sub(r"\1", text) + "\ue001"


def finished(word: Word) -> Word:
    """Return the word without marks; `unknown` is the first part that is not resolved."""
    found = _MARKED.search(word)
    if found is None:
        return word
    return Word(_MARKED.sub(r"\1", word), word.line, unknown=found[1], is_plain=word.is_plain)


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


def inserted(word: Word) -> Word:
    """Return the word with its variables inserted, as Compose does: `$$` is one `$`."""
    return Word(
        CommandText().quoted(word.replace("\\", "\\\\").replace("$$", "\\$")), word.line, is_plain=word.is_plain
    )


@dataclass(frozen=True, slots=True)
class HereDocument:
    text: str
    line: int
    is_quoted: bool
    target: str  # the file that it becomes, empty for none


class CommandText:
    """What a text sets, and the engines that it starts. A variable has the value that it has at that place."""

    def __init__(
        self, environment: Mapping[str, Word] | None = None, arguments: Sequence[Word] | None = None, *, spent: int = 0
    ) -> None:
        self.variables: dict[str, list[str]] = {name: [word] for name, word in (environment or {}).items()}
        self.exported = dict.fromkeys(environment or ())
        self.launches: list[Launch] = []
        self.left: dict[str, Left] = {}
        self.documents: list[HereDocument] = []
        self.spent = spent  # characters that variables inserted
        self.open_conditions = 0
        self.is_after_test = False
        if arguments is not None:
            self.variables["@"] = [*arguments]
            for at, one in enumerate(arguments, start=1):
                self.variables[str(at)] = [one]

    def read(self, text: str, line: int = 1, depth: int = 0) -> list[Launch]:
        """Return the engines that the text starts; those of here documents are read if there is no other."""
        if depth > MAX_DEPTH:
            raise ProfileError(f"line {line}: more than {MAX_DEPTH} scripts inside each other")
        first = len(self.documents)
        for words in self.commands(self._without_documents(text, line), line):
            self._command(words, depth)
        for one in self.documents[first:]:
            is_script = one.text.startswith("#!") or one.target.endswith((".sh", ".sbatch", ".slurm"))
            if STARTS.search(one.text) and (not one.target or (is_script and not self.launches)):
                self._nest(one.text if one.is_quoted else one.text.replace("\\$", "$"), one.line, depth, inherits=True)
        return self.results()

    def results(self) -> list[Launch]:
        files = {one.target: one.text for one in self.documents}
        return [
            replace(one, left=(*one.left, *self.left.values()), files={**files, **one.files}) for one in self.launches
        ]

    def _without_documents(self, text: str, first: int) -> str:
        """Take here documents out of a text; empty lines take their place."""
        lines = text.split("\n")
        ends = {line.strip(): at for at, line in enumerate(lines)}  # the last place of each
        kept: list[str] = []
        at = 0
        while at < len(lines):
            kept.append(lines[at])
            match, at = _HERE.search(lines[at]), at + 1
            if match is None or ends.get(match[2], -1) < at:
                continue
            end = next(there for there in range(at, len(lines)) if lines[there].strip() == match[2])
            target = _TARGET.search(kept[-1])
            name = (target[1] or target[2]) if target is not None else ""
            inside = "".join(f"{line}\n" for line in lines[at:end])
            self.documents.append(HereDocument(inside, first + at, bool(match[1]), name))
            kept += [""] * (end + 1 - at)
            at = end + 1
        return "\n".join(kept)

    def commands(self, text: str, line: int) -> Iterator[list[Word]]:
        words: list[Word] = []
        at, is_target = 0, False
        while at < len(text):
            if (match := _TOKEN.match(text, at)) is None:
                raise OpenQuote(f"line {line}: a quote is not closed")
            if match["end"] and words:
                yield words
                words = []
            elif match["array"]:
                name, _, inside = match[0][:-1].partition("=(")
                found = [str(word) for command in self.commands(inside, line) for word in command]
                before = self.variables.get(name[:-1], []) if name.endswith("+") else []
                self._count(len(before))
                self._set(name.rstrip("+"), before + found)
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
        is_there, assigned = False, _ASSIGNED.match(token)
        for piece in _PIECE.finditer(token):
            parts = self._value(piece)
            if (piece["braces"] or piece["name"]) and (assigned is None or piece.start() < assigned.end()):
                parts = [one for part in parts for one in _FIELD.findall(part)]
            if parts:
                is_there = True
                text.append(parts[0])
                if len(parts) > 1:
                    fields += ["".join(text), *parts[1:-1]]
                    text = [parts[-1]]
        return [Word(one, line) for one in [*fields, "".join(text)]] if is_there else []

    def _value(self, piece: re.Match[str]) -> list[str]:
        """Return what stands for a piece of a word."""
        given = piece.groupdict()
        if given["braces"] or given["name"]:
            return self._variable(given["name"] or given["braces"][2:-1], piece[0])
        if given["aside"]:
            return [marked(given["aside"])]
        if given["escaped"] is not None:
            return [given["escaped"].replace("\n", "")]
        if given.get("double") is None:
            return [given["single"][1:-1] if given.get("single") else piece[0]]
        if _ARRAY.fullmatch(piece[0]):
            return self._variable(piece[0][1:-1].strip("${}"), piece[0][1:-1])
        return [self.quoted(piece[0][1:-1])]

    def quoted(self, text: str) -> str:
        """Return the text in double quotes with its variables inserted."""
        return "".join(" ".join(self._value(piece)) for piece in _PIECE_IN_QUOTES.finditer(text))

    def _variable(self, body: str, written: str) -> list[str]:
        match = _BODY.fullmatch(body)
        if match is None:
            return [marked(written)]
        if names_secret(match[1]):
            return [marked(f"${match[1]}")]
        value = self.variables.get(match[1])
        is_set = value is not None and any(value)
        if match[2] == "+" and not is_set:
            return []
        if match[2] and is_set == (match[2] == "+"):
            return [self.quoted(re.sub(r"^(['\"])(.*)\1$", r"\2", match[3], flags=re.DOTALL))]
        if value is None:
            return [marked(written)]
        self._count(sum(map(len, value)) + len(value))
        return list(value)

    def _count(self, spent: int) -> None:
        self.spent += spent
        if self.spent > MAX_INSERTED:
            raise ProfileError(f"variables insert more than {MAX_INSERTED >> 10} KiB of text")

    def _command(self, words: list[Word], depth: int) -> None:
        at, is_conditional, self.is_after_test = 0, self.is_after_test, False
        assigned: dict[str, Word] = {}
        while at < len(words) and ((match := _ASSIGNED.match(words[at])) or words[at] in _IN_FRONT):
            word = words[at]
            at += 1
            if match is not None:
                assigned[match[1]] = self._assigned(match, word)
            elif word in _OPENS:
                self.open_conditions += 1
                self.left.setdefault("if", Left(word, _LISTED, word.line))
                if word == "for" and at < len(words):
                    self.variables[str(words[at])] = [marked(f"${words[at]}")]
        del words[:at]
        name = words[0].rpartition("/")[2] if words else ""
        if name in _CLOSES:
            self.open_conditions = max(0, self.open_conditions - 1)
        elif name in _TESTS:
            self.left.setdefault("if", Left(name, _LISTED, words[0].line))
            self.is_after_test = True
        elif not words:
            for variable, word in assigned.items():
                self._set(variable, [word], is_conditional=is_conditional)
        elif name in _DECLARES:
            self._declare(words, is_conditional=is_conditional)
        elif name == "unset":
            for one in words[1:]:
                self.variables.pop(one, None)
                self.exported.pop(one, None)
        elif name == "eval":
            self.read(" ".join(words[1:]), words[0].line, depth + 1)
        elif name in ("source", ".") and len(words) > 1:
            what = f"{name} {finished(words[1])}"
            self.left.setdefault(what, Left(what, "other files are not read", words[0].line))
        else:
            self.find(words, assigned, depth)

    def find(
        self, words: Sequence[Word], assigned: Mapping[str, Word] | None = None, depth: int = 0, *, image: str = ""
    ) -> None:
        """Add what this command starts, also inside of a text or a container. It runs in a container of `image`."""
        name = words[0].rpartition("/")[2] if words else ""
        if _NO_START.fullmatch(name):
            return
        container = contained(words)
        line = words[0].line if words else 0
        left: tuple[Left, ...] = ()
        if container is not None:
            image, words = container.image, container.words
            left = tuple(replace(one, what=str(finished(Word(one.what)))) for one in container.left)
        is_entered = container is None or container.is_entered
        if (found := started(words, image if is_entered else "")) is not None:
            environment = self._environment_of(container, name, assigned)
            environment |= {
                one[1]: Word(word[one.end() :], word.line)
                for word in words[: found.at]
                if (one := _ASSIGNED.match(word)) and not one[2]
            }
            if len(self.launches) == MAX_LAUNCHES:
                raise ProfileError(f"more than {MAX_LAUNCHES} commands start an engine")
            if "--help" not in found.words:
                launch = Launch(
                    f"line-{line}",
                    found.kind,
                    tuple(map(finished, found.words)),
                    {name: finished(word) for name, word in environment.items()},
                    line=line,
                    left=left,
                    command=found.command,
                    image=str(finished(Word(image))),
                )
                self.launches.append(launch)
            return
        for at, word in enumerate(words):
            is_script = at > 0 and _BEHIND.fullmatch(words[at - 1]) and "$" in word
            if is_script or (STARTS.search(word) and re.search(r"\s", word)):
                before, environment = len(self.launches), self._environment_of(container, name, assigned)
                self._nest(word, word.line, depth, environment=environment, arguments=words[at + 2 :])
                self.launches[before:] = [replace(one, left=(*left, *one.left)) for one in self.launches[before:]]

    def _environment_of(
        self, container: Container | None, program: str, assigned: Mapping[str, Word] | None
    ) -> dict[str, Word]:
        """Return the variables of a process that the text starts; one on another machine has other ones."""
        if container is not None:
            return dict(container.environment)
        values = ((name, self.variables.get(name, [])) for name in (() if program in _ELSEWHERE else self.exported))
        found = {name: value[0] for name, value in values if len(value) == 1}
        return {name: Word(text, getattr(text, "line", 0)) for name, text in found.items()} | dict(assigned or {})

    def _nest(
        self,
        text: str,
        line: int,
        depth: int,
        *,
        environment: Mapping[str, Word] | None = None,
        arguments: Sequence[Word] | None = None,
        inherits: bool = False,
    ) -> None:
        self._count(len(text) + len(environment or ()) + len(arguments or ()))
        inside = CommandText(environment, arguments, spent=self.spent)
        if inherits:
            inside.variables, inside.exported = dict(self.variables), dict(self.exported)
        inside.read(text, line, depth + 1)
        self.spent = inside.spent
        self.launches += inside.launches
        self.documents += inside.documents
        self.left |= inside.left

    def _declare(self, words: list[Word], *, is_conditional: bool) -> None:
        for word in words[1:]:
            match = _ASSIGNED.match(word)
            if match is not None:
                self._set(match[1], [self._assigned(match, word)], is_conditional=is_conditional)
            if words[0] == "export" or "-x" in words:
                self.exported[match[1] if match is not None else str(word)] = None

    def _assigned(self, match: re.Match[str], word: Word) -> Word:
        """Return the value of `NAME=value` or `NAME+=value`."""
        before = " ".join(self.variables.get(match[1], [])) if match[2] else ""
        self._count(len(before))
        return Word(f"{before}{word[match.end() :]}", word.line)

    def _set(self, name: str, value: list[str], *, is_conditional: bool = False) -> None:
        """Set a variable. Of two values that a condition decides, none is chosen; more words of the same are taken, and
        the default of an option of the script."""
        before = self.variables.get(name)
        if (self.open_conditions or is_conditional) and before and any(before):
            text, text_before = " ".join(value), " ".join(before)
            if _OPTION.match(text):
                return
            if text != text_before and not text.startswith(f"{text_before} "):
                value = [marked(f"${name}")]
        self.variables[name] = value
