"""Synthetic models: their configurations, with the keys of a Hugging Face `config.json`.

They have random weights, deterministic in the seed, and need no download. Their token ids are bytes, followed by the
special tokens; `vocab_size` is the sum of both, so that every generated token can be decoded. The initializer range is
wide enough that greedy outputs vary and differ between prompts.
"""

from __future__ import annotations

from kvbm.engines.make_model import SPECIAL_TOKENS

BYTE_COUNT = 256

_SHARED: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": BYTE_COUNT + len(SPECIAL_TOKENS),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "pad_token_id": BYTE_COUNT,
    "eos_token_id": BYTE_COUNT + 2,
}

SYNTHETIC: dict[str, dict[str, object]] = {
    # 5M parameters; 8 KiB of float32 KV per token
    "tiny": {
        **_SHARED,
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # 81M parameters; 24 KiB of float32 KV per token
    "small": {
        **_SHARED,
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 2400,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # the shapes of Qwen3-8B without most of its vocabulary: 7B parameters; 144 KiB of bfloat16 KV per token
    "8b": {
        **_SHARED,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
    },
}
