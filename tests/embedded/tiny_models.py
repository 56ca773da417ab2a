"""Tiny random models of the 16 architectures that the embedded engine runs, saved as Hugging Face directories.

Windows are shorter than the prompts that tests use, and initial weights are wide, so that greedy outputs vary.
"""

from pathlib import Path

import torch

VOCABULARY = 199
WINDOW = 24

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}

ARCHITECTURES = {
    "llama": {"model_type": "llama"},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        **EXPERTS,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **EXPERTS},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "phi3": {"model_type": "phi3", "resid_pdrop": 0.0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": WINDOW, "query_pre_attn_scalar": 16, **ALTERNATING},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "cohere2": {"model_type": "cohere2", "sliding_window": WINDOW, **ALTERNATING},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        **EXPERTS,
    },
}


def save(name: str, directory: Path) -> Path:
    """Write the model `name` below `directory`; returns its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = {key: value for key, value in (SHARED | ARCHITECTURES[name]).items() if (key, value) != ("head_dim", None)}
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = directory / name
    model.save_pretrained(path)
    return path


def generate(path: Path, prompts: list[list[int]], new_tokens: int | list[int]) -> list[list[int]]:
    """What transformers' own greedy generation gives for each prompt alone: so many tokens, for all or for each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs, counts = [], [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    for prompt, count in zip(prompts, counts, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        result = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True)
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs
