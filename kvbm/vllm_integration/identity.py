"""Engine identity: the values that determine the bytes and the hashes of vLLM's blocks.

Blocks on disk are loaded only by an engine with the same identity. It contains vLLM's own digests of its configuration
(more of them than necessary only costs hits), the Hugging Face configuration after all overrides, the content of the
model's files and of a draft model's, versions, and the root of the hashes.

The connector is created after vLLM has loaded the weights, so the files are read after loading. They describe the
loaded weights only if nothing has changed them, a link or a directory since this process started: it starts before
loading does. Whatever is in doubt is not kept for the next start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.identity.content import digest_file
from kvbm.identity.fingerprint import fingerprint, process_start_ns
from kvbm.identity.versions import version_of
from kvbm.vllm_integration.weight_updates import reports_weight_updates

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOAD_FORMATS = frozenset(  # that read the files in the directory of the model
    {"auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors", "instanttensor", "sharded_state"}
    | {"gguf", "bitsandbytes", "runai_streamer", "runai_streamer_sharded"}
)
DISTRIBUTIONS = ("torch", "transformers")
# Parts of names of variables that differ between starts of one set-up, and that change no KV.
OTHER_VARIABLES = re.compile(
    "ADDR|API|BUILD|CACHE_DIR|DEBUG|DEV_MODE|HOST|_IP$|KVCACHE_SPACE|LOG|OMP_THREADS|PATH|PORT|PROC|RANK|RAY|RESERVED_CPU"
    "|ROOT|RPC|STATS|TIMEOUT|TRACE|TRACK|USAGE"
)


class Unidentified(Exception):
    """Why the weights of a model cannot be identified."""


def identity(vllm_config: VllmConfig) -> tuple[dict[str, object], str]:
    """Return values that JSON can represent, and why blocks must not outlive the engine, empty if they may."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    weights, configuration, doubt = _model(vllm_config)
    root, is_root_stable = _hash_root(cache.prefix_caching_hash_algo)
    facts: dict[str, object] = {
        "engine": "vllm",
        "version": str(getattr(vllm, "__version__", "")),
        "versions": [version_of(name) for name in DISTRIBUTIONS],
        "model": str(model.model),
        "weights": weights,
        "configuration": configuration,
        "digests": [_digest(part) for part in (model, cache, vllm_config.parallel_config)],
        "attention": _digest(getattr(vllm_config, "attention_config", None)),
        "speculative": _digest(vllm_config.speculative_config),
        "multimodal": _values(getattr(model, "multimodal_config", None)),
        "kernels": _values(getattr(vllm_config, "kernel_config", None)),
        "platform": _text_digest(getattr(vllm_config, "additional_config", None)),
        "windows": [getattr(cache, name, None) for name in ("swa_bounded_replay", "kv_sharing_fast_prefill")],
        "environment": _environment(),
        "plugins": _plugins(),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "instruction_set": _instruction_set(),
        "hash": cache.prefix_caching_hash_algo,
        "root": root,
    }
    if not is_root_stable:
        doubt = "block hashes change with every start; set PYTHONHASHSEED"
    elif bool(getattr(cache, "calculate_kv_scales", False)):
        doubt = "vLLM computes the scales of the KV cache from the first requests of each start"
    elif vllm_config.lora_config is not None:
        doubt = "a block's hash covers the name of an adapter, not its content"
    elif not reports_weight_updates():
        doubt = "this version of vLLM does not report changes of the weights in memory"
    return facts, doubt


def _digest(config: Any) -> str:
    return "" if config is None else str(config.compute_hash())


def _configuration(hf_config: Any) -> str:
    """Return a digest of the configuration that the model was built from, after `--hf-overrides`."""
    try:
        return _text_digest(hf_config.to_dict(), default=str)
    except (TypeError, ValueError) as error:
        raise Unidentified(f"its configuration has no text form: {error}") from error


def _values(config: Any) -> str:
    """Return a digest of all options of a section, because vLLM's own digest omits most of them or is costly."""
    return "" if config is None else _text_digest(vars(config))


def _environment() -> str:
    """Return a digest of the environment variables that can change how vLLM computes, such as a quantised reduction."""
    names = {name for name in os.environ if name.startswith("VLLM_") and not OTHER_VARIABLES.search(name)}
    return _text_digest({name: os.environ[name] for name in names})


