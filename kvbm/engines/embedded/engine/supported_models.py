"""Supported models: which Hugging Face models the embedded engine runs, according to `config.json`. Imports no torch.

The engine checks before it reads weights, and the command `kvbm` before it starts an engine.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from kvbm.engines.embedded.engine.synthetic_models import SYNTHETIC
from kvbm.engines.model_facts import SYNTHETIC_PREFIX, local_directory, no_directory, preset_facts, read_config
from kvbm.errors import ProfileError

SUPPORTED = (
    "cohere2",
    "deepseek_v3",
    "gemma3_text",
    "glm4",
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
_RUNS = f"supported models, text only: {', '.join(SUPPORTED)}"
ADAPTER = "adapter_config.json"
LAYER_TYPES = {"full_attention", "sliding_attention"}


def supported_facts(model: str) -> Mapping[str, object]:
    """Return the content of a model's config.json. Raises ProfileError for one that is missing or not supported."""
    if model.startswith(SYNTHETIC_PREFIX):
        return preset_facts(model, SYNTHETIC)
    directory = local_directory(model)
    if directory is None:
        raise no_directory(model, "use a local directory, or `synthetic:tiny`, which requires no download")
    facts = read_config(directory / "config.json")
    _require_supported(directory, facts)
    return facts


def _require_supported(directory: Path, facts: Mapping[str, object]) -> None:
    kind = facts.get("model_type")
    if kind is None:
        raise ProfileError(f"`{directory}/config.json` has no `model_type`", hint=_RUNS)
    if kind not in SUPPORTED:
        near = difflib.get_close_matches(str(kind), SUPPORTED, n=1)
        nearest = f"; the nearest supported type is `{near[0]}`" if near else ""
        raise ProfileError(
            f"`{directory}` is a `{kind}` model, which the embedded engine does not support{nearest}",
            hint=_RUNS,
        )
    if facts.get("quantization_config"):
        raise ProfileError(f"`{directory}` has quantized weights, which the embedded engine does not support")
    if os.path.lexists(directory / ADAPTER):  # transformers would load it if peft is installed
        raise ProfileError(
            f"`{directory}` has an adapter (`{ADAPTER}`), which the embedded engine does not support",
            hint="merge the adapter into the weights, or use a directory without it",
        )
    layer_types = facts.get("layer_types")
    unknown = sorted({str(entry) for entry in layer_types} - LAYER_TYPES) if isinstance(layer_types, list) else []
    if unknown:
        raise ProfileError(
            f"`{directory}` has layers of type {', '.join(unknown)}, which the embedded engine does not support"
        )
