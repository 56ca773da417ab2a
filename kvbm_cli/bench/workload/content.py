"""Random content of prompts: token ids for an engine with a tokenizer endpoint, text for any other server."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbm.errors import EngineError

Content = tuple[int, ...] | str
Tokenize = Callable[[str], list[int]]
LETTERS = string.ascii_letters + string.digits


class Writer(Protocol):
    """Writes random content. `content` returns `count` tokens, exactly for token ids and about for text.

    `encoded` returns a given text in the same form.
    """

    def content(self, generator: random.Random, count: int) -> Content: ...

    def encoded(self, text: str) -> Content: ...


def random_text(generator: random.Random, characters: int) -> str:
    """Words of random letters and digits, about 6 bits per character, so that users share no prefix."""
    words: list[str] = []
    length = 0
    while length < characters:
        word = "".join(generator.choices(LETTERS, k=generator.randint(3, 9)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)


MOST_DOUBLINGS = 6


def random_tokens(generator: random.Random, count: int, tokenize: Tokenize) -> tuple[int, ...]:
    """Exactly `count` tokens of random text. The text is doubled until it has enough tokens, MOST_DOUBLINGS times."""
    if count == 0:
        return ()
    for doublings in range(MOST_DOUBLINGS + 1):
        characters = (count + 16) << doublings
        if len(tokens := tokenize(random_text(generator, characters))) >= count:
            return tuple(tokens[:count])
    raise EngineError(f"the engine's tokenizer makes {len(tokens)} tokens of {characters} characters of English words")


LARGEST_POOL = 8192


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
