"""What a connector inside an engine resolves: the contents that a launcher wrote, or the DYN_KVBM_* variables."""

import logging
from typing import Any

import pytest

from kvbm.config.connector import resolve_connector
from kvbm.config.schema import ConnectorConfig, Profile
from kvbm.errors import ProfileError

GIGABYTES = "DYN_KVBM_CPU_CACHE_GB"
BLOCKS = "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"


def config(**sections: Any) -> ConnectorConfig:
    return ConnectorConfig.model_validate(sections)


def bare(*, host: dict[str, Any], **sections: Any) -> ConnectorConfig:
    """A configuration without a profile: all blocks are copied, and the least recently used ones are evicted."""
    tiers = {name: {"eviction": "lru", **tier} for name, tier in {"host": host, **sections.pop("tiers", {})}.items()}
    return config(tiers=tiers, offload={"to_host": "always"}, **sections)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({GIGABYTES: "2.5"}, bare(host={"capacity": "2500MB"})),
        ({BLOCKS: "100"}, bare(host={"blocks": 100})),
        ({GIGABYTES: "1", BLOCKS: "100"}, bare(host={"capacity": "1GB", "blocks": 100})),
        ({GIGABYTES: "1", BLOCKS: "0"}, bare(host={"capacity": "1GB"})),
        (
            {GIGABYTES: "1", "DYN_KVBM_DISK_CACHE_GB": "2"},
            bare(host={"capacity": "1GB"}, tiers={"disk": {"capacity": "2GB"}}),
        ),
        (
            {GIGABYTES: "1", "DYN_KVBM_MAX_CONCURRENT_TRANSFERS": "2", "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": "3"},
            bare(host={"capacity": "1GB"}, transfer={"max_concurrent": 2, "batch_blocks": 3}),
        ),
        (
            {GIGABYTES: "1", "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": "60", "PATH": "/bin"},
            bare(host={"capacity": "1GB"}, transfer={"init_timeout_s": 60.0}),
        ),
    ],
)
def test_variables_of_a_bare_command(variables: dict[str, str], expected: ConnectorConfig) -> None:
    assert resolve_connector({}, variables, engine="vllm") == expected


def test_contents_of_a_launcher_win_and_the_variables_are_not_even_read() -> None:
    contents = {"tiers": {"host": {"capacity": "3GiB"}}, "offload": {"generated": False}}
    resolved = resolve_connector(
        {"kvbm": contents, "other": 1}, {GIGABYTES: "wrong", "DYN_KVBM_TYPO": "1"}, engine="vllm"
    )
    assert resolved == config(**contents)


@pytest.mark.parametrize(
    ("engine", "to_host", "words"),
    [
        ("sglang", "on_evict", "requires `vllm`: `sglang` does not say"),
        ("tensorrt-llm", "on_evict", "requires `vllm`: `tensorrt-llm` does not say"),
        ("vllm", "second_hit", "requires `tiers.host.eviction: adaptive`"),
    ],
)
def test_a_setting_that_the_engine_or_the_tiers_cannot_follow_is_refused(engine: str, to_host: str, words: str) -> None:
    contents = {"tiers": {"host": {"blocks": 7, "eviction": "lru"}}, "offload": {"to_host": to_host}}
    with pytest.raises(ProfileError, match=f"`offload.to_host` `{to_host}` {words}"):
        resolve_connector({"kvbm": contents}, {}, engine=engine)


def test_keys_of_others_are_reported_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    for warns in (True, False):
        resolve_connector({"cache": {}}, {GIGABYTES: "1"}, engine="vllm", warns=warns)
    assert [record.levelno for record in caplog.records if "cache" in record.getMessage()] == [logging.WARNING]


def test_a_profile_arrives_as_it_was_sent() -> None:
    profile = Profile.model_validate({"engine": {"model": "m"}, "tiers": {"host": {"capacity": "1.5GB", "blocks": 7}}})
    sent = profile.connector_config()
    received = resolve_connector({"kvbm": sent.model_dump(mode="json")}, {}, engine="vllm")
    assert received == sent
    assert received.digest() == sent.digest()


def test_digests_differ_with_every_value() -> None:
    values: list[dict[str, Any]] = [
        {"tiers": {"host": {"blocks": 1}}},
        {"tiers": {"host": {"blocks": 2}}},
        {"tiers": {"host": {"capacity": "1GB"}}},
        {"tiers": {"host": {"capacity": "1GiB"}}},
        {"tiers": {"host": {"blocks": 1}}, "offload": {"generated": False}},
        {"tiers": {"host": {"blocks": 1}}, "transfer": {"batch_blocks": 1}},
    ]
    assert len({config(**value).digest() for value in values}) == len(values)


@pytest.mark.parametrize("key", ["capacity", "blocks"])
def test_text_that_is_not_unicode_is_a_mistake(key: str) -> None:
    """JSON allows a lone surrogate."""
    with pytest.raises(ProfileError, match=f"`tiers.host.{key}` must be UTF-8 text"):
        resolve_connector({"kvbm": {"tiers": {"host": {key: "\ud800"}}}}, {}, engine="vllm")


def test_variable_without_an_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_connector({}, {GIGABYTES: "1", "DYN_KVBM_ENABLE": "0"}, engine="vllm")
    assert caplog.messages == [
        "`DYN_KVBM_ENABLE` has no effect: no version reads it: `DYN_KVBM_ENABLE=0` disables nothing"
    ]
