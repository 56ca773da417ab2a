"""The YAML reader: what it takes for what, and that nothing gets past it unmarked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.config.document import Document, Source, parse_document, plain_scalar, plain_values, together
from kvbm.errors import ProfileError


def read_document(text, *, label, noun="profile"):
    document, mistakes = parse_document(text, label=label, noun=noun)
    if mistakes:
        raise together(mistakes)
    return document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("no", "no"),
        ("", None),
        ("~", None),
        ("null", None),
        ("0", 0),
        ("-0", 0),
        ("010", "010"),
        ("-010", "-010"),
        ("007.5", "007.5"),
        ("0.5", 0.5),
        ("0o17", "0o17"),
        ("\u0661", "\u0661"),
        ("-3", -3),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("1e3", 1000.0),
        (".5", 0.5),
        (".inf", ".inf"),
        ("nan", "nan"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
    ],
)
def test_only_true_and_false_are_booleans_and_only_decimals_without_leading_zeros_are_numbers(
    text: str, value: object
) -> None:
    assert plain_scalar(text) == value
    assert type(plain_scalar(text)) is type(value)


def test_quotes_make_text_of_anything() -> None:
    assert plain_values(read_document("a: 'true'\nb: \"1\"\nc: 1\n", label="f")) == {"a": "true", "b": "1", "c": 1}


def test_every_entry_knows_its_place() -> None:
    document = read_document("a:\n  b: {c: 12}\n", label="f.yaml")
    inner = document["a"].section["b"].section["c"]  # type: ignore[index]
    assert inner.key == Source("f.yaml", "  b: {c: 12}", 6, 1, 2)
    assert inner.source == Source("f.yaml", "  b: {c: 12}", 9, 2, 2)
    assert inner.source.origin == "f.yaml:2"


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(ProfileError, match="nested too deeply\n  f"):
        read_document("a: " + "[" * 5000 + "]" * 5000, label="f")


def test_empty_file_is_an_empty_document() -> None:
    assert read_document("# nothing\n", label="f") == {}


def test_excerpt_points_under_the_span() -> None:
    assert Source("f.yaml", "key: value", 5, 5, 12).excerpt() == (
        "  f.yaml:12:6\n     |\n  12 | key: value\n     |      ^^^^^"
    )


def test_excerpt_of_a_long_line_is_cut_around_the_span() -> None:
    lines = Source("f", "x" * 500 + "!" + "y" * 500, 500, 1, 1).excerpt().splitlines()
    assert max(map(len, lines)) < 110
    assert lines[2][lines[3].index("^")] == "!"


@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"#\n \t,?1\x07é\x85\u2028\u200b"), max_size=60))
def test_any_text_is_a_document_or_a_profile_error(text: str) -> None:
    try:
        document = read_document(text, label="f")
    except ProfileError:
        return
    assert_marked(document, text.splitlines())


def assert_marked(document: Document, lines: list[str]) -> None:
    for entry in document.values():
        assert entry.key.line is not None
        assert entry.key.text in [*lines, ""]
        assert entry.source.excerpt()
        if entry.section is not None:
            assert_marked(dict(entry.section), lines)


def test_a_character_that_no_editor_shows_is_an_escape_in_a_message() -> None:
    with pytest.raises(ProfileError) as caught:
        read_document("a\u200b: 1\na\u200b: 2\n", label="f")
    assert caught.value.message.splitlines()[0] == "`a\\u200b` appears twice; the first is on line 1"
    assert "2 | a·: 2" in caught.value.message
