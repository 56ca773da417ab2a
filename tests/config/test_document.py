"""The YAML reader: what it takes for what, and that nothing gets past it unmarked."""

import time

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


MISTAKES = {
    "duplicate": ("a: 1\nb: 2\na: 3\n", "`a` appears twice; the first is on line 1", "3:1"),
    "duplicate in a section": ("x:\n  a: 1\n  a: 1\n", "`a` appears twice; the first is on line 2", "3:3"),
    "alias": ("a: &x 1\nb: *x\n", "not valid YAML: aliases are not supported; use `extends` to share keys", "2:4"),
    "alias to itself": (
        "a: &x [*x]\n",
        "not valid YAML: aliases are not supported; use `extends` to share keys",
        "1:8",
    ),
    "tag": ("a: !!python/object:os.system x\n", "YAML tags are not supported", "1:4"),
    "standard tag": ("a: !!int '3'\n", "YAML tags are not supported", "1:4"),
    "list at the top": ("- a\n", "a profile must be a mapping of keys", "1:1"),
    "text at the top": ("hello\n", "a profile must be a mapping of keys", "1:1"),
    "key that is a list": ("? [a]\n: 1\n", "a key must be text", "1:3"),
    "two documents": ("a: 1\n---\nb: 1\n", "not valid YAML: a second document starts here", "2:1"),
    "open bracket": ("a: [1\n", "not valid YAML: a bracket is not closed", "1:6"),
    "tab": ("a:\n\tb: 1\n", "not valid YAML: a tab in the indentation; YAML requires spaces", "2:1"),
    "control character": ("a: 1\nb: \x07", "not valid YAML: the character U+0007 is not allowed", "2:4"),
    "NUL": ('a: "\\0"\n', "a value must not contain a NUL character", "1:4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_yaml_is_shown_at_its_place(name: str) -> None:
    text, message, place = MISTAKES[name]
    with pytest.raises(ProfileError) as caught:
        read_document(text, label="f.yaml")
    assert caught.value.message.splitlines()[:2] == [message, f"  f.yaml:{place}"]


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


@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"#\n \t,?1\x07é"), max_size=60))
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


# Text, and the line and column of the mistake, the character, and what the text means without it.
LOOKALIKES = {
    "in the indentation": ("a:\n\u00a0 b: 1\n", "2:1", "no-break space (U+00A0)", {"a": {"b": 1}}),
    "after a colon": ("a: 1\nb:\u00a02\nc: 3\n", "2:3", "no-break space (U+00A0)", {"a": 1, "b": 2, "c": 3}),
    "after a colon of a section": ("a:\n  b:\u202f2\n", "2:5", "narrow no-break space (U+202F)", {"a": {"b": 2}}),
    "at the end of a value": ("a: 1\u3000\n", "1:5", "ideographic space (U+3000)", {"a": 1}),
    "in a key": ("a\u200bb: 1\n", "1:2", "zero width space (U+200B)", {"ab": 1}),
    "in a list": ("a: [1, 2\u2060]\n", "1:9", "word joiner (U+2060)", {"a": [1, 2]}),
    "in brackets": ("{a: 1,\u00a0b: 2}\n", "1:7", "no-break space (U+00A0)", {"a": 1, "b": 2}),
    "a mark in the middle": ("a: 1\n\ufeffb: 2\n", "2:1", "zero width no-break space (U+FEFF)", {"a": 1, "b": 2}),
    "quotes": ("a: \u201ctrue\u201d\n", "1:4", "left double quotation mark (U+201C)", {"a": True}),
    "quotes around a colon": ("a: \u201cb: c\u201d\n", "1:4", "left double quotation mark (U+201C)", {"a": "b: c"}),
    "a single quote": ("a: 1\u2019\n", "1:5", "right single quotation mark (U+2019)", {"a": 1}),
    "a line break": ("a: 1 #\u2028x\nb: 2\n", "1:7", "line separator (U+2028)", {"a": 1, "b": 2}),
}


@pytest.mark.parametrize("case", LOOKALIKES)
@pytest.mark.parametrize("break_", ["\n", "\r\n"])
def test_a_lookalike_has_its_line_and_column_and_is_the_only_mistake(case: str, break_: str) -> None:
    text, place, name, meant = LOOKALIKES[case]
    document, mistakes = parse_document(text.replace("\n", break_), label="f.yaml")
    assert len(mistakes) == 1
    assert f"f.yaml:{place}\n" in mistakes[0].message
    assert name in mistakes[0].message
    assert plain_values(document) == meant


@pytest.mark.parametrize(
    "text",
    [
        "a: 'b\u00a0c\u200b'\n",
        'a: "\u201cb\u201d"\n',
        "a: b  # c\u00a0d\n",
        "a: don\u2019t\n",
        "description: \u201ca\u201d\u00a0b\u200d\n",
        "a: |\n  b\u00a0c\n",
    ],
)
def test_quoted_text_comments_and_descriptions_may_have_any_character(text: str) -> None:
    assert parse_document(text, label="f")[1] == []


def test_a_file_full_of_lookalikes_is_refused_quickly() -> None:
    for text in ("\u00a0" * 40_000, "a:\u00a01\n" * 4_000, "\u201cx: y\u201d\n" * 2_000):
        begin = time.process_time()
        _, mistakes = parse_document(text, label="f")
        assert mistakes
        assert time.process_time() - begin < 10
