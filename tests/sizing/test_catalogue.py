"""Sizes of well-known models on a GPU, in the numbers that vLLM's own functions gave for them (0.32, one rank, bf16).

tests/vllm/test_model_sizes.py compares all models with vLLM itself, on a CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

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


BLOCKS, SNAPSHOTS = yaml.safe_load(Path(__file__).with_name("on_a_gpu.yaml").read_text()).values()


@pytest.mark.parametrize("model", BLOCKS)
def test_a_block_on_a_gpu(model: str) -> None:
    *sizes, arguments = BLOCKS[model] if len(BLOCKS[model]) > 4 else (*BLOCKS[model], {})
    plan = planned(model, **arguments)
    assert [plan.token_bytes, plan.block_tokens, len(plan.groups), block_bytes(plan)] == sizes


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


@pytest.mark.parametrize("model", SNAPSHOTS)
def test_a_snapshot_has_the_states_of_all_layers(model: str) -> None:
    plan = planned(model)
    snapshot = plan.snapshot
    assert snapshot is not None
    found = [snapshot.state_bytes, snapshot.token_count, plan.block_tokens, snapshot.block_count]
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
