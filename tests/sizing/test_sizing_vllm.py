"""Blocks of vLLM, against what vLLM 0.32 itself logged for the same models, and the rules one by one."""

import contextlib
import copy
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbm.config.heads import have_layers_equal_heads
from kvbm.config.schema import Profile
from kvbm.engines.table import size
from kvbm.errors import ProfileError
from kvbm.sizing import PAGE_BYTES, SizeUnknown, Sizing
from kvbm.sizing.catalogue import catalogue

QWEN3_81M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}
GEMMA_LIKE = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 6 + ["full_attention"],
    "sliding_window": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DEEPSEEK_V2_LIKE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
GRANITE_LIKE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
GDN_LIKE = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
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


@pytest.mark.parametrize(
    ("arguments", "block_bytes", "ranks"),
    [
        ({"dtype": "float32"}, 3_145_728, 1),
        ({"dtype": "auto"}, 1_572_864, 1),
        ({"kv_cache_dtype": "fp8"}, 786_432, 1),
        ({"block_size": 32}, 393_216, 1),
        ({"tensor_parallel_size": 2}, 786_432, 2),
        ({"tensor_parallel_size": 8}, 393_216, 8),
        ({"pipeline_parallel_size": 2}, 786_432, 2),
        ({"pipeline_parallel_size": 5}, 393_216, 5),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 393_216, 4),
    ],
)
def test_bytes_of_a_block_on_a_rank(arguments: dict[str, Any], block_bytes: int, ranks: int) -> None:
    sizing = sized(QWEN3_81M, arguments)
    assert (sizing.block_bytes, sizing.rank_count) == (block_bytes, ranks)


def test_latent_attention_is_not_divided_among_ranks() -> None:
    assert sized(DEEPSEEK_V2_LIKE, {"tensor_parallel_size": 4}).block_bytes == 55_296


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