def _plugins() -> list[str]:
    """Return the installed plugins of vLLM, which can replace any part of it, and their versions."""
    return sorted(
        f"{point.group} {point.value} {distribution.version}"
        for distribution in metadata.distributions()
        for point in distribution.entry_points
        if point.group.startswith("vllm.")
    )


def _text_digest(value: object, default: Callable[[object], str] = repr) -> str:
    text = json.dumps(value, sort_keys=True, default=default)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _model(vllm_config: VllmConfig) -> tuple[list[str], list[str], str]:
    """Return the content of the files of the model and of a draft model and how they are loaded, their configurations,
    and why these may not be what was loaded."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    draft_load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    models = [(vllm_config.model_config, vllm_config.load_config)]
    if draft is not None and draft.model != vllm_config.model_config.model:
        models.append((draft, draft_load))
    try:
        contents = [
            text for model, load in models for text in (_content(model, load), _selection(load), _encoder_scales(model))
        ]
        return contents, [_configuration(model.hf_config) for model, _ in models], ""
    except (Unidentified, OSError) as error:
        return [], [], f"the model cannot be identified: {error}"


def _load_format(load: Any) -> str:
    return str(getattr(load.load_format, "value", load.load_format))


def _selection(load: Any) -> str:
    """Return what selects among the files of a directory, which may hold several sets of weights."""
    values = [getattr(load, name, None) for name in ("ignore_patterns", "model_loader_extra_config")]
    return json.dumps([_load_format(load), *values], sort_keys=True, default=repr)


def _encoder_scales(model: Any) -> str:
    """Return a digest of the file of scales that an encoder of media uses. Raises OSError."""
    path = getattr(getattr(model, "multimodal_config", None), "mm_encoder_fp8_scale_path", None)
    return digest_file(Path(path), is_sampled=False)[1] if path else ""


def _content(model: Any, load: Any) -> str:
    """Return the content of a model's files. Raises Unidentified or OSError."""
    load_format = _load_format(load)
    if load_format not in LOAD_FORMATS:
        raise Unidentified(f"load format `{load_format}` does not read files that kvbm knows")
    if getattr(model, "model_weights", ""):
        raise Unidentified(f"`{model.model_weights}` is no local directory")
    repositories = (getattr(model.hf_config, "auto_map", None) or {}).values()
    if any("--" in str(name) for name in repositories) and getattr(model, "trust_remote_code", False):
        raise Unidentified("the code of the model is in another repository")
    code_revision = getattr(model, "code_revision", None)
    if code_revision and code_revision != model.revision and getattr(model, "trust_remote_code", False):
        raise Unidentified(f"the code of the model has a revision of its own, `{code_revision}`")
    if getattr(model, "model_class_overrides", None):
        raise Unidentified("`model_class_overrides` replaces the code of the model")
    directory = _directory(model, load)
    found = fingerprint(directory)
    if not found.weights:
        raise Unidentified(f"{directory} has no weight files of a known format")
    if (changed := found.changed_since(process_start_ns())) is not None:
        raise Unidentified(f"`{changed}` in {directory} changed after vLLM was started")
    return found.content


def _directory(model: Any, load: Any) -> Path:
    """Return the local directory of a model: its own, or its snapshot in the cache of the hub. Raises Unidentified."""
    path = Path(str(model.model))
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise Unidentified("models of ModelScope are not supported")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            str(model.model), revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise Unidentified(f"`{model.model}` has no local files") from error
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and Path(found).name != commit:
        raise Unidentified(f"`{model.model}` has files of commit {Path(found).name}, and a configuration of {commit}")
    return Path(found)


def _instruction_set() -> str:
    """Return the instruction set of the computing device: different kernels compute different bytes."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _hash_root(algorithm: str) -> tuple[str, bool]:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    root = bytes(getattr(kv_cache_utils, "NONE_HASH", b"")).hex()
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return root, True
    seed_of = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if seed_of is None:
        return root, False
    function = get_hash_fn_by_name(algorithm)
    return root, bool(seed_of(function) == seed_of(function))
