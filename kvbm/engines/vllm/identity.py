"""Engine identity: the values that determine the bytes and the hashes of vLLM's blocks.

Other engines, on this machine or on others, load blocks of an engine with the same identity. It contains vLLM's options
(options.py), the Hugging Face configuration after all overrides, the content of the model's files and of a draft
model's, versions, and the root of the hashes. It contains no path and nothing in which replicas of one model differ.

The connector is created after vLLM has loaded the weights. The files describe them only if nothing has changed a file,
a link or a directory on the way since before: loads.py compares. Whatever is in doubt is not kept for the next start.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.engines.vllm.loads import content_of, directory_of, models_of, runs_its_code
from kvbm.engines.vllm.options import OMITTED, environment, length, sections
from kvbm.engines.vllm.weight_updates import reports_weight_updates
from kvbm.identity.code import code_of, plugins, registered
from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import FileContent, loaded, require_format, with_weights
from kvbm.identity.machine import cpu_features, release_of, version_of
from kvbm.identity.options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOAD_FORMATS = frozenset(  # that read the files in the directory of the model
    {"auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors", "instanttensor", "sharded_state"}
    | {"gguf", "bitsandbytes", "runai_streamer", "runai_streamer_sharded"}
)
DISTRIBUTIONS = ("torch", "transformers")
# Registries of classes and functions from outside vLLM that can compute KV, and groups of plugins.
REGISTRIES = (
    ("vllm.v1.attention.backends.registry", "_ATTN_OVERRIDES"),
    ("vllm.v1.attention.backends.registry", "_MAMBA_ATTN_OVERRIDES"),
    ("vllm.model_executor.custom_op", "op_registry"),
    ("vllm.model_executor.custom_op", "op_registry_oot"),
    ("vllm.model_executor.layers.quantization", "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"),
    ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"),
)
PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")  # the other groups run in front of the engine


def identity(vllm_config: VllmConfig) -> tuple[dict[str, object], str]:
    """Return values for `describe`, and why blocks must not outlive the engine, empty if they may."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    root, is_root_stable = _hash_root(cache.prefix_caching_hash_algo)
    facts: dict[str, object] = {
        "engine": "vllm",
        "version": release_of(str(getattr(vllm, "__version__", ""))),
        "versions": [release_of(version_of(name)) for name in DISTRIBUTIONS],
        "model": str(model.model),
        "plugins": _plugins(),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "parallel": _sizes(vllm_config.parallel_config),
        "instruction_set": _instruction_set(),
        "hash": cache.prefix_caching_hash_algo,
        "serialization": _serialization(cache.prefix_caching_hash_algo),
        "root": root,
    }
    found, doubt = _model(vllm_config)
    facts |= found
    if not is_root_stable:
        doubt = "block hashes change with every start; set PYTHONHASHSEED"
    elif bool(getattr(cache, "calculate_kv_scales", False)):
        doubt = "vLLM computes the scales of the KV cache from the first requests of each start"
    elif vllm_config.lora_config is not None:
        doubt = "a block's hash covers the name of an adapter, not its content"
    elif takes_encodings(vllm_config):
        doubt = "another engine encodes images and audio, and its weights are unknown"
    elif not reports_weight_updates():
        doubt = "this version of vLLM does not report changes of the weights in memory"
    return facts, doubt


def _sizes(parallel: Any) -> dict[str, int]:
    """Return in how many parts layers, heads and contexts are split."""
    names = ("tensor", "pipeline", "prefill_context", "decode_context")
    return {name: int(getattr(parallel, f"{name}_parallel_size", 1)) for name in names}


