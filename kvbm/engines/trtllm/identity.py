"""Engine identity: the values that determine the bytes and the hashes of TensorRT-LLM's blocks.

Other engines, on this machine or on others, load blocks of an engine with the same identity. It contains the content of
the model's files, all arguments of the engine except those in identity.yaml (more of them than necessary only costs
hits), and versions. It contains no path. Whatever is in doubt is not kept for the next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbm.engines.engine_code import device_name
from kvbm.identity.code import code_of, registered
from kvbm.identity.description import Hashed
from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import loaded, require_format, with_weights
from kvbm.identity.machine import precision_variables, release_of, version_of
from kvbm.identity.options import Options, configuration_of, depends_on_length
from kvbm.identity.snapshot import snapshot_of

DISTRIBUTIONS = ("tensorrt_llm", "torch", "transformers")
LOAD_FORMATS = frozenset({"auto", "AUTO", "LoadFormat.AUTO", "0"})  # that read the files in the directory of the model

_MODELS = ("MODEL_CLASS_MAPPING", "MODEL_CLASS_VISION_ENCODER_MAPPING")  # registries of model classes
_NAMES = yaml.safe_load(Path(__file__).with_name("identity.yaml").read_text())
_NOT_KV, _NOT_KV_OF_CACHE = (frozenset(_NAMES[section].split()) for section in ("arguments", "kv_cache_config"))


def identity(arguments: Any) -> tuple[dict[str, object], str]:
    """Return values for `describe`, and why blocks must not outlive the engine, empty if they may."""
    facts: dict[str, object] = {
        "engine": "tensorrt-llm",
        "versions": [release_of(version_of(name)) for name in DISTRIBUTIONS],
        "model": str(getattr(arguments, "model", "")),
        "device": device_name(),
        "precision": precision_variables(),
    }
    try:
        directory = snapshot_of(str(getattr(arguments, "model", "")), getattr(arguments, "revision", None))
        require_format(str(getattr(arguments, "load_format", "auto")), LOAD_FORMATS)
        facts["weights"] = with_weights(loaded(directory, every=bool(getattr(arguments, "trust_remote_code", False))))
        models = (one for name in _MODELS for one in registered("tensorrt_llm._torch.models.modeling_utils", name))
        if code := code_of(models, "tensorrt_llm"):
            facts["code"] = code
        facts["arguments"] = _digest(arguments, directory)
        facts["length"] = _length(arguments, directory)
    except (Unidentified, OSError) as error:
        return facts, f"the engine cannot be identified: {error}"
    if getattr(arguments, "lora_config", None) is not None:
        return facts, "a block's hash covers the number of an adapter, not its content"
    return facts, ""


def _digest(arguments: Any, directory: Path) -> str | Hashed:
    """Return a digest of all arguments that may change KV. Raises Unidentified or OSError."""
    dump = getattr(arguments, "model_dump", None)
    if dump is None:
        raise Unidentified(f"`{type(arguments).__name__}` cannot be written down")
    values = {name: value for name, value in dump().items() if name not in _NOT_KV}
    cache = values.get("kv_cache_config")
    if isinstance(cache, Mapping):
        values["kv_cache_config"] = {name: one for name, one in cache.items() if name not in _NOT_KV_OF_CACHE}
    return Options(directory).digest(values)


def _length(arguments: Any, directory: Path) -> int:
    """Return the maximum length of a sequence if the KV of shorter ones depends on it, otherwise 0.

    Raises Unidentified or OSError.
    """
    by_length = depends_on_length(configuration_of(directory))
    return int(getattr(arguments, "max_seq_len", None) or 0) if by_length else 0
