"""What vLLM chooses by the flags of a CPU, without such a CPU: the backend of latent attention, and its block."""

from typing import Any

import pytest

from kvbm.config.engine import VllmArguments
from kvbm.config.schema import Profile
from kvbm.engines.table import size
from kvbm.engines.vllm.cpu import AMX_MLA, CPU_MLA, latent_attention
from kvbm.engines.vllm.findings import latent_findings
from kvbm.engines.vllm.sizing import Setting
from kvbm.sizing import Cpu, SizeUnknown, Sizing, StateLevel, Wanted
from kvbm.sizing.catalogue import catalogue

WITH_AMX, WITHOUT = Cpu(frozenset({"avx512f", "amx_tile", "amx_bf16"})), Cpu(frozenset({"avx2", "avx512f"}))
DEEPSEEK, PLAIN = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-8B"
LATENT = (*("deepseek-ai/DeepSeek-R1", DEEPSEEK, "moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5"),)


def profile_of(arguments: dict[str, Any]) -> Profile:
    engine = {"kind": "vllm", "model": "m", "arguments": arguments}
    return Profile.model_validate({"engine": engine, "tiers": {"host": {"blocks": 1}}})


def sized(cpu: Cpu, model: str = DEEPSEEK, *, on_cpu: bool = True, **arguments: Any) -> Sizing:
    profile = profile_of(arguments)
    return size(profile, catalogue()[model], on_cpu=on_cpu, wanted=Wanted(cpu=cpu))


def findings(
    cpu: Cpu, model: str = DEEPSEEK, *, environment: dict[str, str] | None = None, **arguments: Any
) -> list[str]:
    setting = Setting(environment or {}, on_cpu=True, cpu=cpu)
    found = latent_findings(VllmArguments.model_validate(arguments), catalogue()[model], setting)
    assert all(one.level is StateLevel.NOTE for one in found)
    return [one.message for one in found]


@pytest.mark.parametrize("model", LATENT)
def test_the_flags_of_the_cpu_decide_the_block_of_latent_attention(model: str) -> None:
    reference, amx = sized(WITHOUT, model), sized(WITH_AMX, model)
    assert (reference.block_tokens, reference.attention_backend) == (16, "CPU_MLA")
    assert (amx.block_tokens, amx.attention_backend) == (128, "AMX_MLA")
    assert amx.block_bytes == 8 * reference.block_bytes


def test_other_models_and_gpus_have_the_same_block_on_every_cpu() -> None:
    plain = sized(WITH_AMX, PLAIN)
    assert plain == sized(WITHOUT, PLAIN)
    assert (plain.block_tokens, plain.attention_backend) == (128, None)
    on_gpu = sized(WITH_AMX, on_cpu=False)
    assert on_gpu == sized(WITHOUT, on_cpu=False)
    assert (on_gpu.block_tokens, on_gpu.attention_backend) == (64, None)


@pytest.mark.parametrize(
    ("arguments", "cpu", "backend"),
    [
        ({"attention_backend": "CPU_MLA"}, WITH_AMX, CPU_MLA),
        ({"attention_backend": "cpu_mla"}, WITH_AMX, CPU_MLA),
        ({"attention_config": {"backend": "CPU_MLA"}}, WITH_AMX, CPU_MLA),
        ({"attention_backend": "AMX_MLA"}, WITHOUT, CPU_MLA),
        ({"attention_backend": "TRITON_MLA"}, WITH_AMX, AMX_MLA),  # vLLM says that it cannot be used
        ({"attention_config": {"flash_attn_version": 3}}, WITH_AMX, AMX_MLA),
        ({}, Cpu(WITH_AMX.flags, (0, 28)), CPU_MLA),
        ({}, Cpu(WITH_AMX.flags, (0, 29)), AMX_MLA),
    ],
)
def test_arguments_and_version_choose_the_backend_as_in_vllm(arguments: dict[str, Any], cpu: Cpu, backend: str) -> None:
    assert latent_attention(VllmArguments.model_validate(arguments), cpu).backend == backend


@pytest.mark.parametrize("config", ['{"backend": "CPU_MLA"}', {"backend_per_kind": {"mla_attention": "CPU_MLA"}}])
def test_a_backend_that_only_vllm_reads_leaves_the_size_unknown(config: Any) -> None:
    with pytest.raises(SizeUnknown, match="attention_config"):
        sized(WITH_AMX, attention_config=config)


def test_the_reference_backend_ignores_the_block_size_and_the_other_one_does_not() -> None:
    assert sized(WITHOUT, block_size=64).block_tokens == 16
    assert sized(WITH_AMX, block_size=64).block_tokens == 64
    [note] = findings(WITHOUT, block_size=64)
    assert "ignores `block_size: 64`" in note
    assert sized(WITHOUT, block_size=64).notes == (note,)


def test_without_latent_attention_there_is_nothing_to_say() -> None:
    assert findings(WITH_AMX, PLAIN) == []
    assert findings(WITH_AMX, environment={"VLLM_MLA_DISABLE": "1"}) == []


STATES_32, STATES_16 = Cpu(frozenset({"avx512f", "avx512_bf16"})), WITHOUT
GRANITE, QWEN = "ibm-granite/granite-4.0-h-small", "Qwen/Qwen3-Next-80B-A3B-Instruct"


def state_bytes(cpu: Cpu, model: str, **arguments: Any) -> int:
    found = sized(cpu, model, block_size=128, **arguments).snapshot
    assert found is not None
    return found.state_bytes


@pytest.mark.parametrize("model", [GRANITE, QWEN])
def test_the_flags_of_the_cpu_decide_the_width_of_states(model: str) -> None:
    wide = state_bytes(STATES_16, model, mamba_ssm_cache_dtype="float32")
    assert state_bytes(STATES_16, model) < wide
    assert state_bytes(STATES_32, model) == wide
    assert state_bytes(WITH_AMX, model) < wide  # AMX alone counts before 0.29 only
    assert state_bytes(Cpu(WITH_AMX.flags, (0, 28)), model) == wide
    assert state_bytes(Cpu(STATES_32.flags, (0, 28)), model) < wide


def test_a_narrow_type_by_name_counts_on_such_a_cpu_for_gated_delta_nets_only() -> None:
    for model, is_kept in ((GRANITE, False), (QWEN, True)):
        wide, narrow = state_bytes(STATES_32, model), state_bytes(STATES_16, model)
        assert wide > narrow
        assert state_bytes(STATES_32, model, mamba_ssm_cache_dtype="bfloat16") == (narrow if is_kept else wide)
        assert state_bytes(Cpu(WITH_AMX.flags, (0, 28)), model, mamba_ssm_cache_dtype="bfloat16") == wide


def test_gpus_and_models_without_states_ignore_the_width_of_the_cpu() -> None:
    assert sized(STATES_32, PLAIN) == sized(STATES_16, PLAIN)
    assert sized(STATES_32, GRANITE, on_cpu=False) == sized(STATES_16, GRANITE, on_cpu=False)
