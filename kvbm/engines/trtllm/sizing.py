"""Block sizes of TensorRT-LLM's PyTorch backend: a block has all layers of one rank.

    bytes per block on one rank = sum over the layers of the bytes of one token x tokens per block

Only models whose layers keep every token have a known size; with others, kvbm disables itself or TensorRT-LLM decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbm.config.engine import TrtllmArguments
from kvbm.engines.trtllm.options import DEFAULT_BLOCK_TOKENS
from kvbm.sizing.checkpoint import is_quantized
from kvbm.sizing.families.facts import ModelFacts, SizeUnknown, positions
from kvbm.sizing.families.layer_specs import LayerKind, LayerSpec, Ranks
from kvbm.sizing.families.table import layer_specs
from kvbm.sizing.tiers import Device

_CACHE_BYTES = {"fp8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
_KNOWN_KINDS = (LayerKind.FULL, LayerKind.LATENT)


def device(
    arguments: TrtllmArguments, model_config: Mapping[str, object], *, sequence_tokens: int | None = None
) -> Device:
    """Return the blocks of G1. ProfileError if the configuration lacks a fact, SizeUnknown if only TensorRT-LLM knows
    the layout of its cache."""
    tokens = int(arguments.cache.get("tokens_per_block") or DEFAULT_BLOCK_TOKENS)
    ranks = arguments.tensor_parallel_size or 1
    token_bytes = sum(spec.token_bytes for spec in specs(arguments, model_config))
    longest = arguments.max_seq_len or positions(model_config) or 0
    length = sequence_tokens or longest
    max_tokens = arguments.cache.get("max_tokens")
    return Device(
        block_tokens=tokens,
        rank_block_bytes=(token_bytes * tokens,) * ranks,
        block_count=None if max_tokens is None else max_tokens // tokens,
        set_by=None if max_tokens is None else "engine.arguments.kv_cache_config",
        token_bytes=token_bytes * ranks,
        sequence_tokens=length,
        sequence_blocks=-(-length // tokens),
    )


def specs(arguments: TrtllmArguments, model_config: Mapping[str, object]) -> Sequence[LayerSpec]:
    """Return what every layer keeps on one rank. Raises like `device`."""
    found = layer_specs(
        model_config,
        Ranks(tensor_parallel=arguments.tensor_parallel_size or 1, cache_bytes=_cache_bytes(arguments, model_config)),
    )
    if any(spec.kind not in _KNOWN_KINDS for spec in found):
        raise SizeUnknown(
            "this model has layers that do not keep every token, so only TensorRT-LLM knows the size of its blocks"
        )
    return found


def _cache_bytes(arguments: TrtllmArguments, model_config: Mapping[str, object]) -> int:
    """Bytes of one element. `auto` follows a quantized checkpoint, or else the type of the model."""
    named = arguments.cache.get("dtype", "auto")
    if named != "auto":
        if named not in _CACHE_BYTES:
            raise SizeUnknown(f"with `kv_cache_config.dtype: {named}`, only TensorRT-LLM knows the size of a block")
        return _CACHE_BYTES[named]
    if is_quantized(model_config):
        raise SizeUnknown(
            "the checkpoint is quantized, so only TensorRT-LLM knows the data type of its KV cache",
            hint="set `engine.arguments.kv_cache_config.dtype`, for example to `fp8`",
        )
    facts = ModelFacts.of(model_config)
    if arguments.dtype in (None, "auto") and "float32" in (facts.get("dtype"), facts.get("torch_dtype")):
        raise SizeUnknown(
            "the model is in 32 bits, so only TensorRT-LLM knows the data type of its KV cache",
            hint="set `engine.arguments.kv_cache_config.dtype`, for example to `bfloat16`",
        )
    return _CACHE_BYTES.get(arguments.dtype or "auto", 2)
