"""Engine identity: the values that determine the bytes and the hashes of TensorRT-LLM's blocks.

Blocks on disk are loaded only by an engine with the same identity. It contains the content of the model's files, all
arguments of the engine except those that cannot change KV (more of them than necessary only costs hits), and versions.
Whatever is in doubt is not kept for the next start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from kvbm.identity.fingerprint import fingerprint, process_start_ns
from kvbm.identity.versions import version_of

DISTRIBUTIONS = ("tensorrt_llm", "torch", "transformers")
LOAD_FORMATS = frozenset({"auto", "AUTO", "LoadFormat.AUTO", "0"})  # that read the files in the directory of the model

# Arguments that say where the model is, how much fits, or how requests are scheduled.
_NOT_KV = frozenset(
    {"model", "tokenizer", "postprocess_tokenizer_dir", "max_batch_size", "max_num_tokens", "max_seq_len"}
    | {"max_input_len", "scheduler_config", "kv_connector_config", "num_postprocess_workers", "env_overrides"}
    | {"iter_stats_max_iterations", "request_stats_max_iterations", "perf_metrics_max_requests", "reasoning_parser"}
)
_NOT_KV_OF_CACHE = frozenset(
    {"free_gpu_memory_fraction", "max_tokens", "max_gpu_total_bytes", "event_buffer_max_size", "host_cache_size"}
)


class UnidentifiedModel(Exception):
    """Why the weights or the arguments of an engine cannot be identified."""


def identity(arguments: Any) -> tuple[dict[str, object], str]:
    """Return values that JSON can represent, and why blocks must not outlive the engine, empty if they may."""
    facts: dict[str, object] = {
        "engine": "tensorrt-llm",
        "versions": [version_of(name) for name in DISTRIBUTIONS],
        "model": str(getattr(arguments, "model", "")),
        "device": _device(),
    }
    try:
        facts |= {"weights": _content(arguments), "arguments": _digest(arguments)}
    except (UnidentifiedModel, OSError) as error:
        return facts, f"the engine cannot be identified: {error}"
    if getattr(arguments, "lora_config", None) is not None:
        return facts, "a block's hash covers the number of an adapter, not its content"
    if str(getattr(arguments, "orchestrator_type", None) or "") == "ray":
        return facts, "with `orchestrator_type: ray`, the weights in memory can change"
    return facts, ""


def _content(arguments: Any) -> str:
    """Return the content of the model's files. Raises UnidentifiedModel or OSError."""
    load_format = str(getattr(arguments, "load_format", "auto"))
    if load_format not in LOAD_FORMATS:
        raise UnidentifiedModel(f"load format `{load_format}` does not read files that kvbm knows")
    directory = _directory(str(getattr(arguments, "model", "")), getattr(arguments, "revision", None))
    found = fingerprint(directory)
    if not found.weights:
        raise UnidentifiedModel(f"{directory} has no weight files of a known format")
    if (changed := found.changed_since(process_start_ns())) is not None:
        raise UnidentifiedModel(f"`{changed}` in {directory} changed after the engine was started")
    return found.content


def _directory(model: str, revision: str | None) -> Path:
    """Return the local directory of a model: its own, or its snapshot in the cache of the hub."""
    if model and os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise UnidentifiedModel(f"`{model}` has no local files") from error


def _digest(arguments: Any) -> str:
    """Return a digest of all arguments that may change KV. Raises UnidentifiedModel if one has no text form."""
    dump = getattr(arguments, "model_dump", None)
    if dump is None:
        raise UnidentifiedModel(f"`{type(arguments).__name__}` cannot be written down")
    values = {name: value for name, value in dump().items() if name not in _NOT_KV}
    cache = values.get("kv_cache_config")
    if isinstance(cache, Mapping):
        values["kv_cache_config"] = {name: one for name, one in cache.items() if name not in _NOT_KV_OF_CACHE}
    try:
        text = json.dumps(values, sort_keys=True, default=_text)
    except (TypeError, ValueError) as error:
        raise UnidentifiedModel(f"its arguments have no text form: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(value: object) -> object:
    """Return a text that is the same at every start. The default form of an object contains its address."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    text = repr(value)
    if " at 0x" in text:
        raise UnidentifiedModel(f"an argument of type `{type(value).__name__}` has no text form")
    return text


def _device() -> str:
    """Return the name of the computing device: different kernels compute different bytes."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
