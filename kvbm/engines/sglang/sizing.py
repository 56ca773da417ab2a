"""Block sizes of SGLang: a block is a page of tokens, with all layers of one rank.

    bytes of a token on one rank = sum over the layers of KV heads of the rank x (key + value dim) x bytes per element

The pools store tokens one after another, one pool per layer, so pages need no padding. A page has one token unless
`--page-size` says otherwise. Only models whose layers keep every token have a known size: for windows and states,
SGLang has pools of their own, which it divides by ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvbm.config.engine import SglangArguments, VllmArguments
from kvbm.config.values import count_of
from kvbm.sizing.checkpoint import is_quantized
from kvbm.sizing.families import layer_specs
from kvbm.sizing.families.facts import SizeUnknown, positions
from kvbm.sizing.families.layer_specs import LayerKind, Ranks
from kvbm.sizing.tiers import Device

PAGE_TOKENS = 1
_CACHE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "bf16": 2}
_ELEMENT_BYTES = {"float": 4, "float32": 4}
_KNOWN_KINDS = {LayerKind.FULL, LayerKind.LATENT}
_KNOWN_ARGUMENTS = {
    *("tensor_parallel_size", "pipeline_parallel_size", "kv_cache_dtype", "block_size", "max_model_len", "dtype"),
    "data_parallel_size",
}


def device(
    arguments: VllmArguments, model_config: Mapping[str, object], *, sequence_tokens: int | None = None
) -> Device:
    """Return the blocks of G1, whose number SGLang determines. SizeUnknown if only SGLang knows their size.

    The arguments have the names and meanings of vLLM. SGLang has other names for them.
    """
    if unknown := arguments.model_fields_set - _KNOWN_ARGUMENTS:
        raise SizeUnknown(f"the argument `{min(unknown)}` of vLLM has no known meaning for SGLang")
    tensor, stages = arguments.tensor_parallel_size or 1, arguments.pipeline_parallel_size or 1
    if stages > 1:
        raise SizeUnknown("with pipeline stages, only SGLang knows the size of a block")
    specs = layer_specs(model_config, Ranks(tensor, cache_bytes=_cache_bytes(arguments, model_config)))
    if not {spec.kind for spec in specs} <= _KNOWN_KINDS:
        raise SizeUnknown(
            "this model has layers that do not keep every token, so only SGLang knows the size of its blocks"
        )
    is_latent = any(spec.kind is LayerKind.LATENT for spec in specs)
    token_bytes = sum(spec.token_bytes for spec in specs)
    page = arguments.block_size or PAGE_TOKENS
    length = sequence_tokens or count_of(arguments.max_model_len) or positions(model_config) or 0
    note = f"the attention backend may choose another page than {page} token{'s' * (page != 1)}; set `--block-size`"
    return Device(
        block_tokens=page,
        rank_block_bytes=(token_bytes * page,) * tensor,
        block_count=None,
        set_by=None,
        token_bytes=token_bytes * tensor,
        sequence_tokens=length,
        sequence_blocks=-(-length // page),
        notes=(note,) if is_latent and arguments.block_size is None else (),
    )


def device_of(
    arguments: SglangArguments, model_config: Mapping[str, object], *, sequence_tokens: int | None = None
) -> Device:
    """Return the blocks of G1 of a profile. SizeUnknown if only SGLang knows their size."""
    in_names_of_vllm = VllmArguments(
        tensor_parallel_size=arguments.tp_size,
        pipeline_parallel_size=arguments.pp_size,
        kv_cache_dtype=arguments.kv_cache_dtype,
        block_size=arguments.page_size,
        max_model_len=arguments.context_length,
        dtype=arguments.dtype,
    )
    found = device(in_names_of_vllm, model_config, sequence_tokens=sequence_tokens)
    tokens = count_of(arguments.max_total_tokens)
    if tokens is None:
        return found
    blocks = tokens // arguments.page_size
    return replace(found, block_count=blocks, set_by="engine.arguments.max_total_tokens")


def _cache_bytes(arguments: VllmArguments, model_config: Mapping[str, object]) -> int:
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
