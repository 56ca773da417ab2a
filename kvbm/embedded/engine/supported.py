"""Which models of Hugging Face the embedded engine runs, judged by their `config.json`. Pure, and free of torch.

Asked by the engine before it reads weights, and by the command `kvbm` before it starts an engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from kvbm.errors import ProfileError

SUPPORTED = (
    "cohere2",
    "deepseek_v3",
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
_RUNS = f"the embedded engine runs {', '.join(SUPPORTED)}, text only"
LAYER_TYPES = {"full_attention", "sliding_attention"}


def require_supported(directory: Path, facts: Mapping[str, object]) -> None:
    """Raise ProfileError for a model that would run wrongly or not at all."""
    kind = facts.get("model_type")
    if kind is None:
        raise ProfileError(f"`{directory}/config.json` names no `model_type`", hint=_RUNS)
    if kind not in SUPPORTED:
        near = difflib.get_close_matches(str(kind), SUPPORTED, n=1)
        nearest = f"; `{near[0]}` would be" if near else ""
        raise ProfileError(
            f"`{directory}` is a `{kind}` model, which the embedded engine does not run{nearest}",
            hint=_RUNS,
        )
    if facts.get("quantization_config"):
        raise ProfileError(f"`{directory}` has quantised weights, which the embedded engine does not run")
    layer_types = facts.get("layer_types")
    unknown = sorted({str(entry) for entry in layer_types} - LAYER_TYPES) if isinstance(layer_types, list) else []
    if unknown:
        raise ProfileError(
            f"`{directory}` has layers of type {', '.join(unknown)}, which the embedded engine does not run"
        )
