"""Spellings that users bring along, and the spelling of kvbm that hints show."""

from __future__ import annotations

import pytest

from kvbm.config.spelling import snake_case, unquoted


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("maxModelLen", "max_model_len"),
        ("--max-model-len", "max_model_len"),
        ("MAX_MODEL_LEN", "max_model_len"),
        ("enableLoRA", "enable_lora"),
        ("kvCacheDType", "kv_cache_dtype"),
        ("KVCacheDtype", "kv_cache_dtype"),
        ("diskTimeoutS", "disk_timeout_s"),
        ("o_direct", "o_direct"),
    ],
)
def test_a_name_is_converted_to_the_form_of_keys(name: str, key: str) -> None:
    assert snake_case(name) == key


@pytest.mark.parametrize("text", ['"100"', "'100'", "“100”", "\"'100'\""])
def test_quotes_around_a_value_are_recognised(text: str) -> None:
    assert unquoted(text) == "100"


@pytest.mark.parametrize("text", ["100", "a#b", "/a'b", '"open', "it's", '"'])
def test_a_value_as_it_should_be_is_left_alone(text: str) -> None:
    assert unquoted(text) is None
