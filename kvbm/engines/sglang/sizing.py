"""Block sizes of SGLang: a block is a page of tokens, with all layers of one rank.

    bytes of a token on one rank = sum over the layers of KV heads of the rank x (key + value dim) x bytes per element

The pools store tokens one after another, one pool per layer, so pages need no padding. Only models whose layers keep
every token have a known size: for windows and states, SGLang has pools of their own, which it divides by ratios.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.config.engine import SglangArguments
from kvbm.config.values import count_of
from kvbm.sizing.checkpoint import is_quantized
from kvbm.sizing.families.facts import SizeUnknown, positions
from kvbm.sizing.families.layer_specs import LayerKind, Ranks
from kvbm.sizing.families.table import layer_specs
from kvbm.sizing.tiers import Device

_CACHE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "bf16": 2}
_ELEMENT_BYTES = {"float": 4, "float32": 4}
_KNOWN_KINDS = {LayerKind.FULL, LayerKind.LATENT}


def device(
    arguments: SglangArguments, model_config: Mapping[str, object], *, sequence_tokens: int | None = None
) -> Device:
    """Return the blocks of G1, whose number SGLang determines without `max_total_tokens`. SizeUnknown if only SGLang
    knows their size."""
    ranks, page = arguments.tp_size or 1, arguments.page_size
    if (arguments.pp_size or 1) > 1:
        raise SizeUnknown("with pipeline stages, only SGLang knows the size of a block")
    specs = layer_specs(model_config, Ranks(ranks, cache_bytes=_cache_bytes(arguments, model_config)))
    if not {spec.kind for spec in specs} <= _KNOWN_KINDS:
        raise SizeUnknown(
            "this model has layers that do not keep every token, so only SGLang knows the size of its blocks"
        )
    token_bytes = sum(spec.token_bytes for spec in specs)
    length = sequence_tokens or count_of(arguments.context_length) or positions(model_config) or 0
    tokens = count_of(arguments.max_total_tokens)
    return Device(
        block_tokens=page,
        rank_block_bytes=(token_bytes * page,) * ranks,
        block_count=None if tokens is None else tokens // page,
        set_by=None if tokens is None else "engine.arguments.max_total_tokens",
        token_bytes=token_bytes * ranks,
        sequence_tokens=length,
        sequence_blocks=-(-length // page),
    )


def _cache_bytes(arguments: SglangArguments, model_config: Mapping[str, object]) -> int:
    """Bytes of one element. `auto` uses the type of the model, unless the checkpoint is quantized."""
    named = arguments.kv_cache_dtype
    if named not in (None, "auto"):
        if named not in _CACHE_BYTES:
            raise SizeUnknown(f"with `kv_cache_dtype: {named}`, only SGLang knows the size of a block")
        return _CACHE_BYTES[named]
    if is_quantized(model_config):
        raise SizeUnknown(
            "the checkpoint is quantized, so only SGLang knows the type of its cache",
            hint="add `--kv-cache-dtype`, for example `fp8_e4m3`",
        )
    return _ELEMENT_BYTES.get(arguments.dtype or "auto", 2)
