"""Blocks of vLLM, against what vLLM 0.32 itself logged for the same models, and the rules one by one."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from terminal import assert_said, given_in

from kvbm.config.heads import have_layers_equal_heads
from kvbm.config.schema import Profile
from kvbm.engines.table import size
from kvbm.errors import ProfileError
from kvbm.sizing import PAGE_BYTES, SizeUnknown, Sizing
from kvbm.sizing.catalogue import catalogue

MODELS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())
QWEN3_81M, GEMMA_LIKE, DEEPSEEK_V2_LIKE, GRANITE_LIKE, GDN_LIKE, NEMOTRON_H = MODELS.values()
ON_ONE_GIB = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def sized(
    facts: dict[str, Any],
    arguments: dict[str, Any] | None = None,
    *,
    host: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    on_cpu: bool = True,
    transfer: dict[str, Any] | None = None,
) -> Sizing:
    engine = {"kind": "vllm", "model": "m", "arguments": {"max_model_len": 8192, **(arguments or {})}}
    profile = Profile.model_validate(
        {"engine": engine, "tiers": {"host": host or {"blocks": 1}}, "transfer": transfer or {}}
    )
    return size(profile, facts, environment=environment, on_cpu=on_cpu)


# Logged by vLLM 0.32 on a CPU: "CPU KV cache size: 87,296 tokens", and the bytes of the cache that it allocated.
LOGGED = [
    (QWEN3_81M, {}, ON_ONE_GIB, 1_572_864, 682, 87_296),
    (QWEN3_81M, {"num_gpu_blocks_override": 66}, {}, 1_572_864, 66, 8_448),
    (GEMMA_LIKE, {}, ON_ONE_GIB, 65_536, 16_384, 706_409),
    (DEEPSEEK_V2_LIKE, {}, ON_ONE_GIB, 55_296, 19_418, 310_688),
    (
        GDN_LIKE,
        {"num_gpu_blocks_override": 60, "max_model_len": 2048, "mamba_ssm_cache_dtype": "float32"},
        {},
        131_072,
        60,
        8_777,
    ),
    (
        GRANITE_LIKE,
        {"num_gpu_blocks_override": 300, "max_model_len": 4096, "dtype": "float32"},
        {},
        131_072,
        300,
        29_970,
    ),
]


@pytest.mark.parametrize(("facts", "arguments", "environment", "block_bytes", "blocks", "tokens"), LOGGED)
def test_sizes_are_those_that_the_engine_logged(
    facts: dict[str, Any],
    arguments: dict[str, Any],
    environment: dict[str, str],
    block_bytes: int,
    blocks: int,
    tokens: int,
) -> None:
    sizing = sized(facts, arguments, environment=environment)
    assert sizing.device is not None
    assert (sizing.block_bytes, sizing.device.block_count, sizing.device.token_count) == (block_bytes, blocks, tokens)


def test_memory_of_the_logged_override() -> None:
    sizing = sized(QWEN3_81M, {"num_gpu_blocks_override": 66})
    assert sizing.device is not None
    assert sizing.device.total_bytes == 103_809_024


def test_ranks_with_latent_attention_keep_one_copy() -> None:
    one = sized(DEEPSEEK_V2_LIKE, host={"capacity": "1GiB"})
    eight = sized(DEEPSEEK_V2_LIKE, {"tensor_parallel_size": 8}, host={"capacity": "1GiB"})
    copies = sized(
        DEEPSEEK_V2_LIKE, {"tensor_parallel_size": 8}, host={"capacity": "1GiB"}, transfer={"share_equal_kv": False}
    )
    assert eight.host == one.host
    assert eight.stored_bytes == one.stored_bytes == copies.stored_bytes // 8
    assert copies.host.block_count == one.host.block_count // 8
    assert "8 ranks have equal KV, of which G2 and G3 keep one copy" in eight.notes
    staged = sized(
        DEEPSEEK_V2_LIKE, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, host={"capacity": "1GiB"}
    )
    assert staged.host.total_bytes <= 2**30
    assert staged.stored_bytes < 2 * one.stored_bytes


@pytest.mark.parametrize("more", [{"num_global_key_value_heads": 8}, {"block_configs": [{}]}])
def test_heads_that_may_differ_between_layers_are_copied_per_rank(more: dict[str, Any]) -> None:
    assert have_layers_equal_heads({"num_key_value_heads": 4, "multi_query_group_num": None}, 4)
    assert not have_layers_equal_heads({"num_key_value_heads": 4, **more}, 4)


def test_states_are_divided_among_ranks_that_repeat_heads() -> None:
    arguments = {"tensor_parallel_size": 4, "mamba_ssm_cache_dtype": "float32"}
    assert not [note for note in sized(GDN_LIKE, arguments).notes if "equal KV" in note]


def test_blocks_are_of_16_tokens_on_a_gpu_and_of_128_on_a_cpu() -> None:
    assert sized(QWEN3_81M, on_cpu=False).block_tokens == 16
    assert sized(QWEN3_81M, on_cpu=True).block_tokens == 128
    assert sized(DEEPSEEK_V2_LIKE, on_cpu=True).block_tokens == 16
    assert sized(QWEN3_81M, {"block_size": 64}, on_cpu=True).block_tokens == 64


def test_host_capacity_is_the_sum_over_the_ranks() -> None:
    one = sized(QWEN3_81M, host={"capacity": "1GiB"})
    two = sized(QWEN3_81M, {"tensor_parallel_size": 2}, host={"capacity": "1GiB"})
    replicated = sized(QWEN3_81M, {"tensor_parallel_size": 8}, host={"capacity": "1GiB"})
    copied = sized(
        QWEN3_81M, {"tensor_parallel_size": 8}, host={"capacity": "1GiB"}, transfer={"share_equal_kv": False}
    )
    assert one.host.block_count == two.host.block_count == replicated.host.block_count == 682
    assert copied.host.block_count == 341
    uneven = sized(QWEN3_81M, {"pipeline_parallel_size": 5}, host={"capacity": "1GiB"})
    assert uneven.host.block_count == 2**30 // (3 * 131_072 * 5)
    assert uneven.host.total_bytes == uneven.host.block_count * 12 * 131_072
    assert one.host.total_bytes == two.host.total_bytes == replicated.host.total_bytes == 682 * 1_572_864


@pytest.mark.parametrize(
    ("arguments", "environment", "on_cpu", "expected"),
    [
        ({}, {}, True, None),
        ({}, {}, False, None),
        ({}, ON_ONE_GIB, False, None),
        ({}, ON_ONE_GIB, True, (682, "VLLM_CPU_KVCACHE_SPACE")),
        ({"kv_cache_memory_bytes": 2**30}, {}, True, (682, "engine.arguments.kv_cache_memory_bytes")),
        ({"kv_cache_memory_bytes": "1G"}, {}, False, (5461, "engine.arguments.kv_cache_memory_bytes")),
        ({"kv_cache_memory_bytes": "2G"}, ON_ONE_GIB, True, (682, "VLLM_CPU_KVCACHE_SPACE")),
        ({"num_gpu_blocks_override": 7}, ON_ONE_GIB, True, (7, "engine.arguments.num_gpu_blocks_override")),
    ],
)
def test_what_makes_the_number_of_blocks(
    arguments: dict[str, Any], environment: dict[str, str], on_cpu: bool, expected: tuple[int, str] | None
) -> None:
    device = sized(QWEN3_81M, arguments, environment=environment, on_cpu=on_cpu).device
    assert (device and (device.block_count, device.set_by)) == expected


def test_a_pattern_beside_the_list_of_layers_does_not_count() -> None:
    """EXAONE 4.0 32B has both."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    exaone = {**QWEN3_81M, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "layer_types": kinds * 3}
    exaone |= {"sliding_window": 4096, "num_hidden_layers": 12}
    assert sized({**exaone, "sliding_window_pattern": "LLLG"}).device == sized(exaone).device
    with pytest.raises(SizeUnknown, match="sliding_window_pattern"):
        sized({**exaone, "layer_types": None, "sliding_window_pattern": "LLLG"})