@pytest.mark.parametrize(
    ("kinds", "layers_per_block", "group_count"),
    [
        (["full_attention"] * 6, 6, 1),
        (["sliding_attention"] * 6, 6, 1),
        (["full_attention"] * 2 + ["sliding_attention"] * 4, 2, 3),
        (["full_attention"] * 3 + ["sliding_attention"] * 4, 4, 2),
        (["full_attention"] * 2 + ["sliding_attention"] * 5, 2, 4),
    ],
)
def test_layers_that_differ_are_cut_into_groups_of_equal_size(
    kinds: list[str], layers_per_block: int, group_count: int
) -> None:
    facts = {**GEMMA_LIKE, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    sizing = sized(facts, host={"blocks": 120})
    assert sizing.block_bytes == 65_536 * layers_per_block
    assert sizing.host.token_count == 120 // group_count * 128


def test_without_the_hybrid_manager_all_layers_are_one_group() -> None:
    assert sized(GEMMA_LIKE, {"disable_hybrid_kv_cache_manager": True}).block_bytes == 7 * 65_536


def test_a_window_without_a_list_of_layers() -> None:
    pattern = {name: value for name, value in GEMMA_LIKE.items() if name != "layer_types"} | {
        "sliding_window_pattern": 7
    }
    assert sized(pattern).block_bytes == 65_536
    assert sized({**QWEN3_81M, "sliding_window": 4096, "use_sliding_window": False}).block_bytes == 1_572_864
    mistral = {**QWEN3_81M, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
    assert sized(mistral).block_bytes == 1_572_864


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


UNKNOWN = {
    "draft model": (QWEN3_81M, {"speculative_config": {"method": "eagle"}}),
    "state": ({**GEMMA_LIKE, "layer_types": ["linear_attention"] * 7}, {}),
    "shared layers": ({**QWEN3_81M, "num_kv_shared_layers": 4}, {}),
    "an architecture": ({**QWEN3_81M, "architectures": ["Qwen9ForCausalLM"]}, {}),
    "a fact that no reader knows": ({**QWEN3_81M, "kda_config": {"heads": 4}}, {}),
    "part of the layers": ({**QWEN3_81M, "attn_layer_indices": [0, 4]}, {}),
    "a model type of another family": ({**QWEN3_81M, "model_type": "llama"}, {}),
    "no model type": ({name: value for name, value in QWEN3_81M.items() if name != "model_type"}, {}),
    "an encoder": ({**QWEN3_81M, "is_causal": False}, {}),
    "heads of no width": ({**QWEN3_81M, "head_dim": 0}, {}),
    "a type of the cache that is ignored": (
        {
            **QWEN3_81M,
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "hidden_size": 512,
        },
        {"kv_cache_dtype": "fp8"},
    ),
    "null for causal": ({**QWEN3_81M, "is_causal": None}, {}),
    "attention in both directions": ({**GEMMA_LIKE, "use_bidirectional_attention": True}, {}),
    "more shared layers than layers": ({**GEMMA_LIKE, "num_kv_shared_layers": 8}, {}),
    "other names of KV heads": ({**QWEN3_81M, "num_kv_heads": 2}, {}),
    "a pooling model": (QWEN3_81M, {"runner": "pooling"}),
    "model classes of transformers": (QWEN3_81M, {"model_impl": "transformers"}),
    "an unknown quantization": (
        {**QWEN3_81M, "quantization_config": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "X"}}},
        {},
    ),
    "8 bits for latent attention": (
        {
            **DEEPSEEK_V2_LIKE,
            "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
        },
        {},
    ),
    "type of the cache": (QWEN3_81M, {"kv_cache_dtype": "nvfp4"}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_vllm_knows_is_said_to_be_unknown(name: str) -> None:
    facts, arguments = UNKNOWN[name]
    with pytest.raises(SizeUnknown):
        sized(facts, arguments)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
CHECKPOINTS = {
    "compressed-tensors": {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}},
    "an old name": {"compression_config": {"quant_method": "compressed_tensors", "kv_cache_scheme": SCHEME}},
    "of the text model": {
        "text_config": {
            **QWEN3_81M,
            "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME},
        }
    },
    "ModelOpt": {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": SCHEME}},
    "ModelOpt in a file of its own": {
        "quantization_config": {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        }
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_asks_for_a_cache_of_8_bits(name: str) -> None:
    """As vLLM 0.32 decided for such models, with its own classes on a CPU."""
    assert sized({**QWEN3_81M, **CHECKPOINTS[name]}).block_bytes == 786_432
    assert sized({**QWEN3_81M, **CHECKPOINTS[name]}, {"kv_cache_dtype": "bfloat16"}).block_bytes == 1_572_864


REFUSED = {
    "type": ({"type": "int"}, "`kv_cache_scheme.type` is `int`, and vLLM accepts `float`"),
    "num_bits": ({"num_bits": 4}, "`kv_cache_scheme.num_bits` is `4`, and vLLM accepts `8`"),
    "strategy": (
        {"strategy": "channel"},
        "`kv_cache_scheme.strategy` is `channel`, and vLLM accepts `tensor` or `attn",
    ),
    "symmetric": ({"symmetric": False}, "`kv_cache_scheme.symmetric` is `false`, and vLLM accepts `true`"),
}


@pytest.mark.parametrize("arguments", [{}, {"kv_cache_dtype": "bfloat16"}], ids=["auto", "bfloat16"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_scheme_that_vllm_refuses_is_refused(name: str, arguments: dict[str, Any]) -> None:
    change, message = REFUSED[name]
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, **change}}
    with pytest.raises(SizeUnknown, match=re.escape(f"vLLM refuses this checkpoint: {message}")):
        sized({**QWEN3_81M, "quantization_config": scheme}, arguments)
    accepted = {**scheme, "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}
    assert sized({**QWEN3_81M, "quantization_config": accepted}).block_bytes == 786_432


def test_a_pattern_beside_the_list_of_layers_does_not_count() -> None:
    """EXAONE 4.0 32B has both."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    exaone = {**QWEN3_81M, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "layer_types": kinds * 3}
    exaone |= {"sliding_window": 4096, "num_hidden_layers": 12}
    assert sized({**exaone, "sliding_window_pattern": "LLLG"}).device == sized(exaone).device
    with pytest.raises(SizeUnknown, match="sliding_window_pattern"):
        sized({**exaone, "layer_types": None, "sliding_window_pattern": "LLLG"})


NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*",
    "num_hidden_layers": 4,
    "n_groups": 8,
    "mamba_hidden_act": "silu",
}


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


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "awq", "fp8"])
def test_a_quantized_checkpoint_without_a_scheme_has_a_cache_of_16_bits(method: str) -> None:
    assert sized({**QWEN3_81M, "quantization_config": {"quant_method": method}}).block_bytes == 1_572_864
    other = {"quant_method": "quark", "kv_cache_scheme": SCHEME}
    assert sized({**QWEN3_81M, "quantization_config": other}).block_bytes == 1_572_864


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


def test_facts_beside_the_text_model_do_not_count() -> None:
    vision = {"architectures": ["Qwen3VLForConditionalGeneration"], "num_hidden_layers": 2, "head_dim": 8}
    assert sized({**vision, "text_config": {**QWEN3_81M, "model_type": "qwen3_vl_text"}}).block_bytes == 1_572_864


@pytest.mark.parametrize(
    ("variable", "facts"),
    [
        ({"VLLM_MLA_DISABLE": "1"}, DEEPSEEK_V2_LIKE),
        ({"VLLM_PP_LAYER_PARTITION": "5,6"}, QWEN3_81M),
        ({"VLLM_PP_LAYER_PARTITION": "12"}, QWEN3_81M),
    ],
)
def test_variables_that_change_the_cache(variable: dict[str, str], facts: dict[str, Any]) -> None:
    with pytest.raises(SizeUnknown, match=next(iter(variable))):
        sized(facts, {"pipeline_parallel_size": 2}, environment=variable)
    assert sized(DEEPSEEK_V2_LIKE, environment={"VLLM_MLA_DISABLE": "0"}).block_bytes == 55_296


def test_a_partition_of_the_pipeline() -> None:
    arguments, partition = {"pipeline_parallel_size": 3}, {"VLLM_PP_LAYER_PARTITION": "2,7,3"}
    assert sized(QWEN3_81M, arguments, environment=partition).block_bytes == 7 * 131_072


def test_the_attention_backend_may_choose_the_block() -> None:
    with pytest.raises(SizeUnknown, match="attention backend"):
        sized(QWEN3_81M, {"attention_backend": "FLASHINFER"}, on_cpu=False)
    assert sized(QWEN3_81M, {"attention_backend": "FLASHINFER", "block_size": 32}, on_cpu=False).block_tokens == 32


def test_config_without_a_usable_fact_is_an_error() -> None:
    with pytest.raises(ProfileError, match="no valid `num_hidden_layers`"):
        sized({**QWEN3_81M, "num_hidden_layers": None})
    remote = {**QWEN3_81M, "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3"}
    del remote["num_key_value_heads"]
    with pytest.raises(SizeUnknown, match="no `num_key_value_heads`"):
        sized({**remote, "sparse_attention_config": {"sparse_index_dim": 128, "sparse_attention_freq": [1] * 12}})


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
