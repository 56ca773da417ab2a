"""Sizes of well-known models on a GPU, in the numbers that vLLM's own functions gave for them (0.32, one rank, bf16).

tests/vllm/test_model_sizes.py compares all models with vLLM itself, on a CPU.
"""

from typing import Any

import pytest

from kvbm.config.engine import VllmArguments
from kvbm.engines.vllm.sizing import Model, Setting, VllmPlan, plan_of
from kvbm.sizing import SizeUnknown
from kvbm.sizing.catalogue import catalogue

ON_GPU = Setting({}, on_cpu=False)
LAYERS_FIRST, BLOCKS_FIRST = "LBNHC", "BLHNC"


def planned(model: str, layout: str = LAYERS_FIRST, **arguments: Any) -> VllmPlan:
    facts = {name: value for name, value in catalogue()[model].items() if name != "quantization_config"}
    return plan_of(Model(VllmArguments(**arguments), facts, Setting({"VLLM_KV_CACHE_LAYOUT": layout}, on_cpu=False)))


def block_bytes(plan: VllmPlan) -> int:
    return max(group.bytes_on(plan.layers) for group in plan.groups)


# name, arguments: bytes of a token that all layers keep, tokens in a block of attention, groups, bytes of a block
ON_A_GPU = [
    ("meta-llama/Meta-Llama-3-8B", {"block_size": 16}, 131_072, 16, 1, 2 * 2**20),
    ("meta-llama/Meta-Llama-3.1-405B", {}, 516_096, 16, 1, 16 * 516_096),
    ("Qwen/Qwen3-235B-A22B", {}, 192_512, 16, 1, 16 * 192_512),
    ("microsoft/phi-4", {}, 204_800, 16, 1, 16 * 204_800),
    ("zai-org/GLM-4.6", {}, 376_832, 16, 1, 16 * 376_832),
    ("deepseek-ai/DeepSeek-V3", {"block_size": 64}, 70_272, 64, 1, 64 * 70_272),
    ("moonshotai/Kimi-K2.5", {"block_size": 128}, 70_272, 128, 1, 128 * 70_272),
    ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", {}, 200_704, 16, 1, 16 * 200_704),
    ("tiiuae/falcon-7b", {}, 8_192, 16, 1, 131_072),
    ("deepseek-ai/DeepSeek-V3.2", {"block_size": 64}, 78_324, 64, 1, 64 * 78_324),
    ("zai-org/GLM-5", {"block_size": 64}, 100_152, 64, 1, 64 * 100_152),
    ("zai-org/GLM-5.2", {"block_size": 64}, 92_628, 64, 1, 5_928_192),
    ("MiniMaxAI/MiniMax-M3", {}, 137_472, 128, 1, 17_596_416),
    ("openai/gpt-oss-120b", {}, 18 * 2048, 16, 2, 589_824),
    ("openai/gpt-oss-20b", {}, 12 * 2048, 16, 2, 393_216),
    ("google/gemma-3-27b-it", {}, 10 * 8192, 16, 7, 1_310_720),
    ("CohereLabs/c4ai-command-a-03-2025", {}, 16 * 4096, 16, 4, 1_048_576),
    ("allenai/Olmo-3-1125-32B", {}, 16 * 4096, 16, 4, 1_048_576),
    ("nvidia/Gemma-4-31B-IT-NVFP4", {}, 10 * 8192, 16, 6, 2_621_440),
    ("google/gemma-4-26B-A4B", {}, 5 * 4096, 16, 6, 655_360),
    ("XiaomiMiMo/MiMo-V2-Flash", {}, 9 * 2560, 16, 6, 737_280),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", {}, 12 * 4096, 16, 4, 786_432),
    ("stepfun-ai/Step-3.7-Flash", {}, 12 * 4096, 16, 4, 786_432),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", {}, 24_576, 544, 4, 13_369_344),
    ("Qwen/Qwen3.5-27B", {}, 65_536, 784, 4, 51_380_224),
    ("Qwen/Qwen3.5-35B-A3B", {}, 20_480, 1056, 4, 21_626_880),
    ("Qwen/Qwen3.5-122B-A10B", {}, 24_576, 2096, 4, 51_511_296),
    ("Qwen/Qwen3.5-397B-A17B", {}, 30_720, 2096, 4, 64_389_120),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}, 6_144, 2096, 5, 12_877_824),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", {}, 8_192, 4160, 6, 34_078_720),
    ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", {}, 12_288, 8304, 5, 102_039_552),
    ("ibm-granite/granite-4.0-h-small", {}, 16_384, 528, 10, 8_650_752),
    ("moonshotai/Kimi-K3", {}, 27_648, 5760, 4, 159_252_480),
    ("moonshotai/Kimi-Linear-48B-A3B-Instruct", {}, 8_064, 1920, 4, 15_482_880),
    ("ai21labs/AI21-Jamba-Mini-1.5", {}, 16_384, 80, 8, 1_310_720),
    ("tiiuae/Falcon-H1-34B-Instruct", {}, 147_456, 1824, 2, 268_959_744),
]