def test_names_of_nemotron_h_are_read_as_transformers_reads_them() -> None:
    usual = sized(NEMOTRON_H)
    assert sized({**NEMOTRON_H, "mamba_num_groups": 2}).device == usual.device, "vLLM reads `n_groups` alone"
    assert sized({**NEMOTRON_H, "n_groups": 2, "mamba_n_groups": 8}).device == usual.device
    assert sized({**NEMOTRON_H, "conv_kernel": 2, "mamba_d_conv": 4}).device == usual.device
    kinds = {"layers_block_type": ["mamba", "mlp", "mamba", "attention"]}
    listed = {name: value for name, value in NEMOTRON_H.items() if name != "hybrid_override_pattern"}
    assert sized({**listed, **kinds}).device == usual.device
    assert sized({**listed, "layer_types": kinds["layers_block_type"]}).device == usual.device
    with pytest.raises(SizeUnknown, match="two lists of layers"):
        sized({**listed, **kinds, "layer_types": kinds["layers_block_type"]})


def test_facts_left_out_have_the_defaults_of_the_model_type() -> None:
    small = {**QWEN3_81M, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    del small["num_key_value_heads"], small["head_dim"]
    small |= {"hidden_size": 512, "num_attention_heads": 16}
    assert sized(small).token_bytes == 0  # a window of 4096 tokens
    assert sized(small).block_bytes == 12 * 128 * 8 * 2 * 32 * 2  # 8 KV heads
    assert sized({**small, "num_key_value_heads": None}).block_bytes == 12 * 128 * 16 * 2 * 32 * 2
    assert sized({**small, "sliding_window": None}).token_bytes == 12 * 8 * 2 * 32 * 2
    remote = {**QWEN3_81M, "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas"}
    with pytest.raises(SizeUnknown, match="block_configs"):
        sized(remote)


def test_the_attention_backend_may_choose_the_block() -> None:
    with pytest.raises(SizeUnknown, match="attention backend"):
        sized(QWEN3_81M, {"attention_backend": "FLASHINFER"}, on_cpu=False)
    assert sized(QWEN3_81M, {"attention_backend": "FLASHINFER", "block_size": 32}, on_cpu=False).block_tokens == 32


@pytest.mark.parametrize("name", given_in("vllm_sizes"))
def test_size(name: str) -> None:
    """A model of `models.yaml` with other facts, arguments and variables, and what is said of it. Types of the cache of
    quantized checkpoints are those that vLLM 0.32 chose for such models, with its own classes on a CPU."""
    case = yaml.safe_load(given_in("vllm_sizes")[name])
    without, changes = case.pop("without", ()), case.pop("facts", {})
    facts = {key: value for key, value in MODELS[case.pop("model")].items() if key not in without} | changes
    try:
        found = sized(facts, **case)
        host = f"{found.host.block_count} blocks of {found.stored_bytes} bytes, {found.host.token_count} tokens"
        said = f"{found.block_bytes} bytes for {found.block_tokens} tokens on each of {found.rank_count}; G2: {host}"
    except (ProfileError, SizeUnknown) as error:
        said = f"{type(error).__name__}: {error.message}"
    assert_said("vllm_sizes", name, said)


@given(
    st.integers(1, 40), st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.sampled_from([16, 32, 64, 96, 128])
)
def test_stages_share_all_layers_and_slots_are_whole_pages(
    layers: int, heads: int, tensor: int, stages: int, head_dim: int
) -> None:
    assume(max(heads, tensor) % min(heads, tensor) == 0)  # otherwise no engine starts
    facts = {**QWEN3_81M, "num_hidden_layers": layers + stages, "num_key_value_heads": heads, "head_dim": head_dim}
    facts["num_attention_heads"] = heads * tensor
    arguments = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "num_gpu_blocks_override": 2}
    sizing = sized(facts, arguments, host={"blocks": 3})
    copies = sized(facts, arguments, host={"blocks": 3}, transfer={"share_equal_kv": False})
    page_bytes = max(1, heads // tensor) * 128 * 2 * head_dim * 2
    assert sizing.device is not None
    assert sizing.device.total_bytes == 2 * page_bytes * (layers + stages) * tensor
    assert sizing.rank_count == tensor * stages
    assert sizing.block_bytes == page_bytes * -(-(layers + stages) // stages)
    assert copies.host.total_bytes >= 3 * page_bytes * (layers + stages) * tensor
    assert sizing.host.total_bytes * max(1, tensor // heads) == copies.host.total_bytes
    assert sizing.host.total_bytes % PAGE_BYTES == 0


JUNK = (None, 0, -1, True, False, "8", 1.5, [], {}, [1], ["full_attention"], 2**70, [None] * 8, [[1]])
SHARDS = {"tensor_parallel_size": st.sampled_from([1, 2, 3, 8]), "pipeline_parallel_size": st.sampled_from([1, 2, 5])}


@given(st.data(), st.sampled_from(sorted(catalogue())), st.fixed_dictionaries(SHARDS))
def test_a_broken_configuration_is_refused_or_sized(data: st.DataObject, model: str, shards: dict[str, int]) -> None:
    facts = copy.deepcopy(dict(catalogue()[model]))
    text = facts.get("text_config", facts)
    assert isinstance(text, dict)
    for name in data.draw(st.lists(st.sampled_from(sorted(text)), min_size=1, max_size=3)):
        text[name] = data.draw(st.sampled_from(JUNK))
    with contextlib.suppress(ProfileError, SizeUnknown):
        sizing = sized(facts, shards)
        assert sizing.block_bytes > 0
        assert sizing.block_tokens > 0
