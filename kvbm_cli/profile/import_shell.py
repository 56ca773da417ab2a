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
from kvbm_cli.profile.import_launch import (
    MARKS,
    OTHER_FILES,
    STARTS,
    Launch,
    Left,
    Word,
    assignments,
    contained,
    started,
)
from kvbm_cli.profile.import_secrets import names_secret

MAX_INSERTED = 1 << 20  # characters
MAX_DEPTH = 8
MAX_LAUNCHES = 200
WITHOUT_MARKS = str.maketrans("", "", f"\0{MARKS}")

_SINGLE, _DOUBLE = r"'[^']*'", r"\"(?:\\.|[^\"\\])*\""
_ROUND = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ASIDE = rf"\${_ROUND}|`[^`]*`|\{{\{{[^{{}}]*\}}\}}|\ue000[^\ue001]*\ue001"  # commands, templates, and marked text
_VARIABLE = (
    r"(?P<braces>\$\{(?:[^{}]|\{[^{}]*\})*\})|(?P<name>\$(?:[A-Za-z_]\w*|[0-9@*?$#]))"
    rf"|(?P<aside>{_ASIDE})"
)
_PIECE = re.compile(
    r"(?P<blank>[ \t\r]+|\\\n|(?<![^\s;&|()])\#[^\n]*)|(?P<end>[\n;&|()]+)"
    r"|(?P<placeholder><[A-Za-z][\w.-]*(?: [\w.-]+)*>)|(?P<away>\d*[<>]+[&|]?[ \t]*)"
    rf"|(?P<array>[A-Za-z_]\w*\+?=\((?:{_SINGLE}|{_DOUBLE}|{_ASIDE}|(?<!\S)\#[^\n]*|[^()'\"])*+\))|{_VARIABLE}"
    rf"|(?P<single>{_SINGLE})|\$'(?P<ansi>(?:\\.|[^'\\])*)'|(?P<double>{_DOUBLE})|\\(?P<escaped>.)|(?P<plain>[^\s;&|()<>'\"\\$`{{\ue000]+|.)",
    re.DOTALL,
)
_PIECE_IN_QUOTES = re.compile(rf"{_VARIABLE}|\\(?P<escaped>[\"\\$`\n])|(?P<plain>[^$`{{\\\ue000]+|.)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_BODY = re.compile(r"([A-Za-z_]\w*|[0-9@*])(?:\[[@*]\])?(?::?([-=+])(.*))?", re.DOTALL)
_ARRAY = re.compile(r'"\$(?:@|\{\w+\[@\]\})"')
_MARKED = re.compile("\ue000([^\ue001]*)\ue001")
_OPTION = re.compile("\ue000\\$\\{?(?:[0-9]|OPTARG)")  # what a script is given
_FIELD = re.compile("(?:\ue000[^\ue001]*\ue001|\\S)+")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_HERE = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)")
_TARGET = re.compile(r"(?:>|\btee\b)[ \t]*([^\s<>;|&-][^\s<>;|&]*)")
_CONTAINERS = frozenset({"kubectl", "oc", "docker", "podman", "nerdctl"})
_FILED = re.compile(r"\b(?:cat|tee)\b")  # what makes a file of a here document
_KEPT = re.compile(r"\\(?=[\"\n])")  # backslashes that are text in a here document
_OPENS, _CLOSES = frozenset({"if", "while", "until", "for", "case"}), frozenset({"fi", "done", "esac"})
_DECLARES = frozenset({"export", "declare", "readonly", "typeset", "local"})
_IN_FRONT = _OPENS | _DECLARES | {"then", "else", "elif", "do", "{", "!", "time", "exec", "command"}
_NO_START = re.compile(
    r"echo|printf|pkill|pgrep|grep|which|type|trap|alias|curl|git|sed|awk|logger|log|info|warn|error|die|usage"
    r"|[A-Z][a-z]+"  # prose begins like this, and programs do not
)
_BEHIND = re.compile(r"-[a-z]*c|--")  # in front of a script
_MACHINES = frozenset({"ssh", "kubectl", "oc"})  # these run a command on another machine
_LISTED = "conditions and loops are not evaluated; every command is read once"


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


def characters_of(variables: Mapping[str, Word]) -> int:
    return sum(len(name) + len(word) for name, word in variables.items())


