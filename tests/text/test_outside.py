"""How text from outside looks in a message."""

from __future__ import annotations

import json

import pytest
from cpu_time import cpu_s

from kvbm.errors import KvbmError
from kvbm.text.outside import (
    MAX_LINE,
    MAX_SHOWN,
    fit_for_message,
    is_secret_name,
    one_line,
    shown,
    shown_json,
    without_secret_value,
    without_secrets,
)

HUGE = "\n" * 30_000_000


@pytest.mark.parametrize(
    "value",
    [
        HUGE,
        HUGE.encode(),
        [HUGE] * 1000,
        {HUGE: HUGE},
        dict.fromkeys(range(100_000), "x"),
        1 << 10_000_000,
        [[[[["deep"]]]]],
        ["a"] * 5_000_000,
        "\x1b[2J" * 200,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_any_size_is_one_short_line_and_takes_no_time(value: object) -> None:
    assert cpu_s(lambda: [shown(value), shown_json(value)]) < 0.05
    for text in (shown(value), shown_json(value)):
        assert len(text) <= MAX_SHOWN
        assert text.isprintable()


@pytest.mark.parametrize("value", [None, True, 7, 1.5, "a text", [1, "b"], {"a": [None, False]}])
def test_a_short_value_is_shown_whole(value: object) -> None:
    assert shown_json(value) == json.dumps(value)
    assert shown(value) == (value if isinstance(value, str) else json.dumps(value))


def test_a_line_obeys_nothing() -> None:
    assert one_line("a\nERROR: forged\x1b]0;x\x07\u202e") == r"a\x0aERROR: forged\x1b]0;x\x07\u202e"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://user:pa/ss@host/bucket", "s3://***@host/bucket"),
        ("http://key@host:80/a, http://b:c@d", "http://***@host:80/a, http://***@d"),
        ("http://host:8000/v1?a=1&x=2", "http://host:8000/v1?a=1&x=2"),
        ("http://host:8000/user@example", "http://host:8000/user@example"),
        ("az://c/p?sv=2024&sig=abc%2F&se=1", "az://c/p?sv=2024&sig=***&se=1"),
        (
            "https://b/x?X-Amz-Credential=AK&X-Amz-Signature=ff`",
            "https://b/x?X-Amz-Credential=***&X-Amz-Signature=***`",
        ),
        ("env HF_TOKEN=hf_abc VLLM_API_KEY=k A=1", "env HF_TOKEN=*** VLLM_API_KEY=*** A=1"),
        ('  HF_TOKEN: "hf_abc"', '  HF_TOKEN: "***"'),
        ('{"AWS_SECRET_ACCESS_KEY": "x", "B": "y"}', '{"AWS_SECRET_ACCESS_KEY": "***", "B": "y"}'),
        ("max_tokens: 5, prefix_cache_key=3", "max_tokens: 5, prefix_cache_key=3"),
        ("serve x --api-key 'k' --hf-token=t --max-tokens 5", "serve x --api-key '***' --hf-token=*** --max-tokens 5"),
        ("remove `--api-key`, or --tokenizer x", "remove `--api-key`, or --tokenizer x"),
        ("set `AWS_SECRET_ACCESS_KEY`, or HF_TOKEN", "set `AWS_SECRET_ACCESS_KEY`, or HF_TOKEN"),
    ],
)
def test_secrets_are_hidden_and_the_rest_stays(text: str, expected: str) -> None:
    assert without_secrets(text) == expected
    assert without_secrets(expected) == expected


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "DB_PASSWD", "api-key", "engine.arguments.api_key")
        ),
        *((name, False) for name in ("MAX_TOKENS", "TOKENIZERS_PARALLELISM", "key_file", "PREFIX_CACHE_KEY")),
        *((name, False) for name in ("long_prefill_token_threshold", "PAD_TOKEN_ID", "HF_TOKEN_PATH")),
    ],
)
def test_one_rule_tells_secret_names_in_text_and_in_displayed_values(name: str, is_secret: bool) -> None:
    expected = "***" if is_secret else "a b"
    assert (is_secret_name(name), without_secret_value(name, "a b")) == (is_secret, expected)
    if name.isupper():
        assert without_secrets(f"env {name}=a") == f"env {name}={'***' if is_secret else 'a'}"


def test_secrets_within_a_value_are_hidden() -> None:
    config = {"url": "redis://:pw@h", "inside": [{"s3_access_key": "abc", "size": 5}]}
    assert without_secret_value("config", config) == {
        "url": "redis://***@h",
        "inside": [{"s3_access_key": "***", "size": 5}],
    }
    assert without_secrets(json.dumps(config["inside"])) == '[{"s3_access_key": "***", "size": 5}]'


def test_an_error_shortens_what_it_quotes_and_keeps_the_rest() -> None:
    error = KvbmError(f"`key` must be a number, not `{'x' * 5000}`\n  in line 7", hint="see http://a:b@c")
    assert str(error) == error.message == f"`key` must be a number, not `{'x' * (MAX_SHOWN - 3)}...`\n  in line 7"
    assert error.hint == "see http://***@c"
    assert len(fit_for_message("y" * 10_000_000)) == MAX_LINE


def test_only_what_is_quoted_is_shortened() -> None:
    ours = "these are words of kvbm " * 12
    assert fit_for_message(f"`a` is wrong: {ours} `b`") == f"`a` is wrong: {ours} `b`"
    assert len(fit_for_message("`" + "x" * 10_000_000)) < 2 * MAX_SHOWN
