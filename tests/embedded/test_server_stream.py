"""From tokens to text: whole characters, exact cuts before stop strings, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvbm.engines.embedded.http.text_stream import Detokenizer, StopFinder, TextStream


def decode(token_ids: Sequence[int]) -> str:
    """A token is a byte; ids from 256 on have no text."""
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """A token is a word with a space before it, which the first one loses, as SentencePiece models do."""
    return "".join(f" w{token}" if token else "" for token in token_ids)[1:]


def decode_bytewise(token_ids: Sequence[int]) -> str:
    """A token is a byte; if the bytes are no UTF-8, each becomes U+FFFD, as byte fallback does."""
    try:
        return bytes(token_ids).decode()
    except UnicodeDecodeError:
        return "�" * len(token_ids)


def pieces(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add([token]) for token in token_ids), detokenizer.finish()]


@given(st.binary(max_size=300))
def test_pieces_of_any_bytes_join_to_the_text_of_all(content: bytes) -> None:
    assert "".join(pieces(Detokenizer(decode), content)) == content.decode(errors="replace")


@given(st.text(max_size=100))
def test_text_split_over_tokens_never_yields_a_broken_character(text: str) -> None:
    found = pieces(Detokenizer(decode), text.encode())
    assert "".join(found) == text
    assert all("�" not in piece for piece in found) or "�" in text


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="�"), max_size=60))
def test_byte_fallback_never_yields_a_broken_character(text: str) -> None:
    found = pieces(Detokenizer(decode_bytewise), text.encode())
    assert "".join(found) == text
    assert all("�" not in piece for piece in found)


@given(st.lists(st.integers(0, 9), max_size=200))
def test_spaces_between_words_survive_tokens_without_text(token_ids: list[int]) -> None:
    assert "".join(pieces(Detokenizer(decode_words), token_ids)) == decode_words(token_ids)


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    assert pieces(Detokenizer(decode), "a€".encode()[:-1]) == ["a", "", "", "�"]


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The obvious way: the whole text, cut before the stop string that begins first among those that end first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=st.text("ab.", max_size=40), stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4))
def test_text_is_cut_exactly_before_a_stop_string_that_comes_character_by_character(
    text: str, stops: list[str]
) -> None:
    finder = StopFinder(stops)
    sent = ""
    for character in text:
        sent += finder.add(character)
        if finder.found:
            break
    else:
        sent += finder.finish()
    assert (sent, finder.found) == cut(text, stops)


@given(
    text=st.text("ab.", max_size=40),
    stop=st.text("ab.", min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
)
def test_one_stop_string_cuts_at_the_same_place_however_the_text_is_split(
    text: str, stop: str, sizes: list[int]
) -> None:
    finder = StopFinder([stop])
    sent, rest = "", text
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        sent += finder.add(piece)
        if finder.found:
            break
    else:
        sent += finder.finish()
    assert sent == text.split(stop)[0]


def test_text_is_held_back_only_while_a_stop_string_may_be_beginning() -> None:
    finder = StopFinder(["END"])
    assert [finder.add(piece) for piece in ("abc", "E", "N", "x", "EN")] == ["abc", "", "", "ENx", ""]
    assert finder.finish() == "EN"


def test_a_stop_string_across_tokens_ends_the_stream() -> None:
    stream = TextStream(decode, stop=["ö!"])
    assert "".join(stream.add(token) for token in "schön, hö".encode()) == "schön, h"
    assert stream.found_stop is None
    assert stream.add(ord("!")) == ""
    assert stream.found_stop == "ö!"


def test_a_stop_string_in_the_last_held_back_text_is_still_found() -> None:
    stream = TextStream(decode, stop=["a�"])
    assert stream.add(ord("a")) + stream.add(0xE2) == ""
    assert stream.finish() == ""
    assert stream.found_stop == "a�"


def test_stop_strings_do_not_count_within_the_first_min_tokens() -> None:
    stream = TextStream(decode, stop=["x"], min_tokens=2)
    assert stream.add(ord("x")) + stream.add(ord("x")) == "xx"
    assert stream.found_stop is None
    assert stream.add(ord("x")) == ""
    assert stream.found_stop == "x"
