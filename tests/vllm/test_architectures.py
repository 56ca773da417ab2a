"""Every dense architecture that sizing accepts, in forms that configurations may have, against vLLM's own classes.

Where vLLM constructs a model, the sizes are the same or sizing refuses the model; it never gives another number.
Long: `pytest -m soak tests/vllm/test_architectures.py`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_model_sizes import ours

from kvbm.sizing import SizeUnknown

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

MODEL_TYPES = {
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "ministral3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "SeedOssForCausalLM": "seed_oss",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 4096,
    "pad_token_id": 0,
}
EXPERTS = {
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
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 64, "q_lora_rank": 256}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head_dim": {"head_dim": 128},
    "window": {"sliding_window": 512},
    "layer_types": {"sliding_window": 512, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
}


def configurations() -> dict[str, dict[str, Any]]:
    models = {}
    for architecture, model_type in MODEL_TYPES.items():
        base = {"architectures": [architecture], "model_type": model_type, **SHAPE, **EXPERTS}
        latent = LATENT if "Deepseek" in architecture or "Lite" in architecture else {}
        models |= {f"{architecture} {form}": base | latent | facts for form, facts in FORMS.items()}
    return models


def test_no_architecture_has_another_size_than_in_vllm(tmp_path: Path) -> None:
    models = configurations()
    file = tmp_path / "models.json"
    file.write_text(json.dumps(models))
    script = Path(__file__).with_name("model_specs.py")
    run = subprocess.run([sys.executable, script, file], capture_output=True, text=True, check=True)
    wrong, equal = {}, 0
    for name, found in json.loads(run.stdout.splitlines()[-1]).items():
        if (expected := found.get("1 LBNHC")) is None:
            continue  # vLLM refuses it as well
        try:
            size = ours(models[name], 1, "LBNHC")
        except SizeUnknown:
            continue
        equal += size == expected
        if size != expected:
            wrong[name] = (expected, size)
    assert wrong == {}
    assert equal > len(models) / 2
