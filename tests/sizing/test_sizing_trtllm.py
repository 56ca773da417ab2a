"""Sizes of TensorRT-LLM's blocks: computed for models whose layers keep every token, unknown for others."""

from typing import Any

import pytest
from model_configs import QWEN3

from kvbm.config.schema import Profile
from kvbm.engines.table import size
from kvbm.engines.trtllm.kind import TrtllmKind
from kvbm.sizing import SizeUnknown

WINDOWED = {
    **QWEN3,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
TOKEN_BYTES = 36 * 2 * 8 * 128 * 2


def profile(arguments: dict[str, Any]) -> Profile:
    engine = {"kind": "tensorrt-llm", "model": "m", "arguments": arguments}
    return Profile.model_validate({"engine": engine, "tiers": {"host": {"blocks": 10}, "disk": {"blocks": 20}}})


@pytest.mark.parametrize(
    ("arguments", "block_tokens", "rank_token_bytes", "ranks"),
    [
        ({}, 32, TOKEN_BYTES, 1),
        ({"kv_cache_config": {"tokens_per_block": 64}}, 64, TOKEN_BYTES, 1),
        ({"kv_cache_config": {"dtype": "fp8"}}, 32, TOKEN_BYTES // 2, 1),
        ({"dtype": "float32"}, 32, TOKEN_BYTES * 2, 1),
        ({"tensor_parallel_size": 4}, 32, TOKEN_BYTES // 4, 4),
        ({"tensor_parallel_size": 16}, 32, TOKEN_BYTES // 8, 16),
    ],
)
def test_size_of_a_block(arguments: dict[str, Any], block_tokens: int, rank_token_bytes: int, ranks: int) -> None:
    found = size(profile(arguments), QWEN3)
    assert (found.block_tokens, found.rank_count) == (block_tokens, ranks)
    assert found.block_bytes == rank_token_bytes * block_tokens
    assert found.host.total_bytes == 10 * ranks * rank_token_bytes * block_tokens
    assert found.device is None, "TensorRT-LLM determines G1 at start-up"


def test_max_tokens_set_the_size_of_g1() -> None:
    found = size(profile({"max_seq_len": 100, "kv_cache_config": {"max_tokens": 1000}}), QWEN3)
    assert found.device is not None
    assert (found.device.block_count, found.device.token_count) == (31, 31 * 32)
    assert (found.sequence_tokens, found.sequence_blocks) == (100, 4)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (WINDOWED, {}),
        ({**QWEN3, "quantization_config": {"quant_method": "modelopt"}}, {}),
        (QWEN3, {"kv_cache_config": {"dtype": "nvfp4"}}),
        (QWEN3, {"tensor_parallel_size": 3}),
    ],
)
def test_size_that_only_the_engine_knows(model: dict[str, Any], arguments: dict[str, Any]) -> None:
    with pytest.raises(SizeUnknown):
        size(profile(arguments), model)
    with pytest.raises(SizeUnknown):
        TrtllmKind().check_model(profile(arguments), model)


def test_data_type_in_the_profile_decides_for_a_quantised_checkpoint() -> None:
    quantised = {**QWEN3, "quantization_config": {"quant_method": "modelopt"}}
    assert size(profile({"kv_cache_config": {"dtype": "fp8"}}), quantised).block_bytes == TOKEN_BYTES // 2 * 32
