"""KV cache groups: translates vLLM's KV cache groups into ours, or returns the reason why kvbm is disabled.

Layers with states (Mamba, gated delta nets) are supported in vLLM's mode `align`, from 0.30 on: it then hands over each
snapshot in the step that completes it, and accepts failed loads by request. vLLM's block tables do not say which blocks
contain snapshots.

A group's spec is recognised by the names of its classes, because vLLM moves and adds classes between versions. A kind
that is not in the table is declined by name; vLLM then serves without kvbm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvbm.core.groups import Group, StateGroup
from kvbm.engines.vllm.models import KINDS_OF_STATES, disabled_by

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


# From 0.30 on, a failed load is reported by request, and vLLM frees its blocks. Before, it is reported by block, and
# vLLM computes into the same blocks.
KNOWS_FAILED_REQUESTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
REPORTS_HIT_SOURCES = hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources")  # from 0.32 on


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """One of vLLM's KV cache groups that takes part in transfers; `index` is its position in block tables. `state_form`
    describes the bytes of a snapshot, and is empty for other groups. KV events contain `kind` and `sliding_window`."""

    index: int
    group: Group
    layer_names: tuple[str, ...]
    state_form: str = ""
    kind: str | None = field(default=None, compare=False)
    sliding_window: int | None = field(default=None, compare=False)


def decline_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why kvbm does not support this engine, as text for its log; None if it does."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"context parallelism ({name}={getattr(parallel, name)}) splits the tokens of a block over ranks"
    if getattr(parallel, "nnodes", 1) > 1:
        return f"ranks on {parallel.nnodes} nodes share no memory"
    if getattr(vllm_config.model_config, "disable_cascade_attn", True) is False and not REPORTS_HIT_SOURCES:
        return "cascade attention mistakes a block under a copy for one that all requests share (fixed in vLLM 0.32)"
    if any(getattr(group, "host_resident", False) for group in kv_cache_config.kv_cache_groups):
        return "a KV cache group has a separate block pool in host memory"
    transferred = _transferred(kv_cache_config)
    if not transferred:
        return "the model has no KV cache"
    specs = [_spec_of(group) for group in transferred.values()]
    unknown = [spec for spec in specs if _kind(spec) is None]
    if unknown:
        return f"KV cache groups of kind {type(unknown[0]).__name__} are not supported"
    if any(map(_is_state, specs)) and (reason := _reason_of_states(vllm_config, specs)) is not None:
        return reason
    if len(transferred) > 1 and not KNOWS_FAILED_REQUESTS:
        return "vLLM before 0.30 does not accept failed loads with several KV cache groups"
    return None


def cache_groups(kv_cache_config: KVCacheConfig) -> tuple[TransferGroup, ...]:
    """Return the groups that take part in transfers, full-attention groups first. Call `decline_reason` before."""
    found = [
        TransferGroup(
            index,
            _as_group(_spec_of(group)),
            tuple(group.layer_names),
            _state_form(_spec_of(group)),
            get_kv_cache_spec_kind(group.kv_cache_spec).value,
            get_kv_cache_spec_sliding_window(group.kv_cache_spec),
        )
        for index, group in _transferred(kv_cache_config).items()
    ]
    return tuple(sorted(found, key=lambda group: not group.group.looks_back_over_all))


def is_plain(groups: Sequence[TransferGroup]) -> bool:
    """Whether hashes of vLLM are ours: there is one group, which looks back over the whole prompt."""
    return len(groups) == 1 and groups[0].group.looks_back_over_all


def _transferred(kv_cache_config: KVCacheConfig) -> dict[int, Any]:
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {index: group for index, group in groups if getattr(group, "enable_kv_transfer", True)}


def _spec_of(group: Any) -> Any:
    """Return the spec of a group's layers; specs per layer are all of one kind."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return next(iter(per_layer.values())) if per_layer else group.kv_cache_spec


def _kind(spec: Any) -> Callable[[Any], Group] | None:
    names = class_names(spec)
    if not getattr(spec, "prefix_cacheable", True) or not _NEVER.isdisjoint(names):
        return None
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def class_names(spec: Any) -> list[str]:
    """Return the names of a spec's class and of its bases."""
    return [cls.__name__ for cls in type(spec).__mro__]


def _as_group(spec: Any) -> Group:
    make = _kind(spec)
    assert make is not None, type(spec)
    return make(spec)


def _is_state(spec: Any) -> bool:
    return _kind(spec) is _KINDS["MambaSpec"]


def _reason_of_states(vllm_config: VllmConfig, specs: Sequence[Any]) -> str | None:
    """Return why the states of this engine cannot be reused, or have never been; None if they can."""
    if not KNOWS_FAILED_REQUESTS:  # it would continue with the state of an earlier block; 0.28 hands over no states
        return "vLLM before 0.30 does not accept failed loads of the states of Mamba and similar layers"
    states = [spec for spec in specs if _is_state(spec)]
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    found = disabled_by(
        mode=next((spec.mamba_cache_mode for spec in states if spec.mamba_cache_mode != "align"), "align"),
        pipeline_parallel_size=getattr(parallel, "pipeline_parallel_size", 1),
        speculates=vllm_config.speculative_config is not None or any(spec.num_speculative_blocks for spec in states),
        replays=bool(getattr(cache, "use_replayssm", False)),
    )
    if found is not None:
        return found[1]
    kinds = {spec.mamba_type.name for spec in states}.difference(KINDS_OF_STATES.values())
    if kinds:
        return f"layers with states of kind {min(kinds)} have never been run with kvbm"
    if any("MLAAttentionSpec" in class_names(spec) for spec in specs):  # Kimi, whose states vLLM does not name
        return "layers with states next to latent attention (MLA) have never been run with kvbm"
    return None


def _state_form(spec: Any) -> str:
    """Return what decides the bytes of a snapshot, besides the layout of a block; empty without a state.

    The order of the dimensions in `shapes` follows from the layout of the convolution's state.
    """
    return f"{spec.mamba_type.name} {spec.shapes} {spec.dtypes}" if _is_state(spec) else ""


def _windowed(spec: Any) -> Group:
    return Group(spec.block_size, window_tokens=spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))


_KINDS: dict[str, Callable[[Any], Group]] = {
    "SlidingWindowSpec": _windowed,
    "ChunkedLocalAttentionSpec": lambda spec: Group(spec.block_size, chunk_tokens=spec.attention_chunk_size),
    "FullAttentionSpec": lambda spec: Group(spec.block_size),
    "MambaSpec": lambda spec: StateGroup(spec.block_size),
}
# Kinds derived from full attention that free blocks in the middle of a request.
_NEVER = frozenset({"RSWASpec"})
