"""The text of one answer as its tokens arrive: whole characters only, and nothing of a stop string.

                   sent text │ held back            │ bytes of an unfinished character
    ─────────────────────────┼──────────────────────┼─────────────────────────────────
                             │ may begin a stop     │ decodes to U+FFFD until the
                             │ string               │ tokens that complete it arrive

Used by one request on the event loop. The text of a streamed answer, joined, equals that of the same answer in one
piece, because both are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"
MAX_UNFINISHED = 3  # an unfinished character is up to three bytes, and some tokenizers show each of them as U+FFFD
LONG_WINDOW_TOKENS = 48

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Token ids to text, in pieces that are final.

    `decode` is called on a window of few tokens: what a token means may depend on its left neighbour (a leading space)
    and on its right one (the rest of a character), but not on all of them.

        token ids   0 ......... context ......... start ......... end
                    forgotten   │ decoded again   │ text not all given out yet
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._context = 0
        self._start = 0
        self._given = 0  # characters of the text from `start` on that were given out

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that has become final with these tokens; may be empty."""
        self._token_ids += token_ids
        return self._take(final=False)

    def finish(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        text = self._window_text()
        held = 0 if final else _unfinished_length(text)
        new = text[self._given : len(text) - held]
        self._given = max(self._given, len(text) - held)
        is_long = (len(self._token_ids) - self._start) % LONG_WINDOW_TOKENS == LONG_WINDOW_TOKENS - 1
        if text.endswith(REPLACEMENT):
            if is_long:
                self._shorten(text)
        elif text or is_long:  # a token without text keeps the context of the next one
            self._context, self._start, self._given = self._start, len(self._token_ids), 0
        return new

    def _window_text(self) -> str:
        """The text from `start` on. A context that a broken character at its right turns into another is dropped."""
        known = self._decode(self._token_ids[self._context : self._start])
        text = self._decode(self._token_ids[self._context :])
        if text.startswith(known):
            return text[len(known) :]
        self._context = self._start
        return self._decode(self._token_ids[self._start :])

    def _shorten(self, text: str) -> None:
        """Of a long run of broken characters, forget those before a token that certainly begins a new one."""
        for start in range(len(self._token_ids) - 1, self._start, -1):
            before = self._decode(self._token_ids[self._context : start])
            known = self._decode(self._token_ids[self._context : self._start])
            if before + self._decode(self._token_ids[start:]) == known + text:
                given = self._given - (len(before) - len(known))
                if given >= 0:
                    self._context, self._start, self._given = start, start, given
                    return


def _unfinished_length(text: str) -> int:
    """How many characters at the end of `text` further tokens may still change."""
    tail = text[-MAX_UNFINISHED:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopFinder:
    """Cuts a text, which comes in pieces, before the first stop string in it.

    Of several stop strings the one that begins first wins, and of those that begin together the longest that is
    complete when the first of them is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """The text that can be sent. Once `found` is set, this was the last."""
        self._held += text
        matches = [(position, stop) for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if matches:
            position, self.found = min(matches, key=lambda match: match[0])
            return self._give(position)
        return self._give(len(self._held) - self._beginning_length())

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        return self._give(len(self._held))

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given

    def _beginning_length(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = min(len(self._held), len(self._stops[0]) - 1 if self._stops else 0)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Tokens in, text to send out. `stop` strings count only in text that comes after `min_tokens` tokens."""

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
        """The text to send after this token. Not to be called once `found_stop` is set."""
        self.token_count += 1
        return self._search(self._detokenizer.add([token_id]))

    def finish(self) -> str:
        """The rest of the text, when no token follows. May still find a stop string."""
        text = self._search(self._detokenizer.finish())
        return text if self.found_stop is not None else text + self._finder.finish()

    def _search(self, text: str) -> str:
        self.characters += len(text)
        if self.token_count > self._min_tokens:
            return self._finder.add(text)
        return text
