"""Readers of model families: from a model's `config.json` to the spec of each layer.

`layer_specs` accepts only the architectures in READERS, with the model types named there. The model type decides which
defaults apply to facts that a configuration leaves out (`defaults.json`). Each reader reads every fact that changes the
cache; a configuration that has another such fact is refused. Sources: the model classes of vLLM 0.32 and the
configuration classes of transformers 5.

Another family is a row of READERS, and a reader in the module of its mechanism if none fits.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.sizing.families import dense, latent, states, windows
from kvbm.sizing.families.facts import ModelFacts, SizeUnknown
from kvbm.sizing.families.layer_specs import LayerKind, LayerSpec, Ranks
from kvbm.sizing.families.layers import Reader


def layer_specs(model_config: Mapping[str, object], ranks: Ranks) -> list[LayerSpec]:
    """Return the specs of all layers. SizeUnknown for an architecture or a fact that no reader here knows."""
    architecture = architecture_of(model_config)
    if architecture in _REASONS:
        raise SizeUnknown(f"for the architecture `{architecture}`, {_REASONS[architecture]}")
    if architecture not in READERS:
        raise SizeUnknown(f"for the architecture `{architecture}`, only the engine knows the size of a block")
    reader, model_types = READERS[architecture]
    facts = ModelFacts.of(model_config)
    if facts.model_type not in model_types:
        named = f"with `model_type: {facts.model_type}`" if facts.get("model_type") else "without `model_type`"
        raise SizeUnknown(f"for the architecture `{architecture}` {named}, only the engine knows the size of a block")
    _require_decoder(facts)
    specs = reader(facts, ranks)
    facts.require_known()
    heads = facts.get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks.tensor_parallel:
        raise SizeUnknown(f"{heads} attention heads cannot be divided among {ranks.tensor_parallel} ranks")
    if not specs:
        raise SizeUnknown(f"a model of the architecture `{architecture}` without attention has no KV cache")
    return specs


def architecture_of(model_config: Mapping[str, object]) -> str:
    """Return the first of `architectures`. SizeUnknown if there is none: vLLM may derive it from the model type."""
    names = model_config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise SizeUnknown(
            "the model's configuration has no `architectures`", hint="`config.json` of a Hugging Face model has them"
        )
    return names[0]


def state_kind(model_config: Mapping[str, object]) -> str | None:
    """Return the kind of states that the model's layers keep, such as `GDN`; None without states or if unknown.

    The architecture decides. It may have no state in any layer, if the layers are known.
    """
    try:
        architecture = architecture_of(model_config)
    except SizeUnknown:
        return None
    if architecture in STATES_ONLY:
        return STATES_ONLY[architecture]
    reader, _ = READERS.get(architecture, (None, ()))
    kind = None if reader is None else _STATE_KINDS.get(reader)
    try:
        specs = layer_specs(model_config, Ranks(1)) if kind is not None else []
    except SizeUnknown:
        return kind
    return kind if any(spec.kind is LayerKind.STATE for spec in specs) else None


def _require_decoder(facts: ModelFacts) -> None:
    """Refuse encoders: vLLM keeps no cache for attention that looks at later tokens."""
    harmless: dict[str, tuple[object, ...]] = {
        "is_causal": (True,),
        "is_encoder_decoder": (None, False),
        "use_bidirectional_attention": (None, False, "vision"),  # Gemma 4: only among the tokens of an image
    }
    for name, values in harmless.items():
        if name in facts and facts[name] not in values:
            raise SizeUnknown(f"with `{name}: {facts[name]}`, only the engine knows the size of a block")


# Reader: architectures, each with the model types of its language model.
_BY_FAMILY: dict[Reader, str] = {
    dense.dense: "ArceeForCausalLM:arcee Ernie4_5ForCausalLM:ernie4_5 GraniteForCausalLM:granite "
    "HunYuanDenseV1ForCausalLM:hunyuan_v1_dense HunYuanMoEV1ForCausalLM:hunyuan_v1_moe LLaMAForCausalLM:llama "
    "LlamaForCausalLM:llama Ministral3ForCausalLM:ministral3 Mistral3ForConditionalGeneration:mistral,ministral3 "
    "MistralForCausalLM:mistral Olmo2ForCausalLM:olmo2 OlmoForCausalLM:olmo Phi3ForCausalLM:phi3 "
    "SeedOssForCausalLM:seed_oss Starcoder2ForCausalLM:starcoder2",
    dense.alike: "CohereForCausalLM:cohere Ernie4_5_MoeForCausalLM:ernie4_5_moe GemmaForCausalLM:gemma "
    "Glm4ForCausalLM:glm4 Glm4MoeForCausalLM:glm4_moe GlmForCausalLM:glm MixtralForCausalLM:mixtral "
    "NemotronForCausalLM:nemotron",
    dense.narrow(dense.alike): "OlmoeForCausalLM:olmoe PhiForCausalLM:phi PhiMoEForCausalLM:phimoe "
    "StableLmForCausalLM:stablelm",
    dense.narrow(dense.dense): "GraniteMoeForCausalLM:granitemoe GraniteMoeSharedForCausalLM:granitemoeshared",
    dense.minimax_m2: "MiniMaxM2ForCausalLM:minimax_m2",
    dense.falcon: "FalconForCausalLM:falcon",
    dense.step3: "Step3TextForCausalLM:step3_text",
    dense.deci: "DeciLMForCausalLM:nemotron-nas",
    windows.qwen: "Qwen3ForCausalLM:qwen3",
    dense.narrow(windows.qwen): "MiMoForCausalLM:mimo Qwen2ForCausalLM:qwen2",
    windows.qwen_without_windows: "Qwen3MoeForCausalLM:qwen3_moe",
    windows.qwen3_vl: "Qwen3VLForConditionalGeneration:qwen3_vl_text "
    "Qwen3VLMoeForConditionalGeneration:qwen3_vl_moe_text",
    windows.smollm3: "SmolLM3ForCausalLM:smollm3",
    dense.narrow(windows.qwen_without_windows): "Qwen2_5_VLForConditionalGeneration:qwen2_5_vl,qwen2_5_vl_text "
    "Qwen2MoeForCausalLM:qwen2_moe Qwen2VLForConditionalGeneration:qwen2_vl,qwen2_vl_text",
    windows.every(2): "Gemma2ForCausalLM:gemma2",
    windows.every(4): "Exaone4ForCausalLM:exaone4 Olmo3ForCausalLM:olmo3",
    windows.every(4, can_change=True, more_reach=1): "Cohere2ForCausalLM:cohere2",  # vLLM keeps one token more
    windows.every(6, can_change=True): "Gemma3ForCausalLM:gemma3_text Gemma3ForConditionalGeneration:gemma3_text",
    windows.gemma3n: "Gemma3nForCausalLM:gemma3n_text Gemma3nForConditionalGeneration:gemma3n_text",
    windows.gemma4: "Gemma4ForCausalLM:gemma4_text Gemma4ForConditionalGeneration:gemma4_text",
    windows.gpt_oss: "GptOssForCausalLM:gpt_oss",
    windows.llama4: "Llama4ForCausalLM:llama4_text Llama4ForConditionalGeneration:llama4_text",
    windows.mimo_v2: "MiMoV2FlashForCausalLM:mimo_v2_flash",
    windows.step3p5: "Step3p5ForCausalLM:step3p5 Step3p7ForConditionalGeneration:step3p5",
    latent.mla: "DeepseekV2ForCausalLM:deepseek_v2 DeepseekV3ForCausalLM:deepseek_v3,kimi_k2 "
    "KimiK25ForConditionalGeneration:deepseek_v3,kimi_k2 MistralLarge3ForCausalLM:deepseek_v3",
    latent.glm4_lite: "Glm4MoeLiteForCausalLM:glm4_moe_lite",
    latent.sparse_mla: "DeepseekV32ForCausalLM:deepseek_v32 GlmMoeDsaForCausalLM:glm_moe_dsa",
    latent.minimax_m3: "MiniMaxM3ForCausalLM:minimax_m3 MiniMaxM3SparseForCausalLM:minimax_m3 "
    "MiniMaxM3SparseForConditionalGeneration:minimax_m3,minimax_m3_text",
    states.gdn: "Qwen3_5ForCausalLM:qwen3_5_text Qwen3_5ForConditionalGeneration:qwen3_5_text "
    "Qwen3_5MoeForCausalLM:qwen3_5_moe_text Qwen3_5MoeForConditionalGeneration:qwen3_5_moe_text "
    "Qwen3NextForCausalLM:qwen3_next",
    states.nemotron_h: "NemotronHForCausalLM:nemotron_h",
    states.granite_hybrid: "GraniteMoeHybridForCausalLM:granitemoehybrid",
    states.falcon_h1: "FalconH1ForCausalLM:falcon_h1",
    states.jamba: "JambaForCausalLM:jamba",
    states.kimi_linear: "KimiK3ForConditionalGeneration:kimi_linear KimiLinearForCausalLM:kimi_linear",
}


def _readers() -> dict[str, tuple[Reader, tuple[str, ...]]]:
    readers = {}
    for reader, rows in _BY_FAMILY.items():
        for row in rows.split():
            architecture, types = row.split(":")
            readers[architecture] = (reader, tuple(types.split(",")))
    return readers


READERS = _readers()
_STATE_KINDS: dict[Reader, str] = {
    states.gdn: "GDN",
    states.nemotron_h: "Mamba-2",
    states.granite_hybrid: "Mamba-2",
    states.falcon_h1: "Mamba-2",
    states.jamba: "Mamba-1",
    states.kimi_linear: "KDA",
}
# Models without attention. No reader knows them.
STATES_ONLY = {"FalconMambaForCausalLM": "Mamba-1", "Mamba2ForCausalLM": "Mamba-2", "MambaForCausalLM": "Mamba-1"}
_V4 = "the attention backend of the GPU decides the format of a block"
_REASONS = dict.fromkeys(("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"), _V4)
