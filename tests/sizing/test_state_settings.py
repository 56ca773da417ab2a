"""Settings of vLLM for models with states: what each means, and those with which kvbm has nothing to load."""

from typing import Any

import pytest

from kvbm.config.engine import VllmArguments
from kvbm.engines.make_model import MODELS
from kvbm.engines.vllm.findings import state_findings
from kvbm.engines.vllm.sizing import Model, Setting, plan_of
from kvbm.engines.vllm.state_settings import StateSettings
from kvbm.sizing import StateFinding, StateLevel
from kvbm.sizing.catalogue import catalogue
from kvbm.sizing.families.table import state_kind

RETENTION = "prefix_cache_retention_interval"


def found(
    arguments: dict[str, Any],
    *,
    kind: str = "GDN",
    tokens: int | None = 544,
    is_certain: bool = True,
    on_cpu: bool = False,
) -> list[StateFinding]:
    return StateSettings(VllmArguments.model_validate(arguments), kind, tokens, is_certain, on_cpu).findings()


def on_cpu(arguments: dict[str, Any], *, kind: str = "GDN", tokens: int | None = 256) -> list[str]:
    """The warnings on a CPU."""
    findings = found(arguments, kind=kind, tokens=tokens, on_cpu=True)
    assert all(one.level is not StateLevel.MISTAKE for one in findings)
    return [one.message for one in findings if one.level is StateLevel.WARNING]


@pytest.mark.parametrize("value", [None, 0])
def test_the_default_suits_chats_and_names_an_interval_for_long_prefixes(value: object) -> None:
    [note] = found({} if value is None else {RETENTION: value})
    assert (note.level, note.key) == (StateLevel.NOTE, f"engine.arguments.{RETENTION}")
    assert ("is not set, so vLLM uses 0" in note.message) == (value is None)
    assert "at the end of each prompt" in note.message
    assert "suits chats and agents" in note.message
    assert note.message.endswith("for long shared prefixes, set a number of tokens")


def test_an_interval_is_counted_in_blocks() -> None:
    [note] = found({RETENTION: 4352})
    assert note.level is StateLevel.NOTE
    assert "a snapshot every 4,352 tokens (8 blocks), at the end of each prompt, and where two" in note.message
    assert "(1 block)" in found({RETENTION: 544})[0].message
    assert "every 300 tokens, at" in found({RETENTION: 300}, tokens=None)[0].message


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(300, ["544"]), (545, ["544", "1088"]), (4096, ["3808", "4352"])],
)
def test_an_interval_between_two_boundaries_is_refused_with_the_nearest_ones(value: object, nearest: list[str]) -> None:
    [mistake] = found({RETENTION: value})
    assert mistake.level is StateLevel.MISTAKE
    assert mistake.message == (
        f"`engine.arguments.{RETENTION}: {value}` is not a multiple of the block size of 544 tokens"
    )
    shown = " or ".join(f"`{RETENTION}: {one}`" for one in nearest)
    assert mistake.hint == f"vLLM would not start; use {shown}, or 0"
    [warning] = found({RETENTION: value}, is_certain=False)
    assert warning.level is StateLevel.WARNING
    assert "544 tokens, the likely block size" in warning.message
    assert shown in warning.message


MTP = {"method": "mtp", "num_speculative_tokens": 1}
DISABLED: list[tuple[dict[str, Any], str]] = [
    ({"speculative_config": MTP}, "EAGLE and MTP have no hits in G1 either"),
    ({"speculative_config": MTP, RETENTION: 0}, "EAGLE and MTP have no hits in G1 either"),
    ({"speculative_config": MTP, RETENTION: 544}, "speculative decoding with states has never been run"),
    ({"enable_prefix_caching": False}, "without prefix caching, vLLM keeps no state"),
    ({"mamba_cache_mode": "all"}, "`mamba_cache_mode: all` has never been run with kvbm; remove it, or use `align`"),
    ({"use_replayssm": True}, "`use_replayssm`, which delays the update of states, has never been run with kvbm"),
    ({"pipeline_parallel_size": 2}, "pipeline parallelism with states has never been run"),
]


@pytest.mark.parametrize(("arguments", "reason"), DISABLED)
def test_a_setting_that_disables_kvbm_is_the_only_finding(arguments: dict[str, Any], reason: str) -> None:
    [warning] = found(arguments, tokens=None, on_cpu=True)
    name = next(iter(arguments))
    assert (warning.level, warning.key) == (StateLevel.WARNING, f"engine.arguments.{name}")
    start = f"`engine.arguments.{name}`: this model keeps states, so kvbm is disabled: "
    assert warning.message.startswith(start)
    assert reason in warning.message.removeprefix(start)
    assert warning.disables


def test_kinds_of_states_that_were_never_run_disable_kvbm() -> None:
    for kind in ("KDA", "Mamba-1"):
        [warning] = found({}, kind=kind)
        assert (warning.level, warning.key) == (StateLevel.WARNING, "engine.model")
        assert f"disabled for models with {kind} states" in warning.message
        assert warning.disables


def test_a_mode_that_vllm_replaces_is_a_note() -> None:
    assert found({"mamba_cache_mode": "align"}) == found({})
    first, *others = found({"mamba_cache_mode": "none"})
    assert others == found({})
    assert first.level is StateLevel.NOTE
    assert "`engine.arguments.mamba_cache_mode: none` has no effect" in first.message


def test_on_a_cpu_the_enlarged_block_size_must_be_set() -> None:
    [warning] = on_cpu({})
    assert "enlarges the block to 256 tokens, but its scheduler continues with 128 tokens" in warning
    assert warning.endswith("set `block_size: 256`")
    assert on_cpu({}, tokens=None)[0].endswith("set `block_size: N`")
    assert on_cpu({}, tokens=128) == []
    assert on_cpu({"block_size": 256}) == on_cpu({"block_size": 128}) == []
    assert [one.level for one in found({})] == [StateLevel.NOTE]  # not on a GPU


