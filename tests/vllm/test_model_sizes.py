"""Sizes of the models in the catalogue against vLLM's own classes and functions; see model_specs.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_specs import CPUS, LAYOUTS, TENSOR_PARALLEL

from kvbm.config.engine import VllmArguments
from kvbm.engines.vllm.sizing import Model, Setting, plan_of
from kvbm.sizing import Cpu, SizeUnknown
from kvbm.sizing.catalogue import CATALOGUE_FILE, catalogue
from kvbm.sizing.families.layer_specs import LayerKind

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("catalogue")]

# What this build of vLLM cannot construct: sparse attention on a CPU, kernels for GPUs, remote code, unknown types.
NOT_CONSTRUCTED = {
    "moonshotai/Kimi-K3",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-ai/DeepSeek-V4-Pro",
    "MiniMaxAI/MiniMax-M3",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
    "stepfun-ai/Step-3.7-Flash",
    "zai-org/GLM-5",
    "zai-org/GLM-5.1",
    "zai-org/GLM-5.2",
}


@pytest.fixture(
    scope="module",
    params=[pytest.param((1,), id="one rank"), pytest.param(TENSOR_PARALLEL, id="all ranks", marks=pytest.mark.soak)],
)
def truth(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    script = Path(__file__).parent / "model_specs.py"
    command = [sys.executable, script, CATALOGUE_FILE, *map(str, request.param)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def ours(facts: dict[str, Any], ranks: int, layout: str, cpu: str = "plain", **more: Any) -> dict[str, Any]:
    """The same in our words: what a CPU build does in bfloat16, with states in float32 as model_specs.py fixes them."""
    facts = {name: value for name, value in facts.items() if name != "quantization_config"}
    given = {"tensor_parallel_size": ranks, "max_model_len": 2048, "mamba_ssm_cache_dtype": "float32", **more}
    arguments = VllmArguments.model_validate(given)
    setting = Setting({"VLLM_KV_CACHE_LAYOUT": layout}, on_cpu=True, cpu=Cpu(CPUS[cpu]))
    plan = plan_of(Model(arguments, facts, setting))
    groups = [
        ["state" if group.kind is LayerKind.STATE else group.block_tokens, len(group.specs), group.specs[0].reach]
        for group in plan.groups
    ]
    block_bytes = max(group.bytes_on(plan.layers) for group in plan.groups)
    return {"block_tokens": plan.block_tokens, "bytes": block_bytes, "groups": sorted(groups, key=str)}


@pytest.mark.parametrize("model", sorted(set(catalogue()) - NOT_CONSTRUCTED))
def test_groups_and_bytes_are_those_of_vllm(model: str, truth: dict[str, dict[str, Any]]) -> None:
    compared = 0
    for ranks in TENSOR_PARALLEL:
        for layout in LAYOUTS:
            for cpu in CPUS:
                if (expected := truth[model].get(f"{ranks} {layout} {cpu}")) is None:
                    continue
                assert ours(catalogue()[model], ranks, layout, cpu) == expected, f"{ranks} ranks, {layout}, {cpu}"
                compared += 1
    assert compared >= len(LAYOUTS), truth[model]


def test_a_block_of_latent_attention_depends_on_the_cpu(truth: dict[str, dict[str, Any]]) -> None:
    """So the comparison above is one of two backends, on whatever CPU it runs."""
    found = {
        name: [forms[f"1 LBNHC {cpu}"]["block_tokens"] for cpu in CPUS]
        for name, forms in truth.items()
        if "1 LBNHC AMX" in forms
    }
    assert found["deepseek-ai/DeepSeek-V3"] == [16, 128]
    assert len(found) >= 5


def test_what_vllm_cannot_construct_is_listed(truth: dict[str, dict[str, Any]]) -> None:
    assert {name for name, found in truth.items() if "1 LBNHC plain" not in found} == NOT_CONSTRUCTED


@pytest.mark.soak
@pytest.mark.parametrize("truth", [TENSOR_PARALLEL], indirect=True)
@pytest.mark.parametrize(("model", "ranks"), [("tiiuae/falcon-7b", 2), ("microsoft/phi-4", 8)])
def test_heads_that_vllm_cannot_divide_are_refused(model: str, ranks: int, truth: dict[str, dict[str, Any]]) -> None:
    assert "AssertionError" in truth[model][f"{ranks}"]
    with pytest.raises(SizeUnknown, match="cannot be divided"):
        ours(catalogue()[model], ranks, "LBNHC")
