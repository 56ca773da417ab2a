"""Code from outside vLLM that can compute KV: what vLLM's registries hold, options name, and plugins bring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from kvbm.identity.code import plugins, registered

REGISTRIES = (
    ("vllm.v1.attention.backends.registry", "_ATTN_OVERRIDES"),
    ("vllm.v1.attention.backends.registry", "_MAMBA_ATTN_OVERRIDES"),
    ("vllm.model_executor.custom_op", "op_registry"),
    ("vllm.model_executor.custom_op", "op_registry_oot"),
    ("vllm.model_executor.layers.quantization", "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"),
    ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"),
)
PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")  # the other groups run in front of the engine


def roots_of(vllm_config: Any) -> Iterator[object]:
    """Yield classes and names of modules that may compute KV, those of vLLM itself too."""
    for model in registered("vllm.model_executor.models.registry", "ModelRegistry.models"):
        yield getattr(model, "model_cls", None) or getattr(model, "module_name", None) or model
    for registry in REGISTRIES:
        yield from filter(None, registered(*registry))
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    names = [getattr(parallel, name, None) for name in ("worker_cls", "worker_extension_cls")]
    names.append(getattr(vllm_config.scheduler_config, "scheduler_cls", None))
    if getattr(speculative, "method", None) == "custom_class":
        names.append(speculative.model)
    yield from (name for name in names if name and name != "auto")
    yield type(vllm_config.model_config.hf_config)
    allowed = os.environ.get("VLLM_PLUGINS")
    for group in PLUGINS:
        yield from plugins(group, None if allowed is None else allowed.split(","))