def test_on_a_cpu_a_step_of_a_mamba_2_model_must_not_cross_a_boundary() -> None:
    [unset] = on_cpu({"block_size": 256}, kind="Mamba-2")
    assert "`engine.arguments.max_num_batched_tokens` is not set: on a CPU" in unset
    assert "set `max_num_batched_tokens: 256`" in unset
    [other] = on_cpu({"block_size": 256, "max_num_batched_tokens": "2k"}, kind="Mamba-2")
    assert "max_num_batched_tokens` is 2000: on a CPU" in other
    assert on_cpu({"block_size": 256, "max_num_batched_tokens": 256}, kind="Mamba-2") == []
    assert on_cpu({"block_size": 256, "max_num_batched_tokens": 2048}) == []


def test_kinds_of_states_of_known_models() -> None:
    kinds = {model: state_kind(facts) for model, facts in catalogue().items()}
    assert kinds["Qwen/Qwen3-Next-80B-A3B-Instruct"] == kinds["Qwen/Qwen3.5-27B"] == "GDN"
    assert kinds["ibm-granite/granite-4.0-h-small"] == kinds["tiiuae/Falcon-H1-34B-Instruct"] == "Mamba-2"
    assert kinds["moonshotai/Kimi-K3"] == "KDA"
    assert kinds["ai21labs/AI21-Jamba-Mini-1.5"] == "Mamba-1"
    assert kinds["Qwen/Qwen3-8B"] is None
    granite = dict(catalogue()["ibm-granite/granite-4.0-h-small"])
    layers = granite["num_hidden_layers"]
    assert isinstance(layers, int)
    assert state_kind({**granite, "layer_types": ["attention"] * layers}) is None  # such as granite-4.0-micro
    assert state_kind({**granite, "unknown_window_size": 5}) == "Mamba-2"
    assert state_kind({}) is None
    assert state_kind({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}) == "Mamba-2"


def findings_of(
    arguments: dict[str, Any], *, model: dict[str, Any] = MODELS["vllm-hybrid"], is_installed: bool = True
) -> list[str]:
    flags = VllmArguments.model_validate({"max_model_len": 4096, "dtype": "bfloat16", **arguments})
    findings = state_findings(flags, model, Setting({}, on_cpu=True), is_installed)
    return [f"{one.level.value}: {one.message}" for one in findings]


def test_facts_come_from_the_profile_and_the_model() -> None:
    known = {"mamba_ssm_cache_dtype": "float32", "block_size": 256}
    assert findings_of({}, model=MODELS["vllm-81m"]) == []
    assert findings_of(known)[0].startswith("note: ")
    assert findings_of({**known, RETENTION: 300})[0].startswith("mistake: ")
    assert findings_of({**known, RETENTION: 300}, is_installed=False)[0].startswith("warning: ")
    unknown = findings_of({RETENTION: 300, "mamba_ssm_cache_dtype": "float8"})
    assert unknown[0].startswith("note: ")
    assert unknown[1].endswith("set `block_size: N`")


@pytest.mark.parametrize("model", ["vllm-granite4", "vllm-nemotron-h", "vllm-falcon-h1", "vllm-mamba2"])
def test_settings_are_reported_for_models_without_a_known_size(model: str) -> None:
    facts = {"mamba_new_window": 5, **MODELS[model]}
    [disabled] = findings_of({"enable_prefix_caching": False}, model=facts)
    assert "this model keeps states, so kvbm is disabled: without prefix caching" in disabled
    findings = findings_of({"block_size": 128}, model=facts)
    assert [one for one in findings if "max_num_batched_tokens` is not set: on a CPU" in one]


def test_a_block_without_attention_keeps_its_size() -> None:
    [warning, *_] = [one for one in findings_of({}, model=MODELS["vllm-mamba2"]) if one.startswith("warning: ")]
    assert warning.endswith("set `max_num_batched_tokens: 128`, the block size")
    assert findings_of({RETENTION: 200}, model=MODELS["vllm-mamba2"])[0].startswith("mistake: ")


def test_an_interval_without_states_and_windows_is_refused() -> None:
    assert findings_of({RETENTION: 256}, model=MODELS["vllm-81m"]) == [
        f"mistake: `engine.arguments.{RETENTION}` is only for models with states or sliding windows, and this model "
        "has neither"
    ]
    assert findings_of({RETENTION: 0}, model=MODELS["vllm-81m"]) == []
    assert findings_of({RETENTION: 256}, model=MODELS["vllm-swa"]) == []
    no_windows = {RETENTION: 256, "disable_hybrid_kv_cache_manager": True}
    assert len(findings_of(no_windows, model=MODELS["vllm-swa"])) == 1


SAVED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("model", "saved"),
    [
        ("vllm-granite4", {"layer_types": SAVED}),
        (
            "vllm-nemotron-h",
            {
                "hybrid_override_pattern": None,
                "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
                "mtp_layers_block_type": ["full_attention", "moe"],
            },
        ),
        ("vllm-falcon-h1", {"ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0}),
    ],
)
def test_a_configuration_that_transformers_5_saved_has_the_same_groups(model: str, saved: dict[str, Any]) -> None:
    plans = [
        plan_of(Model(VllmArguments(), facts, Setting({}, on_cpu=False)))
        for facts in (MODELS[model], MODELS[model] | saved)
    ]
    assert plans[0] == plans[1]
    assert plans[0].snapshot is not None