def takes_encodings(vllm_config: VllmConfig) -> bool:
    """Return whether other engines encode media for this one."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    return transfer is not None and getattr(transfer, "ec_role", None) != "ec_producer"


def encodes_by_content(vllm_config: VllmConfig) -> bool:
    """Return whether this engine encodes all media itself, and each independently of those before."""
    options = getattr(vllm_config.model_config, "multimodal_config", None)
    is_fp8 = getattr(options, "mm_encoder_attn_dtype", None) == "fp8"
    has_fixed_scales = not is_fp8 or bool(getattr(options, "mm_encoder_fp8_scale_path", None))
    return has_fixed_scales and not takes_encodings(vllm_config)


def _serialization(algorithm: str) -> str:
    """Return how the tokens of a block become the bytes that are hashed. Pickles differ between versions of Python."""
    major, minor = sys.version_info[:2]
    return "cbor" if algorithm.endswith("_cbor") else f"pickle of Python {major}.{minor}"


def _plugins() -> list[str]:
    """Return the installed plugins of vLLM, which can replace any part of it, and their versions."""
    return sorted(
        f"{point.group} {point.value} {_version(point.value, distribution.version)}"
        for distribution in metadata.distributions()
        for point in distribution.entry_points
        if point.group.startswith("vllm.") and not point.value.startswith("kvbm.")
    )


def _version(module: str, version: str) -> str:
    """Return what of the version of a plugin counts: of vLLM's own ones as much as of vLLM, of others all of it."""
    return release_of(version) if module.startswith("vllm.") else version


def _model(vllm_config: VllmConfig) -> tuple[dict[str, object], str]:
    """Return the content of the files of the model and of a draft model and how they are loaded, their configurations,
    all options, and why these may not be what was loaded."""
    try:
        return _identified(vllm_config), ""
    except (Unidentified, OSError) as error:
        return {}, f"the model cannot be identified: {error}"


def _identified(vllm_config: VllmConfig) -> dict[str, object]:
    models = models_of(vllm_config)
    options = Options(directory_of(*models[0]), OMITTED)
    code = code_of(_roots_of(vllm_config), "vllm")
    return {
        **({"code": code} if code else {}),
        "weights": [
            text
            for model, load in models
            for text in (_content(model, load), options.digest(load), _encoder_scales(model))
        ],
        "configuration": [options.digest(model.hf_config) for model, _ in models],
        "length": [length(model) for model, _ in models],
        "options": sections(vllm_config, options),
        "environment": environment(options),
    }


def _roots_of(vllm_config: Any) -> Iterator[object]:
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


def _encoder_scales(model: Any) -> FileContent | str:
    """Return the content of the file of scales that an encoder of media uses. Raises Unidentified or OSError."""
    path = getattr(getattr(model, "multimodal_config", None), "mm_encoder_fp8_scale_path", None)
    return loaded(Path(path)) if path else ""


def _content(model: Any, load: Any) -> FileContent:
    """Return the content of a model's files. Raises Unidentified or OSError."""
    require_format(str(getattr(load.load_format, "value", load.load_format)), LOAD_FORMATS)
    if getattr(model, "model_weights", ""):
        raise Unidentified(f"`{model.model_weights}` is not a local directory")
    repositories = (getattr(model.hf_config, "auto_map", None) or {}).values()
    if any("--" in str(name) for name in repositories) and getattr(model, "trust_remote_code", False):
        raise Unidentified("the code of the model is in another repository")
    code_revision = getattr(model, "code_revision", None)
    if code_revision and code_revision != model.revision and getattr(model, "trust_remote_code", False):
        raise Unidentified(f"the code of the model has a revision of its own, `{code_revision}`")
    if getattr(model, "model_class_overrides", None):
        raise Unidentified("`model_class_overrides` replaces the code of the model")
    return with_weights(content_of(directory_of(model, load), every=runs_its_code(model)))


def _instruction_set() -> str:
    """Return the instruction set of the computing device: different kernels compute different bytes."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {cpu_features()}"


def _hash_root(algorithm: str) -> tuple[str, bool]:
    """Return the root of the hashes, and whether it is the same at each start. vLLM computes it after this."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name(algorithm)
    seed = os.environ.get("PYTHONHASHSEED", "random")
    if seed != "random":
        return bytes(function(seed)).hex(), True
    seed_of = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if seed_of is None:
        return "", False
    return bytes(function(seed_of(function))).hex(), bool(seed_of(function) == seed_of(function))
