"""Synthetic models: their configurations, with the keys of a Hugging Face `config.json`.

    tiny     5M parameters; 8 KiB of float32 KV per token
    small    81M parameters; 24 KiB of float32 KV per token
    8b       the shapes of Qwen3-8B without most of its vocabulary: 7B parameters; 144 KiB of bfloat16 KV per token

They have random weights, deterministic in the seed, and need no download. Their token ids are bytes, followed by the
special tokens; `vocab_size` is the sum of both, so that every generated token can be decoded. The initializer range is
wide enough that greedy outputs vary and differ between prompts. synthetic_models.json has what they do not share.
"""

from __future__ import annotations

import json
from pathlib import Path

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
    "bos_token_id": None,
    "pad_token_id": BYTE_COUNT,
    "eos_token_id": BYTE_COUNT + 2,
}
SYNTHETIC: dict[str, dict[str, object]] = {
    name: _SHARED | facts
    for name, facts in json.loads(Path(__file__).with_name("synthetic_models.json").read_text()).items()
}
