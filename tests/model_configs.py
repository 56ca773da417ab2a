"""Facts of well-known models, as their `config.json` has them."""

import json
from collections.abc import Mapping
from pathlib import Path

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def write_model(directory: Path, facts: Mapping[str, object] = QWEN3) -> None:
    """Make the directory of a model without weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(facts))
