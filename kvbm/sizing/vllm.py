"""Block sizes of vLLM, and the number of blocks that its arguments set.

The part of a block for one layer is a page. Its bytes on each rank:

    heads        max(1, KV heads // TP) x block tokens x (key dim + value dim) x bytes per element
    latent       block tokens x (latent rank + rope dim) x bytes per element, whatever TP is

Layers with the same window form a group and share block ids. A model with different windows is split into groups of
equal size, which take blocks from one pool:

    6 sliding + 1 full   ->   7 groups of one layer; the same tokens take 7 blocks, each of one page

A block has as many pages as the largest group has layers on that pipeline stage. Formulas and defaults follow
vLLM 0.32 (`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`). Models with state or other kinds of cache raise
SizeUnknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from kvbm.config.engine import VllmArguments
from kvbm.config.values import count_of
from kvbm.sizing.model import SizeUnknown, count, text_facts
from kvbm.sizing.tiers import Device

CPU_BLOCK_TOKENS = 128
GPU_BLOCK_TOKENS = 16
CPU_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

_ELEMENT_BYTES = {"float": 4, "float32": 4}
_CACHE_ELEMENT_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}
_BATCHED_TOKENS = 2048
_FLAGS_THAT_ADD_CACHE = ("speculative_config", "decode_context_parallel_size", "prefill_context_parallel_size")
_FACTS_THAT_ADD_CACHE = (
    "num_kv_shared_layers",
    "global_head_dim",
    "index_topk",
    "full_attention_interval",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_indices",
    "ssm_cfg",
    "state_size",
)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Indexes of layers that share block ids. `window_tokens` is None for full attention."""

    layers: tuple[int, ...]
    window_tokens: int | None = None


def device(
    arguments: VllmArguments, model_config: Mapping[str, object], *, variables: Mapping[str, str], on_cpu: bool
) -> Device:
    """ProfileError if the configuration lacks a fact, SizeUnknown if only vLLM knows the layout of its cache."""
    facts = text_facts(model_config)
    groups = cache_groups(arguments, model_config)
    tokens = block_tokens(arguments, on_cpu=on_cpu, is_latent=_is_latent(facts))
    page_bytes = tokens * _token_bytes(arguments, facts)
    stages = _stages(count(facts, "num_hidden_layers"), arguments.pipeline_parallel_size or 1)
    block_bytes = tuple(page_bytes * _layers_per_block(groups, stage) for stage in stages)
    block_count, set_by = _block_count(arguments, max(block_bytes), variables, on_cpu=on_cpu)
    return Device(
        block_tokens=tokens,
        rank_block_bytes=tuple(size for size in block_bytes for _ in range(arguments.tensor_parallel_size or 1)),
        block_count=block_count,
        set_by=set_by,
        group_count=len(groups),
        token_count=_token_count(groups, tokens, block_count, arguments, facts),
    )


def block_tokens(arguments: VllmArguments, *, on_cpu: bool, is_latent: bool = False) -> int:
    """Tokens in a block: from the arguments, else vLLM's default, which some GPU attention kernels raise."""
    default = CPU_BLOCK_TOKENS if on_cpu and not is_latent else GPU_BLOCK_TOKENS
    return arguments.block_size or default


