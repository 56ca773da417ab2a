"""What `kvbm size` computes from a config.json is what the engine measures on the model, for every architecture."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from kvbm.engines.embedded.engine.model import _probe  # of a model that was not loaded from a directory
from kvbm.engines.embedded.engine.supported_models import SUPPORTED
from kvbm.engines.embedded.kind import EmbeddedKind
from kvbm.engines.embedded.sizing import bytes_per_token

TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    **dict.fromkeys(SUPPORTED, TINY),
    "qwen3_moe": {**TINY, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {**TINY, "num_local_experts": 4},
    "deepseek_v3": {
        **TINY,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_bytes_per_token_are_those_of_the_model(tmp_path: Path, kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    config.save_pretrained(tmp_path)
    geometry = _probe(AutoModelForCausalLM.from_config(config, dtype=torch.float32), "float32", "cpu")
    assert bytes_per_token(EmbeddedKind().model_facts(str(tmp_path)), element_bytes=4) == geometry.token_bytes
