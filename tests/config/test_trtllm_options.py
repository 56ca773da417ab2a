"""`engine.arguments` of TensorRT-LLM: what is refused and what is passed on. Mistakes: test_profile_mistakes.py."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_load import load_text

from kvbm.config.engine import EmbeddedArguments, TrtllmArguments, VllmArguments
from kvbm.config.schema import Profile
from kvbm.engines.trtllm.options import CONNECTOR, KVBM_SETS, LIMITS, SAME_OPTION
from kvbm.errors import ProfileError

HEAD = "engine:\n  kind: tensorrt-llm\n  model: m\n  arguments:\n"
TAIL = "tiers: {host: {blocks: 1}}\n"


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.option)
def test_required_value_of_a_limit_is_accepted_and_passed_on(tmp_path: Path, limit) -> None:
    names = limit.option.split(".")
    value = json.dumps(limit.required)
    line = f"{names[0]}: {{{names[1]}: {value}}}" if len(names) == 2 else f"{names[0]}: {value}"
    arguments = load_text(tmp_path, f"{HEAD}    {line}\n{TAIL}").profile.engine.arguments.model_dump()
    found = arguments[names[0]]
    assert (found[names[1]] if len(names) == 2 else found) == limit.required


def test_override_of_a_nested_option_is_checked_too(tmp_path: Path) -> None:
    text = f"{HEAD}    max_seq_len: 8192\n{TAIL}"
    with pytest.raises(ProfileError, match="enable_partial_reuse` must be `false`, not `true`") as caught:
        load_text(tmp_path, text, "engine.arguments.kv_cache_config.enable_partial_reuse=true")
    assert "--set engine.arguments.kv_cache_config.enable_partial_reuse=true" in caught.value.message
    merged = load_text(tmp_path, text, "engine.arguments.kv_cache_config.free_gpu_memory_fraction=0.5")
    assert merged.profile.engine.arguments.cache == {"free_gpu_memory_fraction": 0.5}


def test_options_that_are_null_are_kept_everywhere(tmp_path: Path) -> None:
    """`cuda_graph_config: null` turns CUDA graphs off; a missing one leaves them on."""
    resolved = load_text(tmp_path, f"{HEAD}    cuda_graph_config: null\n{TAIL}")
    assert resolved.values["engine.arguments.cuda_graph_config"] is None
    assert resolved.origins["engine.arguments.cuda_graph_config"].endswith("mine.yaml:5")
    recorded = resolved.profile.model_dump(mode="json", exclude_none=True)
    assert recorded["engine"]["arguments"] == {"cuda_graph_config": None}
    assert Profile.model_validate_json(resolved.profile.model_dump_json()) == resolved.profile


def test_disk_tier_requires_host_memory(tmp_path: Path) -> None:
    disk = "tiers:\n  disk: {blocks: 1}\n"
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, f"{HEAD}    max_seq_len: 1\n{disk}")
    assert caught.value.message.startswith(
        "`tiers.host` is required with `tensorrt-llm`, because TensorRT-LLM loads blocks only from host memory"
    )
    load_text(tmp_path, f"{HEAD}    max_seq_len: 1\n{disk}  host: {{blocks: 1}}\n")


def test_name_in_requests_is_that_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    local = load_text(tmp_path, f"{HEAD.replace('model: m', 'model: ./Qwen3-8B/')}    max_seq_len: 1\n{TAIL}")
    named = load_text(tmp_path, f"{HEAD.replace('model: m', 'model: Qwen/Qwen3-8B')}    max_seq_len: 1\n{TAIL}")
    assert (local.profile.engine.served_name, named.profile.engine.served_name) == ("Qwen3-8B", "Qwen/Qwen3-8B")


@pytest.mark.parametrize("written", ["trtllm", "TensorRT-LLM", "tensorrt_llm"])
def test_other_spellings_of_the_kind_have_a_hint(tmp_path: Path, written: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, f"engine: {{kind: {written}, model: m}}\n{TAIL}")
    assert caught.value.hint == "did you mean `tensorrt-llm`?"


@pytest.mark.parametrize("name", [*KVBM_SETS, *SAME_OPTION])
def test_refused_option_says_what_to_use(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, f"{HEAD}    {name}: 1\n{TAIL}")
    assert caught.value.hint == KVBM_SETS.get(name, f"use `{SAME_OPTION.get(name)}`")


OPTIONS = [
    *{*TrtllmArguments.model_fields, *VllmArguments.model_fields, *EmbeddedArguments.model_fields},
    *{*KVBM_SETS, *SAME_OPTION, *(limit.option.split(".")[0] for limit in LIMITS), "foo"},
]


@given(st.sampled_from(OPTIONS), st.sampled_from(["1", "x", "null", "true", "[a]", "{a: 1}", "{a: null}", "0.5"]))
def test_any_option_is_passed_on_or_a_mistake_at_its_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: str
) -> None:
    directory = tmp_path_factory.mktemp("any")
    found: list[Profile] = []
    mistakes: list[ProfileError] = []
    try:
        found.append(load_text(directory, f"{HEAD}    {name}: {value}\n{TAIL}").profile)
    except ProfileError as error:
        mistakes.append(error)
    assert all("mine.yaml:5:" in mistake.message for mistake in mistakes)
    for one in found:
        dumped = one.engine.arguments.model_dump()
        assert name in dumped
        assert "kv_connector_config" not in dumped


def test_connector_is_what_existing_users_write() -> None:
    assert CONNECTOR == {
        "connector_module": "kvbm.trtllm_integration.connector",
        "connector_scheduler_class": "DynamoKVBMConnectorLeader",
        "connector_worker_class": "DynamoKVBMConnectorWorker",
    }
