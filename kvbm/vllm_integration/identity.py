"""Engine identity: the values that determine the bytes and the hashes of vLLM's blocks.

Blocks on disk are loaded only by an engine with the same identity. It contains vLLM's own digests of its configuration;
more of them than necessary only costs hits. It also contains the weights (name, size, time and header of each file) and
the root of the hashes. Some versions and algorithms choose a random root at each start: then no block on disk could be
found again, and none is kept.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
HEADER_BYTES = 1 << 20


def identity(vllm_config: VllmConfig) -> tuple[dict[str, object], bool]:
    """Return (values that JSON can represent, whether they are the same at the next start)."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    weights = _weights(vllm_config)
    root, is_root_stable = _hash_root(cache.prefix_caching_hash_algo)
    computed_scales = bool(getattr(cache, "calculate_kv_scales", False))  # from the first requests of each start
    has_adapters = vllm_config.lora_config is not None  # a block's hash covers an adapter's name, not its content
    facts: dict[str, object] = {
        "engine": "vllm",
        "version": str(getattr(vllm, "__version__", "")),
        "model": str(model.model),
        "weights": weights,
        "digests": [_digest(part) for part in (model, cache, vllm_config.parallel_config)],
        "speculative": _digest(vllm_config.speculative_config),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "instruction_set": _instruction_set(),
        "hash": cache.prefix_caching_hash_algo,
        "root": root,
    }
    is_stable = weights is not None and is_root_stable and not computed_scales and not has_adapters
    return facts, is_stable


def _digest(config: Any) -> str:
    return "" if config is None else str(config.compute_hash())


def _weights(vllm_config: VllmConfig) -> list[list[object]] | str | None:
    """Return the files of a local model, or the commit of a model from a hub; None if the weights are unknown."""
    model = vllm_config.model_config
    directory = Path(str(model.model))
    if vllm_config.load_config.load_format == "dummy":
        return None
    if directory.is_dir():
        return [_weight_file(path) for path in sorted(directory.iterdir()) if path.suffix in WEIGHT_SUFFIXES] or None
    commit = getattr(model.hf_config, "_commit_hash", None)
    return str(commit) if commit else None


def _weight_file(path: Path) -> list[object]:
    facts = path.stat()
    with path.open("rb") as file:
        header = hashlib.blake2b(file.read(HEADER_BYTES), digest_size=16).hexdigest()
    return [path.name, facts.st_size, facts.st_mtime_ns, header]


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
