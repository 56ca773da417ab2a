"""Script: the requests of a workload in the order of their launches, without answers and times.

A prompt is a sequence of parts: content, or the answer to an earlier request. Requests share their parts as objects, so
that a script of long conversations takes little memory. Two prompts have a common prefix as long as their parts are
equal.

The phase of a request follows from a cache of unlimited size:

    cold      less than half of the prompt was sent before
    fill      the others, until half of all different tokens of the script have been sent once
    steady    the rest

A `Writer` makes random content: token ids for an engine with a tokenizer endpoint, text for any other server.
"""

from __future__ import annotations

import enum
import random
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from kvbm.errors import EngineError

Content = tuple[int, ...] | str
Tokenize = Callable[[str], list[int]]
LETTERS = string.ascii_letters + string.digits
MOST_DOUBLINGS = 6
LARGEST_POOL = 8192


class Phase(enum.StrEnum):
    COLD = "cold"
    FILL = "fill"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class AnswerOf:
    """The answer to an earlier request of the script, by its index; `tokens` is its length."""

    request: int
    tokens: int


class Image(str):
    """The URL of an image, as a part of a prompt. It belongs to the text after it, and has an unknown length."""

    __slots__ = ()


Part = Content | AnswerOf


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """`turn` counts from 1 in its session. `after` are indices of requests that must have ended, `delay_s` before.

    `at_s` is a launch time that the workload fixes, as a trace does. `body` is a whole body that the workload fixes,
    without the model; it then replaces the parts. `extra` are further fields of the body. `has_system` says whether the
    first of several parts is a system prompt.
    """

    session: int
    turn: int
    parts: tuple[Part, ...]
    answer_tokens: int | None
    after: tuple[int, ...] = ()
    delay_s: float = 0.0
    at_s: float | None = None
    path: str = "/v1/completions"
    body: tuple[tuple[str, object], ...] | None = None
    phase: Phase = Phase.COLD
    extra: tuple[tuple[str, object], ...] = ()
    has_system: bool = True

    @property
    def has_launch_time(self) -> bool:
        """Whether the workload fixes when it is launched, or what must have ended before."""
        return self.at_s is not None or bool(self.after)

    @property
    def prompt_token_count(self) -> int:
        return sum(map(length_of, self.parts))


@dataclass(frozen=True, slots=True)
class Script:
    """`warmup` is a prompt that no request contains. `working_set_tokens` is what the requests of one time use, and
    `total_tokens` what all different prompts and answers have together."""

    requests: tuple[ScriptedRequest, ...]
    warmup: Content
    working_set_tokens: int
    total_tokens: int

    @classmethod
    def of(
        cls, requests: Iterable[ScriptedRequest], *, warmup: Content, working_set_tokens: int | None = None
    ) -> Script:
        """Return a script with the phase of each request. Without a working set, all tokens are one."""
        listed = list(requests)
        prefixes = Prefixes()
        reused = []
        for index, request in enumerate(listed):
            sent = prefixes.token_count
            end, old, new = prefixes.add(request.parts)
            prefixes.add([AnswerOf(index, request.answer_tokens or 0)], after=end)
            reused.append((sent, old, new))
        total = prefixes.token_count
        return cls(tuple(_with_phases(listed, reused, total)), warmup, working_set_tokens or total, total)


def with_canned_answers(script: Script, write: Callable[[int], Content]) -> Script:
    """Return the same script with content of `write` instead of answers, so that no answer must be recorded."""
    written: dict[int, Content] = {}

    def canned(part: Part) -> Part:
        if not isinstance(part, AnswerOf):
            return part
        if part.request not in written:
            written[part.request] = write(part.tokens)
        return written[part.request]

    requests = tuple(replace(one, parts=tuple(map(canned, one.parts))) for one in script.requests)
    return replace(script, requests=requests)


