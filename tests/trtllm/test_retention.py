"""Retention configurations of TensorRT-LLM become hints."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from kvbm.engines.trtllm.retention import hint_of
from kvbm.leader.hints import HIGH_S, Hint, parsed


def request(*ranges):
    config = SimpleNamespace(token_range_retention_configs=[SimpleNamespace(**one) for one in ranges])
    return SimpleNamespace(kv_cache_retention_config=config)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (SimpleNamespace(), None),
        (SimpleNamespace(kv_cache_retention_config=None), None),
        (request(), None),
        (request({"token_start": 0, "priority": 35}), None),
        (request({"token_start": 64, "priority": 90}), None),
        (request({"token_start": 0, "priority": 90}), Hint(retain_s=HIGH_S)),
        (request({"token_start": 0, "priority": 90, "duration_ms": None}), Hint(retain_s=HIGH_S)),
        (request({"token_start": 0, "priority": 90, "duration_ms": timedelta(seconds=7)}), Hint(retain_s=7.0)),
        (request({"token_start": 0, "priority": 90, "duration_ms": 7000}), Hint(retain_s=7.0)),
        (request({"token_start": 0, "priority": 0, "duration_ms": 7000}), Hint(demotes=True)),
        (request({"token_start": 0, "priority": "high"}), None),
    ],
)
def test_the_first_range_of_a_retention_configuration_is_a_hint(asked, expected):
    assert parsed(hint_of(asked)) == expected
