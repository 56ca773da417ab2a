"""Small configurations of every architecture that sizing accepts, in forms that files may have, hostile ones too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Config = dict[str, Any]

SHAPE: Config = {
    "hidden_size": 768,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 4096,
    "pad_token_id": 0,
}
EXPERTS: Config = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 7,
    "moe_layer_interval": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Config = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 64,
    "q_lora_rank": 256,
}
WINDOWS = (["sliding_attention"] * 3 + ["full_attention"]) * 2
GDN: Config = {
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "head_dim": 128,
    "shared_expert_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}
BAMBA: Config = {
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
MODEL_TYPES = (
    "ArceeForCausalLM:arcee CohereForCausalLM:cohere Cohere2ForCausalLM:cohere2 DeepseekV2ForCausalLM:deepseek_v2 "
    "DeepseekV3ForCausalLM:deepseek_v3 Ernie4_5ForCausalLM:ernie4_5 Ernie4_5_MoeForCausalLM:ernie4_5_moe "
    "Exaone4ForCausalLM:exaone4 FalconForCausalLM:falcon FalconH1ForCausalLM:falcon_h1 GemmaForCausalLM:gemma "
    "Gemma2ForCausalLM:gemma2 Gemma3ForCausalLM:gemma3_text Gemma3nForCausalLM:gemma3n_text "
    "Gemma4ForCausalLM:gemma4_text GlmForCausalLM:glm Glm4ForCausalLM:glm4 Glm4MoeForCausalLM:glm4_moe "
    "Glm4MoeLiteForCausalLM:glm4_moe_lite GptOssForCausalLM:gpt_oss GraniteForCausalLM:granite "
    "GraniteMoeForCausalLM:granitemoe GraniteMoeHybridForCausalLM:granitemoehybrid "
    "GraniteMoeSharedForCausalLM:granitemoeshared HunYuanDenseV1ForCausalLM:hunyuan_v1_dense "
    "HunYuanMoEV1ForCausalLM:hunyuan_v1_moe JambaForCausalLM:jamba LlamaForCausalLM:llama "
    "Llama4ForCausalLM:llama4_text MiMoForCausalLM:mimo MiMoV2FlashForCausalLM:mimo_v2_flash "
    "MiniMaxM2ForCausalLM:minimax_m2 Ministral3ForCausalLM:ministral3 MistralForCausalLM:mistral "
    "MixtralForCausalLM:mixtral NemotronForCausalLM:nemotron NemotronHForCausalLM:nemotron_h OlmoForCausalLM:olmo "
    "Olmo2ForCausalLM:olmo2 Olmo3ForCausalLM:olmo3 OlmoeForCausalLM:olmoe PhiForCausalLM:phi Phi3ForCausalLM:phi3 "
    "PhiMoEForCausalLM:phimoe Qwen2ForCausalLM:qwen2 Qwen2MoeForCausalLM:qwen2_moe Qwen3ForCausalLM:qwen3 "
    "Qwen3MoeForCausalLM:qwen3_moe Qwen3NextForCausalLM:qwen3_next Qwen3_5ForCausalLM:qwen3_5_text "
    "Qwen3_5MoeForCausalLM:qwen3_5_moe_text SeedOssForCausalLM:seed_oss SmolLM3ForCausalLM:smollm3 "
    "StableLmForCausalLM:stablelm Starcoder2ForCausalLM:starcoder2 Step3TextForCausalLM:step3_text "
    "Step3p5ForCausalLM:step3p5"
)
MORE: dict[str, Config] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "qwen3_next": GDN,
    "qwen3_5_text": {**GDN, "mamba_ssm_dtype": "float32"},
    "qwen3_5_moe_text": GDN,
    "granitemoehybrid": {
        **BAMBA,
        "mamba_n_heads": 24,
        "layer_types": (["mamba"] * 3 + ["attention"]) * 2,
        "shared_intermediate_size": 256,
    },
    "falcon_h1": {**BAMBA, "head_dim": 128, "mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5},
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 48,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*M-M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "head_dim": 96,
        "mamba_hidden_act": "silu",
    },
    "llama4_text": {
        "attention_chunk_size": 1024,
        "head_dim": 128,
        "intermediate_size_mlp": 1024,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "use_qk_norm": False,
    },
    "gpt_oss": {
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "mimo_v2_flash": {
        "head_dim": 192,
        "v_head_dim": 128,
        "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1, 1, 1],
        "sliding_window_size": 128,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "moe_layer_freq": [0] * 8,
        "swa_rope_theta": 10000.0,
        "rope_theta": 10000.0,
    },
    "minimax_m2": {"head_dim": 96, "rotary_dim": 48},
    "gemma4_text": {
        "head_dim": 128,
        "global_head_dim": 256,
        "sliding_window": 512,
        "layer_types": WINDOWS,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
    "gemma3n_text": {
        "head_dim": 128,
        "sliding_window": 512,
        "num_kv_shared_layers": 4,
        "layer_types": WINDOWS,
        "activation_sparsity_pattern": [0.0] * 8,
        "intermediate_size": [1024] * 8,
        "vocab_size_per_layer_input": 4096,
    },
    "step3_text": {
        "num_attention_groups": 1,
        "head_dim": 128,
        "share_q_dim": 256,
        "moe_layers_enum": [1, 2, 3],
        "share_expert_dim": 256,
        "moe_top_k": 2,
    },
    "step3p5": {
        "num_attention_groups": 4,
        "head_dim": 96,
        "sliding_window": 512,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 2,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 16,
            "num_attention_groups": 8,
            "head_dim": 64,
        },
        "moe_layers_enum": "7",
        "rope_theta": 10000.0,
        "moe_top_k": 2,
        "share_expert_dim": 64,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
}
FORMS: dict[str, Config] = {
    "plain": {},
    "head_dim 128": {"head_dim": 128},
    "head_dim 256": {"head_dim": 256},
    "1 KV head": {"num_key_value_heads": 1},
    "8 KV heads": {"num_key_value_heads": 8},
    "16 heads": {"num_attention_heads": 16},
    "4 layers": {"num_hidden_layers": 4},
    "12 layers": {"num_hidden_layers": 12},
    "window": {"sliding_window": 512},
    "window null": {"sliding_window": None},
    "window 0": {"sliding_window": 0},
    "window off": {"sliding_window": 512, "use_sliding_window": False},
    "window on": {"sliding_window": 512, "use_sliding_window": True},
    "window of the last layers": {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 4},
    "window of no layer": {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0},
    "types": {"sliding_window": 512, "layer_types": WINDOWS},
    "types on": {"sliding_window": 512, "use_sliding_window": True, "layer_types": WINDOWS},
    "types all windows": {"sliding_window": 512, "layer_types": ["sliding_attention"] * 8},
    "types all full": {"sliding_window": 512, "layer_types": ["full_attention"] * 8},
    "types full without window": {"sliding_window": None, "layer_types": ["full_attention"] * 8},
    "types without window": {"layer_types": WINDOWS},
    "types too long": {"sliding_window": 512, "layer_types": WINDOWS + WINDOWS[:4]},
    "types too short": {"sliding_window": 512, "layer_types": WINDOWS[:4]},
    "types of chunks": {
        "attention_chunk_size": 256,
        "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 2,
    },
    "types of old names": {"layer_types": ["attention"] * 8},
    "pattern": {"sliding_window": 512, "sliding_window_pattern": 2},
    "pattern of old name": {"sliding_window": 512, "_sliding_window_pattern": 2},
    "shared layers": {"num_kv_shared_layers": 2},
    "no shared layers": {"num_kv_shared_layers": 0},
    "encoder": {"is_causal": False},
    "both directions": {"use_bidirectional_attention": True},
    "encoder and decoder": {"is_encoder_decoder": True},
    "chunks": {"attention_chunk_size": 256},
    "multi-query": {"multi_query": True},
    "groups": {"num_attention_groups": 2},
    "groups of GLM": {"multi_query_group_num": 2},
    "KV heads of Falcon": {"n_head_kv": 2},
    "KV heads of DBRX": {"num_kv_heads": 2},
    "attention_head_dim": {"attention_head_dim": 64},
    "kv_channels": {"kv_channels": 64},
    "hidden_size_per_head": {"hidden_size_per_head": 64},
    "latent": LATENT,
    "index": {"index_topk": 512, "index_head_dim": 128, "index_n_heads": 8},
    "cross-layer attention": {"use_cla": True, "cla_share_factor": 2},
    "windows listed": {"interleaved_sliding_window": [512, None]},
    "32 bits": {"dtype": "float32"},
    "no rope": {"no_rope_layers": [1, 1, 1, 0] * 2, "no_rope_layer_interval": 4},
    "no rope at all": {"no_rope_layers": [0] * 8},
    "states of 16 bits": {"mamba_ssm_dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"},
    "full in every second": {"full_attention_interval": 2},
    "keys are no values": {"attention_k_eq_v": False},
    "chunks of two kinds": {"dual_chunk_attention_config": {"chunk_size": 1024, "local_size": 256}},
    "KV heads listed": {"num_key_value_heads": [4] * 8},
}


def configurations() -> dict[str, Config]:
    """Return all forms by name; also each with one fact left out, and with one fact that is null."""
    models = {}
    for architecture, base in _bases():
        for form, facts in FORMS.items():
            models[f"{architecture} {form}"] = {**base, **facts}
        for name in set(base) - {"architectures", "model_type", "vocab_size", "pad_token_id", *EXPERTS}:
            models[f"{architecture} without {name}"] = {key: value for key, value in base.items() if key != name}
            models[f"{architecture} null {name}"] = {**base, name: None}
    return models


def _bases() -> Iterator[tuple[str, Config]]:
    for row in MODEL_TYPES.split():
        architecture, model_type = row.split(":")
        names: Config = {"architectures": [architecture], "model_type": model_type}
        yield architecture, {**names, **SHAPE, **EXPERTS, **MORE.get(model_type, {})}