def length_of(part: Part) -> int:
    """Tokens of a part; of text, a quarter of its characters, which is good enough for phases. 0 of an image."""
    if isinstance(part, AnswerOf):
        return part.tokens
    if isinstance(part, Image):
        return 0
    return len(part) // 4 if isinstance(part, str) else len(part)


def _with_phases(
    requests: Sequence[ScriptedRequest], reused: Sequence[tuple[int, int, int]], token_count: int
) -> Iterable[ScriptedRequest]:
    """`reused` has for each request all different tokens before it, and the tokens of its prompt that were sent before
    and that were not."""
    for request, (sent, old, new) in zip(requests, reused, strict=True):
        if request.body is not None and not request.parts:
            yield request  # its builder set the phase
            continue
        phase = Phase.COLD if old < new else Phase.FILL if 2 * sent < token_count else Phase.STEADY
        yield replace(request, phase=phase)


class Prefixes:
    """All prefixes of the prompts so far, as chains of part identities. `token_count` counts each prefix once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}
        self.token_count = 0

    def add(self, parts: Iterable[Part], *, after: int = 0) -> tuple[int, int, int]:
        """Return the number of the prefix that ends with the parts, their tokens that were known, and new ones.

        `after` is the number of the prefix in front of them.
        """
        node, old, new = after, 0, 0
        for part in parts:
            if not part:
                continue
            key = (node, part if isinstance(part, AnswerOf) else id(part))
            if key in self._numbers:
                old += length_of(part)
            else:
                self._numbers[key] = len(self._numbers) + 1
                new += length_of(part)
            node = self._numbers[key]
        self.token_count += new
        return node, old, new


class Writer(Protocol):
    """Writes random content. `content` returns `count` tokens, exactly for token ids and about for text.

    `encoded` returns a given text in the same form.
    """

    def content(self, generator: random.Random, count: int) -> Content: ...

    def encoded(self, text: str) -> Content: ...


class LengthWriter:
    """Writes content with a length and without tokens, for a script that is counted and not sent."""

    def content(self, generator: random.Random, count: int) -> Content:
        return cast(Content, range(count))  # each is an object of its own, as Script requires

    def encoded(self, text: str) -> Content:
        return text


def random_text(generator: random.Random, characters: int) -> str:
    """Words of random letters and digits, about 6 bits per character, so that users share no prefix."""
    words: list[str] = []
    length = 0
    while length < characters:
        word = "".join(generator.choices(LETTERS, k=generator.randint(3, 9)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)


def random_tokens(generator: random.Random, count: int, tokenize: Tokenize) -> tuple[int, ...]:
    """Exactly `count` tokens of random text. The text is doubled until it has enough tokens, MOST_DOUBLINGS times."""
    if count == 0:
        return ()
    for doublings in range(MOST_DOUBLINGS + 1):
        characters = (count + 16) << doublings
        if len(tokens := tokenize(random_text(generator, characters))) >= count:
            return tuple(tokens[:count])
    raise EngineError(f"the engine's tokenizer makes {len(tokens)} tokens of {characters} characters of English words")


class TokenWriter:
    """Draws token ids from a pool: the tokens of one random text, counted by the engine's own tokenizer.

    A pool takes one request to the engine, whatever the length of the workload.
    """

    def __init__(self, tokenize: Tokenize, *, seed: int) -> None:
        self._tokenize = tokenize
        self._pool = random_tokens(random.Random(seed), LARGEST_POOL, tokenize)

    def content(self, generator: random.Random, count: int) -> tuple[int, ...]:
        return tuple(generator.choices(self._pool, k=count))

    def encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenize(text))


@dataclass(frozen=True, slots=True)
class TextWriter:
    """Writes text of about the length; `characters_per_token` was measured with the server."""

    characters_per_token: float

    def content(self, generator: random.Random, count: int) -> str:
        return random_text(generator, round(count * self.characters_per_token)) + " " if count else ""

    def encoded(self, text: str) -> str:
        return text
