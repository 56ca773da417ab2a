"""What vLLM chooses by the flags of a CPU, without such a CPU: the backend of latent attention, and its block."""

from typing import Any

import pytest

from kvbm.config.engine import VllmArguments
from kvbm.config.schema import Profile
from kvbm.engines.table import size
from kvbm.engines.vllm.cpu import LatentAttention, LatentBackend
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
    cpu: Cpu, level: StateLevel, model: str = DEEPSEEK, *, environment: dict[str, str] | None = None, **arguments: Any
) -> list[str]:
    setting = Setting(environment or {}, on_cpu=True, cpu=cpu)
    found = latent_findings(VllmArguments.model_validate(arguments), catalogue()[model], setting)
    return [f"{one.message}; {one.hint}" if one.hint else one.message for one in found if one.level is level]


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
        ({"attention_backend": "CPU_MLA"}, WITH_AMX, LatentBackend.REFERENCE),
        ({"attention_backend": "cpu_mla"}, WITH_AMX, LatentBackend.REFERENCE),
        ({"attention_config": {"backend": "CPU_MLA"}}, WITH_AMX, LatentBackend.REFERENCE),
        ({"attention_backend": "AMX_MLA"}, WITHOUT, LatentBackend.REFERENCE),
        ({"attention_backend": "TRITON_MLA"}, WITH_AMX, LatentBackend.AMX),  # vLLM says that it cannot be used
        ({"attention_config": {"flash_attn_version": 3}}, WITH_AMX, LatentBackend.AMX),
        ({}, Cpu(WITH_AMX.flags, (0, 28)), LatentBackend.REFERENCE),
        ({}, Cpu(WITH_AMX.flags, (0, 29)), LatentBackend.AMX),
    ],
)
def test_arguments_and_version_choose_the_backend_as_in_vllm(
    arguments: dict[str, Any], cpu: Cpu, backend: LatentBackend
) -> None:
    assert LatentAttention(VllmArguments.model_validate(arguments), cpu).backend is backend


@pytest.mark.parametrize("config", ['{"backend": "CPU_MLA"}', {"backend_per_kind": {"mla_attention": "CPU_MLA"}}])
def test_a_backend_that_only_vllm_reads_leaves_the_size_unknown(config: Any) -> None:
    with pytest.raises(SizeUnknown, match="attention_config"):
        sized(WITH_AMX, attention_config=config)


def test_the_reference_backend_ignores_the_block_size_and_the_other_one_does_not() -> None:
    assert sized(WITHOUT, block_size=64).block_tokens == 16
    assert sized(WITH_AMX, block_size=64).block_tokens == 64
    [note] = findings(WITHOUT, StateLevel.NOTE, block_size=64)
    assert "ignores `block_size: 64`" in note
    assert sized(WITHOUT, block_size=64).notes == (note,)


def test_what_does_not_start_with_amx_is_a_mistake_and_has_no_size() -> None:
    [wide] = findings(WITH_AMX, StateLevel.MISTAKE, dtype="float32")
    assert wide.startswith("`engine.arguments.dtype: float32`: vLLM uses the attention backend AMX_MLA")
    assert wide.endswith("use `dtype: bfloat16`, or `attention_backend: CPU_MLA`")
    [small] = findings(WITH_AMX, StateLevel.MISTAKE, block_size=16)
    assert "multiple of 32; use `block_size: 32`" in small
    for arguments in ({"dtype": "float32"}, {"block_size": 16}):
        with pytest.raises(SizeUnknown, match="AMX_MLA"):
            sized(WITH_AMX, **arguments)
        for cpu, more in ((WITHOUT, {}), (WITH_AMX, {"attention_backend": "CPU_MLA"})):
            assert findings(cpu, StateLevel.MISTAKE, **arguments, **more) == []
            assert sized(cpu, **arguments, **more).block_tokens == 16


def test_wrong_answers_with_float16_are_a_warning() -> None:
    [warning] = findings(WITH_AMX, StateLevel.WARNING, dtype="half")
    assert "wrong answers with half" in warning
    assert findings(WITH_AMX, StateLevel.WARNING, dtype="bfloat16") == []
    assert findings(WITHOUT, StateLevel.WARNING, dtype="half") == []


def test_without_latent_attention_there_is_nothing_to_say() -> None:
    assert findings(WITH_AMX, StateLevel.MISTAKE, PLAIN, dtype="float32") == []
    assert findings(WITH_AMX, StateLevel.NOTE, PLAIN) == []
    assert findings(WITH_AMX, StateLevel.NOTE, environment={"VLLM_MLA_DISABLE": "1"}) == []


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
    [narrow_note, *_], [wide_note, *_] = (sized(cpu, model, block_size=128).notes for cpu in (STATES_16, STATES_32))
    assert "in 16 bits on this CPU; one with avx512_bf16 keeps 32" in narrow_note
    assert "this CPU has avx512_bf16, so vLLM keeps the states of this model in 32 bits" in wide_note


def test_a_narrow_type_by_name_counts_on_such_a_cpu_for_gated_delta_nets_only() -> None:
    for model, is_kept in ((GRANITE, False), (QWEN, True)):
        wide, narrow = state_bytes(STATES_32, model), state_bytes(STATES_16, model)
        assert wide > narrow
        assert state_bytes(STATES_32, model, mamba_ssm_cache_dtype="bfloat16") == (narrow if is_kept else wide)
        assert state_bytes(Cpu(WITH_AMX.flags, (0, 28)), model, mamba_ssm_cache_dtype="bfloat16") == wide


def test_gpus_and_models_without_states_ignore_the_width_of_the_cpu() -> None:
    assert sized(STATES_32, PLAIN) == sized(STATES_16, PLAIN)
    assert sized(STATES_32, GRANITE, on_cpu=False) == sized(STATES_16, GRANITE, on_cpu=False)


@pytest.mark.parametrize("cpu", [WITH_AMX, WITHOUT])
def test_a_cache_of_8_bits_with_latent_attention_is_a_mistake_on_a_cpu(cpu: Cpu) -> None:
    [wrong] = findings(cpu, StateLevel.MISTAKE, kv_cache_dtype="fp8")
    assert wrong.startswith("kv_cache_dtype: fp8: on a CPU, vLLM fails at the first request")
    assert wrong.endswith("use `kv_cache_dtype: bfloat16` with `attention_backend: CPU_MLA`")
    with pytest.raises(SizeUnknown, match="kv_cache_dtype: fp8"):
        sized(cpu, kv_cache_dtype="fp8")
    [of_checkpoint] = findings(cpu, StateLevel.MISTAKE, "nvidia/Kimi-K2.6-NVFP4")
    assert of_checkpoint.startswith("the checkpoint's `quantization_config`: KV cache: fp8"), of_checkpoint
    assert sized(cpu, on_cpu=False, kv_cache_dtype="fp8").block_bytes
    assert sized(cpu, PLAIN, kv_cache_dtype="fp8").block_bytes


def test_the_backend_for_amx_supports_no_type_of_the_cache_by_name() -> None:
    [wrong] = findings(WITH_AMX, StateLevel.MISTAKE, kv_cache_dtype="bfloat16")
    assert "the attention backend AMX_MLA does not support this type" in wrong
    pinned = {"kv_cache_dtype": "bfloat16", "attention_backend": "CPU_MLA"}
    assert findings(WITH_AMX, StateLevel.MISTAKE, **pinned) == []
    assert findings(WITHOUT, StateLevel.MISTAKE, kv_cache_dtype="bfloat16") == []
    assert findings(WITH_AMX, StateLevel.MISTAKE, kv_cache_dtype="auto") == []