def require_few(characters: int) -> int:
    """Return how many characters variables have and insert. ProfileError for too many."""
    if characters > MAX_INSERTED:
        raise ProfileError(f"variables insert more than {MAX_INSERTED >> 10} KiB of text")
    return characters


def inserted(word: Word) -> Word:
    """Return the word with its variables inserted, as Compose does: `$$` is one `$`."""
    text = CommandText().quoted(word.replace("\\", "\\\\").replace("$$", "\\$"))
    return Word(text, word.line, is_plain=word.is_plain)


@dataclass(frozen=True, slots=True)
class HereDocument:
    """`target` is the file that it becomes, empty for none. `is_remote`: it is the commands of another machine, in
    which this one inserts its variables unless the document `is_quoted`."""

    target: str
    text: Word
    is_remote: bool
    is_quoted: bool


class CommandText:
    """What a text sets, and the engines that it starts. A variable has the value that it has at that place."""

    def __init__(self, environment: Mapping[str, Word] | None = None, *, spent: int = 0, depth: int = 0) -> None:
        self.variables: dict[str, list[str]] = {name: [word] for name, word in (environment or {}).items()}
        self.exported = dict.fromkeys(environment or ())
        self.launches: list[Launch] = []
        self.left: dict[str, Left] = {}
        self.documents: list[HereDocument] = []
        self.spent = require_few(spent + characters_of(environment or {}))  # with what variables insert
        self.depth = depth  # texts around this one
        self.open_conditions = 0
        self.exports_all = False  # `set -a`

    def read(self, text: str, line: int) -> None:
        """Find the engines that the text starts; those of here documents are read if there is no other."""
        if self.depth > MAX_DEPTH:
            raise ProfileError(f"line {line}: more than {MAX_DEPTH} scripts inside each other")
        first = len(self.documents)
        for words, is_conditional in self._commands(self._without_documents(text, line), line):
            self._command(words, is_conditional=is_conditional)
        for one in self.documents[first:]:
            is_script = one.text.startswith("#!") or one.target.endswith((".sh", ".sbatch", ".slurm"))
            if STARTS.search(one.text) is None:
                continue
            if one.is_remote:
                inserted_text = one.text if one.is_quoted else self.quoted(_KEPT.sub(r"\\\\", one.text))
                self._nest(Word(inserted_text, one.text.line), variables={}, exported={}, is_elsewhere=True)
            elif not one.target or (is_script and not self.launches):
                self._nest(one.text, variables=self.variables, exported=self.exported)

    def results(self) -> list[Launch]:
        left, files = self.left.values(), {one.target: one.text for one in self.documents}
        return [replace(one, left=(*one.left, *left), files={**files, **one.files}) for one in self.launches]

    def words(self, text: str, line: int) -> list[Word]:
        return [word for command, _ in self._commands(text, line) for word in command]

    def _without_documents(self, text: str, first: int) -> str:
        """Take here documents out of a text; empty lines take their place."""
        lines = text.split("\n")
        stripped = [line.strip() for line in lines]
        ends = {line: at for at, line in enumerate(stripped)}  # the last place of each
        kept: list[str] = []
        while len(kept) < len(lines):
            line, at = lines[len(kept)], len(kept) + 1
            kept.append(line)
            match = _HERE.search(line)
            if match is not None and ends.get(match[2], -1) >= at:
                end = stripped.index(match[2], at)
                inside = "".join(f"{one}\n" for one in lines[at:end])
                target = _TARGET.search(line)
                name = target[1].rpartition("/")[2] if target is not None else ""
                is_remote, is_quoted = _is_remote(line) and not _FILED.search(line), bool(match[1])
                text = inside if is_quoted or is_remote else inside.replace("\\$", "$")
                self.documents.append(HereDocument(name, Word(text, first + at), is_remote, is_quoted))
                kept += [""] * (end + 1 - at)
        return "\n".join(kept)

    def _commands(self, text: str, line: int) -> Iterator[tuple[list[Word], bool]]:
        """Yield the words of each command, and whether the success of the one in front of it decides about it."""
        words: list[Word] = []
        word: list[str] | None = None  # the parts of the word that is read
        first, is_target, is_conditional = line, False, False
        for piece in _PIECE.finditer(f"{text}\n"):
            kind = str(piece.lastgroup)
            if kind in ("blank", "end", "away"):
                if word is not None:
                    words += [] if is_target else [Word("".join(word), first)]
                    word, is_target = None, False
                if kind == "end":
                    if words:
                        yield words, is_conditional
                        words, is_conditional = [], False
                    is_conditional = is_conditional or "&&" in piece[0] or "||" in piece[0]
                is_target = kind == "away" or (is_target and kind == "blank")
            elif kind == "array":
                name, _, inside = piece[0][:-1].partition("=(")
                before = self.variables.get(name[:-1], []) if name.endswith("+") else []
                self._count(len(before))
                self._set(name.rstrip("+"), [*before, *self.words(inside, line)])
            elif piece[0] in ("'", '"'):
                raise OpenQuote(f"line {line}: a quote is not closed")
            else:
                parts = self._parts(kind, piece[0])
                if kind in ("braces", "name") and not (word and _ASSIGNED.match(word[0])):
                    parts = [field for part in parts for field in _FIELD.findall(part)]
                first = line if word is None else first
                for at, part in enumerate(parts):
                    if at and word is not None:
                        words.append(Word("".join(word), first))
                    if at or word is None:
                        word = []
                    word.append(part)  # never a copy: a word may have thousands of parts
            line += piece[0].count("\n")

    def _parts(self, kind: str, text: str) -> list[str]:
        """Return what stands for a piece of a word: several words for some variables."""
        if kind == "braces" or kind == "name":
            return self._variable(text[2:-1] if kind == "braces" else text[1:], text)
        if kind in ("aside", "placeholder"):
            return [marked(text)]
        if kind == "escaped":
            return [text[1:].replace("\n", "")]
        if kind == "single":
            return [text[1:-1]]
        if kind == "ansi":
            return [_ESCAPED.sub(lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text[2:-1])]
        if kind == "double" and _ARRAY.fullmatch(text):
            return self._variable(text[1:-1].strip("${}"), text[1:-1])
        if kind == "double":
            return [self.quoted(text[1:-1])]
        return [text]

    def quoted(self, text: str) -> str:
        """Return the text in double quotes with its variables inserted."""
        pieces = _PIECE_IN_QUOTES.finditer(text)
        return "".join(
            one[0] if one["plain"] is not None else " ".join(self._parts(str(one.lastgroup), one[0])) for one in pieces
        )

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
        self.spent = require_few(self.spent + spent)

    def _command(self, words: list[Word], *, is_conditional: bool) -> None:
        assigned: dict[str, Word] = {}
        declares: Word | None = None
        at = 0
        for word in words:
            if match := _ASSIGNED.match(word):
                before = " ".join(self.variables.get(match[1], [])) if match[2] else ""
                self._count(len(before))
                assigned[match[1]] = Word(f"{before}{word[match.end() :]}", word.line)
            elif word in _OPENS:
                self.left.setdefault("if", Left(word, _LISTED, word.line))
                self.open_conditions += 1
                if word == "for" and words[at + 1 :]:
                    self.variables[str(words[at + 1])] = [marked(f"${words[at + 1]}")]
            elif word in _DECLARES:
                declares = word
            elif declares == "export":
                self.exported[str(word)] = None
            elif declares is None and word not in _IN_FRONT:
                break
            at += 1
        words = words[at:]
        name = words[0].rpartition("/")[2] if words else ""
        if not words:
            for variable, value in assigned.items():
                self._set(variable, [value], is_conditional=is_conditional)
            if declares == "export" or self.exports_all:
                self.exported |= dict.fromkeys(assigned)
        elif name in _CLOSES:
            self.open_conditions = max(0, self.open_conditions - 1)
        elif name in ("[", "[[", "test"):
            self.left.setdefault("if", Left(name, _LISTED, words[0].line))
        elif name == "set" and words[1:] and (words[1][1:] == "a" or words[2:] == ["allexport"]):
            self.exports_all = words[1].startswith("-")
        elif name == "unset":
            for one in words[1:]:
                self.variables.pop(one, None)
                self.exported.pop(one, None)
        elif name in ("source", ".") and len(words) > 1:
            what = f"{name} {finished(words[1])}"
            self.left.setdefault(what, Left(what, OTHER_FILES, words[0].line))
        else:
            self.find(words, assigned)

    def find(self, words: Sequence[Word], assigned: Mapping[str, Word] | None = None, *, image: str = "") -> None:
        """Add what this command starts, also inside of a text or a container. It runs in a container of `image`."""
        name = words[0].rpartition("/")[2] if words else ""
        if _NO_START.fullmatch(name):
            return
        line = words[0].line if words else 0
        is_elsewhere = bool(image) or any(word.rpartition("/")[2] in _MACHINES for word in words)
        left: tuple[Left, ...] = ()
        front: Sequence[Word] = ()
        if (container := contained(words)) is not None:
            front = words[: len(words) - len(container.words)]
            image, words, is_elsewhere = container.image, container.words, True
            left = tuple(replace(one, what=str(finished(Word(one.what)))) for one in container.left)
        found = started(words, image)
        scripts = [at for at in range(len(words)) if found is None and _is_script(words, at)]
        if found is None and not scripts:
            return
        environment = ({} if name in _MACHINES else self.environment()) | dict(assigned or {})
        if container is not None:
            environment = container.environment(environment | assignments(front))
        if found is not None and "--help" not in found.words:
            if len(self.launches) == MAX_LAUNCHES:
                raise ProfileError(f"more than {MAX_LAUNCHES} commands start an engine")
            given = environment | assignments(words[: len(words) - len(found.words)])
            found = replace(
                found,
                name=f"line-{line}",
                words=tuple(map(finished, found.words)),
                environment={name: finished(word) for name, word in given.items()},
                left=left,
                line=line,
                is_elsewhere=is_elsewhere,
            )
            self.launches.append(found)
        for at in scripts:
            given = environment | assignments(words[:at])
            arguments = words[at + 2 :]
            variables: dict[str, list[str]] = {"@": [*arguments]}
            variables |= {name: [one] for name, one in given.items()}
            variables |= {str(number): [one] for number, one in enumerate(arguments, start=1)}
            exported = dict.fromkeys(given)
            self._nest(words[at], variables=variables, exported=exported, is_elsewhere=is_elsewhere, left=left)

    def environment(self) -> dict[str, Word]:
        """Return the variables that the text exports."""
        values = ((name, self.variables.get(name, [])) for name in self.exported)
        return {name: Word(one[0], getattr(one[0], "line", 0)) for name, one in values if len(one) == 1}

    def _nest(
        self,
        text: Word,
        *,
        variables: Mapping[str, list[str]],
        exported: Mapping[str, None],
        is_elsewhere: bool = False,
        left: tuple[Left, ...] = (),
    ) -> None:
        """Read a text that this one contains."""
        self._count(len(text) + len(variables))
        inside = CommandText(spent=self.spent, depth=self.depth + 1)
        inside.variables, inside.exported = dict(variables), dict(exported)
        inside.read(text, text.line)
        self.spent = inside.spent
        self.launches += [
            replace(one, left=(*left, *one.left), is_elsewhere=is_elsewhere or one.is_elsewhere)
            for one in inside.launches
        ]
        self.documents += inside.documents
        self.left |= inside.left

    def _set(self, name: str, value: list[str], *, is_conditional: bool = False) -> None:
        """Set a variable. Of two values that a condition decides, none is chosen; more words of the same are taken, and
        the default of an option of the script."""
        before = self.variables.get(name)
        if (self.open_conditions or is_conditional) and before and any(before):
            text, text_before = " ".join(value), " ".join(before)
            if _OPTION.match(text):
                return
            if text != text_before and not text.startswith(f"{text_before} "):
                value = [Word(marked(f"${name}"), getattr(next(iter(value), ""), "line", 0))]
        self.variables[name] = value


def _is_remote(line: str) -> bool:
    """Whether a command of this line runs its input on another machine or in a container."""
    names = [word.rpartition("/")[2] for word in line.split()]
    at = next((at for at, name in enumerate(names) if name in _CONTAINERS), len(names))
    return "ssh" in names or "exec" in names[at:]


def _is_script(words: Sequence[Word], at: int) -> bool:
    """Whether this word is a text of commands that may start an engine."""
    if at and "$" in words[at] and _BEHIND.fullmatch(words[at - 1]):
        return True
    return re.search(r"\s", words[at]) is not None and STARTS.search(_MARKED.sub("", words[at])) is not None


def launches_of(words: Sequence[Word], image: str, environment: Mapping[str, Word]) -> list[Launch]:
    """Return the engines that a command starts in a container of `image`, empty for none."""
    script = CommandText(environment)
    script.find(words, image=image)
    return script.results()
