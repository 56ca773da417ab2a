"""Engine identity: the values that determine the bytes and the hashes of TensorRT-LLM's blocks.

Blocks on disk are loaded only by an engine with the same identity. Its `weights` are the name, size, time and header of
each file of a local model; without them, no block is kept for the next start.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
HEADER_BYTES = 1 << 20
_ARGUMENTS = ("dtype", "attn_backend", "quant_config", "tensor_parallel_size", "moe_config", "lora_config")


def identity(arguments: Any) -> dict[str, object]:
    """Return values that JSON can represent."""
    cache = getattr(arguments, "kv_cache_config", None)
    return {
        "engine": "tensorrt-llm",
        "version": _version(),
        "model": str(getattr(arguments, "model", "")),
        "weights": _weights(str(getattr(arguments, "model", ""))),
        "arguments": [[name, repr(getattr(arguments, name, None))] for name in _ARGUMENTS],
        "cache_dtype": str(getattr(cache, "dtype", "")),
        "device": _device(),
    }


def _version() -> str:
    import tensorrt_llm

    return str(getattr(tensorrt_llm, "__version__", ""))


def _weights(model: str) -> list[list[object]] | None:
    directory = Path(model)
    if not model or not directory.is_dir():
        return None
    return [_weight_file(path) for path in sorted(directory.iterdir()) if path.suffix in WEIGHT_SUFFIXES] or None


def _weight_file(path: Path) -> list[object]:
    facts = path.stat()
    with path.open("rb") as file:
        header = hashlib.blake2b(file.read(HEADER_BYTES), digest_size=16).hexdigest()
    return [path.name, facts.st_size, facts.st_mtime_ns, header]


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
