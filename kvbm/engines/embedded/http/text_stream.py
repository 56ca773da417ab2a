"""Text stream: the text of one answer as its tokens arrive, in whole characters and without stop strings.

                   sent text │ held back            │ bytes of an unfinished character
    ─────────────────────────┼──────────────────────┼─────────────────────────────────
                             │ may begin a stop     │ decodes to U+FFFD until the
                             │ string               │ tokens that complete it arrive

One request uses it on the event loop. A streamed answer and a whole answer have the same text, because both come from
here.

`tokenizers.DecodeStream` (0.23) does less: it never returns an unfinished character at the end, and needs a Rust
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"
MAX_UNFINISHED = 3  # an unfinished character has up to three bytes; some tokenizers decode each to U+FFFD

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Converts token ids to text incrementally; text that was returned does not change.

    It calls `decode` on a window of few tokens: the text of a token may depend on its left neighbour (a leading space)
    and on its right one (the rest of a character), but not on all tokens.

        token ids   0 ......... context ......... start ......... end
                    not needed  │ decoded again   │ text not fully returned yet
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._context = 0
        self._start = 0
        self._returned = 0  # characters of the text from `start` on that were returned

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that has become final with these tokens; may be empty."""
        self._token_ids += token_ids
        return self._take(final=False)

    def finish(self) -> str:
        """Return the text that was held back; an unfinished character becomes U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        text = self._window_text()
        held = 0 if final else _unfinished_length(text)
        new = text[self._returned : len(text) - held]
        self._returned = max(self._returned, len(text) - held)
        if text and not text.endswith(REPLACEMENT):  # a token without text keeps the context of the next one
            self._context, self._start, self._returned = self._start, len(self._token_ids), 0
        return new

    def _window_text(self) -> str:
        """Return the text from `start` on. Drops the context if its text changes because of the tokens behind it."""
        known = self._decode(self._token_ids[self._context : self._start])
        text = self._decode(self._token_ids[self._context :])
        if text.startswith(known):
            return text[len(known) :]
        self._context = self._start
        return self._decode(self._token_ids[self._start :])


def _unfinished_length(text: str) -> int:
    """Return how many characters at the end of `text` may still change with further tokens."""
    tail = text[-MAX_UNFINISHED:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopFinder:
    """Cuts text, which arrives in parts, before the first stop string in it.

    The stop string with the earliest start wins; among those with the same start, the longest one that is complete
    when the first of them is complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """Return the text that can be sent. Once `found` is set, no text follows."""
        self._held += text
        matches = [(position, stop) for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if matches:
            position, self.found = min(matches, key=lambda match: match[0])
            return self._give(position)
        return self._give(len(self._held) - self._partial_stop_length())

    def finish(self) -> str:
        """Return the text that was held back for a stop string that did not come."""
        return self._give(len(self._held))

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given

    def _partial_stop_length(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), len(self._stops[0]) - 1 if self._stops else 0)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Converts tokens to the text to send. Stop strings apply only to text after the first `min_tokens` tokens."""

    def __init__(self, decode: Decode, *, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(decode)
        self._finder = StopFinder(stop)
        self._min_tokens = min_tokens
        self.token_count = 0
        self.characters = 0  # decoded so far, sent or held back

    @property
    def found_stop(self) -> str | None:
        return self._finder.found

    def add(self, token_id: int) -> str:
        """Return the text to send after this token. Must not be called once `found_stop` is set."""
        self.token_count += 1
        return self._search(self._detokenizer.add([token_id]))

    def finish(self) -> str:
        """Return the rest of the text after the last token. May still find a stop string."""
        text = self._search(self._detokenizer.finish())
        return text if self.found_stop is not None else text + self._finder.finish()

    def _search(self, text: str) -> str:
        self.characters += len(text)
        if self.token_count > self._min_tokens:
            return self._finder.add(text)
        return text