def cache_groups(arguments: VllmArguments, model_config: Mapping[str, object]) -> tuple[LayerGroup, ...]:
    """Returns the groups of the whole model, each with the layers of all pipeline stages."""
    facts = text_facts(model_config)
    _refuse_unknown(arguments, facts)
    layers_by_window: dict[int | None, list[int]] = defaultdict(list)
    for layer, window in enumerate(_windows(facts)):
        layers_by_window[window].append(layer)
    if None in layers_by_window and arguments.disable_hybrid_kv_cache_manager:
        layers_by_window = {None: sorted(layer for layers in layers_by_window.values() for layer in layers)}
    counts = [len(layers) for layers in layers_by_window.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for window, layers in layers_by_window.items():
        group_count = -(-len(layers) // size)
        groups += [LayerGroup(tuple(layers[first::group_count]), window) for first in range(group_count)]
    return tuple(groups)


def _refuse_unknown(arguments: VllmArguments, facts: Mapping[str, object]) -> None:
    for flag in _FLAGS_THAT_ADD_CACHE:
        if (arguments.model_extra or {}).get(flag) not in (None, 1):
            raise SizeUnknown(f"with `{flag}`, only vLLM knows the size of a block")
    for fact in _FACTS_THAT_ADD_CACHE:
        if facts.get(fact):
            raise SizeUnknown(f"for a model with `{fact}`, only vLLM knows the size of a block")


def _windows(facts: Mapping[str, object]) -> list[int | None]:
    """Returns the attention window of each layer in tokens, None for full attention."""
    layer_count, window = count(facts, "num_hidden_layers"), facts.get("sliding_window")
    kinds, pattern = facts.get("layer_types"), facts.get("sliding_window_pattern")
    if isinstance(kinds, list):
        unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) < layer_count:
            raise SizeUnknown(
                f"for a model with layers of type {', '.join(sorted(unknown))}, only vLLM knows the size of a block"
            )
        return [count(facts, "sliding_window") if kind == "sliding_attention" else None for kind in kinds[:layer_count]]
    if not isinstance(window, int) or facts.get("use_sliding_window") is False:
        return [None] * layer_count
    if isinstance(pattern, int):
        return [None if (layer + 1) % pattern == 0 else window for layer in range(layer_count)]
    if facts.get("use_sliding_window") or facts.get("model_type") not in ("mistral", "mixtral", "phi3", "starcoder2"):
        raise SizeUnknown("the model's configuration does not specify which layers use `sliding_window`")
    return [window] * layer_count


def _is_latent(facts: Mapping[str, object]) -> bool:
    return bool(facts.get("kv_lora_rank"))


def _token_bytes(arguments: VllmArguments, facts: Mapping[str, object]) -> int:
    """Bytes of one token in one layer on one rank."""
    element_bytes = _element_bytes(arguments)
    if _is_latent(facts):
        return (count(facts, "kv_lora_rank") + count(facts, "qk_rope_head_dim")) * element_bytes
    heads = count(facts, "num_attention_heads")
    key_dim = count(facts, "head_dim", default=count(facts, "hidden_size", default=heads) // heads)
    kv_heads = count(facts, "num_key_value_heads", default=heads)
    rank_heads = max(1, kv_heads // (arguments.tensor_parallel_size or 1))
    return rank_heads * (key_dim + count(facts, "v_head_dim", default=key_dim)) * element_bytes


def _element_bytes(arguments: VllmArguments) -> int:
    """Bytes of one element: 2 by default, because `auto` keeps 16-bit types and converts float32 to one."""
    kept = arguments.kv_cache_dtype
    if kept is None or kept == "auto":
        return _ELEMENT_BYTES.get(arguments.dtype or "auto", 2)
    if kept not in _CACHE_ELEMENT_BYTES:
        raise SizeUnknown(f"with `kv_cache_dtype: {kept}`, only vLLM knows the size of a block")
    return _CACHE_ELEMENT_BYTES[kept]


def _stages(layer_count: int, stage_count: int) -> list[range]:
    """Returns the layers of each pipeline stage. Surplus layers go to the stages before the last, from the back."""
    counts = [layer_count // stage_count] * stage_count
    for back in range(2, layer_count % stage_count + 2):
        counts[-back] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stage_count)]
    return [range(end - size, end) for end, size in zip(ends, counts, strict=True)]


def _layers_per_block(groups: tuple[LayerGroup, ...], stage: range) -> int:
    return max(sum(layer in stage for layer in group.layers) for group in groups)


def _block_count(
    arguments: VllmArguments, block_bytes: int, variables: Mapping[str, str], *, on_cpu: bool
) -> tuple[int | None, str | None]:
    """Returns the blocks of G1, null block included, and what sets them; None if they depend on free memory."""
    prefix = "engine.arguments."
    if arguments.num_gpu_blocks_override is not None:
        return arguments.num_gpu_blocks_override, f"{prefix}num_gpu_blocks_override"
    space = variables.get(CPU_SPACE_VARIABLE, "")
    if on_cpu and space.isascii() and space.isdigit() and int(space):
        return int(space) * 2**30 // block_bytes, CPU_SPACE_VARIABLE
    memory_bytes = count_of(arguments.kv_cache_memory_bytes)
    if memory_bytes is not None:
        return memory_bytes // block_bytes, f"{prefix}kv_cache_memory_bytes"
    return None, None


def _token_count(
    groups: tuple[LayerGroup, ...],
    tokens: int,
    block_count: int | None,
    arguments: VllmArguments,
    facts: Mapping[str, object],
) -> int | None:
    """Tokens that G1 holds in requests of maximum length, as vLLM logs them. None if it is blocks times tokens."""
    positions = facts.get("max_position_embeddings")
    longest = count_of(arguments.max_model_len) or (positions if isinstance(positions, int) else None)
    if block_count is None or longest is None or len(groups) == 1:
        return None
    ranks = (arguments.tensor_parallel_size or 1) * (arguments.pipeline_parallel_size or 1)
    in_flight = count_of(arguments.max_num_batched_tokens) or _BATCHED_TOKENS * ranks
    return int(block_count / sum(_blocks_of_longest(group, tokens, longest, in_flight) for group in groups) * longest)


def _blocks_of_longest(group: LayerGroup, tokens: int, longest: int, in_flight: int) -> int:
    """Blocks of a group that one request of maximum length needs while its prompt is computed."""
    if group.window_tokens is None:
        return -(-longest // tokens)
    return -(-min(group.window_tokens - 1 + in_flight, longest) // tokens) + 1