@pytest.mark.parametrize(("model", "arguments", "token_bytes", "tokens", "groups", "size"), ON_A_GPU)
def test_a_block_on_a_gpu(
    model: str, arguments: dict[str, Any], token_bytes: int, tokens: int, groups: int, size: int
) -> None:
    plan = planned(model, **arguments)
    assert (plan.token_bytes, plan.block_tokens, len(plan.groups), block_bytes(plan)) == (
        token_bytes,
        tokens,
        groups,
        size,
    )


@pytest.mark.parametrize(
    ("model", "groups", "size"),
    [
        ("nvidia/Gemma-4-31B-IT-NVFP4", 11, 1_310_720),
        ("XiaomiMiMo/MiMo-V2-Flash", 11, 368_640),
        ("openai/gpt-oss-120b", 2, 589_824),
    ],
)
def test_a_layout_with_blocks_outermost_packs_layers_of_different_sizes(model: str, groups: int, size: int) -> None:
    plan = planned(model, BLOCKS_FIRST)
    assert (len(plan.groups), block_bytes(plan)) == (groups, size)


def test_without_the_hybrid_manager_all_layers_keep_all_tokens() -> None:
    plan = planned("meta-llama/Llama-4-Scout-17B-16E-Instruct", disable_hybrid_kv_cache_manager=True)
    assert (len(plan.groups), block_bytes(plan)) == (1, 3_145_728)


def test_blocks_of_a_long_sequence_with_states() -> None:
    plan = planned("Qwen/Qwen3.5-27B")
    blocks = sum(group.blocks(262_144, in_flight=0) for group in plan.groups)
    assert blocks * block_bytes(plan) == 17_520_656_384


# Bytes of the states at one boundary, the tokens whose KV has as many, the tokens of a block, the groups of states.
SNAPSHOTS = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (39_518_208, 1608, 544, 3),
    "Qwen/Qwen3.5-27B": (153_944_064, 2349, 784, 3),
    "Qwen/Qwen3.5-35B-A3B": (64_389_120, 3144, 1056, 3),
    "ibm-granite/granite-4.0-h-small": (77_322_240, 4719, 528, 9),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (49_082_368, 7988, 2096, 4),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (170_229_760, 20_780, 4160, 5),
    "moonshotai/Kimi-K3": (449_372_160, 16_253, 5760, 3),
}


@pytest.mark.parametrize("model", SNAPSHOTS)
def test_a_snapshot_has_the_states_of_all_layers(model: str) -> None:
    plan = planned(model)
    snapshot = plan.snapshot
    assert snapshot is not None
    found = (snapshot.state_bytes, snapshot.token_count, plan.block_tokens, snapshot.block_count)
    assert found == SNAPSHOTS[model]


def test_a_snapshot_is_more_tokens_if_these_have_eight_bits() -> None:
    """The states keep their type."""
    snapshot = planned("Qwen/Qwen3.5-27B", kv_cache_dtype="fp8").snapshot
    assert snapshot is not None
    assert (snapshot.state_bytes, snapshot.token_count) == (153_944_064, 2 * 2349)


def test_a_model_without_states_has_no_snapshot() -> None:
    assert planned("Qwen/Qwen3-8B").snapshot is None


def test_ranks_divide_heads_and_states() -> None:
    tokens = {ranks: planned("Qwen/Qwen3.5-27B", tensor_parallel_size=ranks).block_tokens for ranks in (1, 2, 4, 8)}
    assert tokens == {1: 784, 2: 784, 4: 784, 8: 400}


def test_every_model_has_a_size_or_is_refused_by_name() -> None:
    refused = {}
    for model, facts in catalogue().items():
        try:
            assert plan_of(Model(VllmArguments(), facts, ON_GPU)).token_bytes > 0
        except SizeUnknown as error:
            refused[model] = error.message
    v4 = "for the architecture `DeepseekV4ForCausalLM`, the attention backend of the GPU decides the format of a block"
    assert refused == {
        "deepseek-ai/DeepSeek-V4-Flash": v4,
        "deepseek-ai/DeepSeek-V4-Pro": v4,
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (
            "vLLM does not know the quantization `MIXED_PRECISION` of this checkpoint"
        ),
    }
    assert len(catalogue()) >= 60


def test_a_checkpoint_can_ask_for_a_cache_of_8_bits() -> None:
    facts = dict(catalogue()["nvidia/Kimi-K2.6-NVFP4"])
    plan = plan_of(Model(VllmArguments(), facts, ON_GPU))
    assert plan.token_bytes == 70_272 // 2
    wide = plan_of(Model(VllmArguments(kv_cache_dtype="bfloat16"), facts, ON_GPU))
    assert wide.token_bytes == 70_272
