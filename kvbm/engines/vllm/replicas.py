"""Replicas in vLLM: which tensor-parallel ranks have equal KV, and how they meet at start-up.

    latent attention (MLA) in all layers      all ranks have the same KV
    fewer KV heads than ranks                 vLLM repeats each head on consecutive ranks

In all other cases, and in doubt, each rank has a copy of its own. vLLM reduces the output of a layer to the same bits
on all ranks, so that equal weights compute equal KV. The leader compares samples nevertheless (`host/region.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm.config.heads import have_layers_equal_heads, replicas_of_heads
from kvbm.device.replicas import ALONE, Replicas
from kvbm.engines.vllm.cache_groups import class_names

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_LATENT = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
_OF_HEADS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})


def replicas_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Replicas:
    """Return the place of this rank among those with equal KV. Call it in a worker."""
    count = replica_count(vllm_config, kv_cache_config)
    if count == 1:
        return ALONE
    from vllm.distributed.parallel_state import get_tp_group

    part = int(get_tp_group().rank_in_group)
    first = part - part % count
    return Replicas(part % count, count, lambda value: _gathered(value)[first : first + count])


def replica_count(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many consecutive tensor-parallel ranks have equal KV in every layer."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _layer_specs(group.kv_cache_spec)]
    if ranks == 1 or not specs:
        return 1
    if all(_is_latent(spec) for spec in specs):
        return ranks
    if vllm_config.speculative_config is None and all(_has_one_head(spec) for spec in specs):
        return _replicas_of_heads(vllm_config.model_config, ranks)
    return 1


def _replicas_of_heads(model_config: Any, ranks: int) -> int:
    kv_heads = int(model_config.get_total_num_kv_heads())
    is_certain = have_layers_equal_heads(model_config.hf_text_config.to_dict(), kv_heads)
    return replicas_of_heads(kv_heads, ranks) if is_certain else 1


def _layer_specs(spec: Any) -> list[Any]:
    return list((getattr(spec, "kv_cache_specs", None) or {"": spec}).values())


def _is_latent(spec: Any) -> bool:
    """Whether the layer is latent and not divided. vLLM names the number of its parts from 0.32 on; None is unknown."""
    names = set(class_names(spec))
    return (
        not _LATENT.isdisjoint(names) and "HiddenStateCacheSpec" not in names and getattr(spec, "max_tp_shards", 1) == 1
    )


def _has_one_head(spec: Any) -> bool:
    names = set(class_names(spec))
    return not _OF_HEADS.isdisjoint(names) and _LATENT.isdisjoint(names) and spec.num_kv_heads == 1


def _gathered(value: object) -> list[Any]:
    """Return the values of all tensor-parallel ranks. Each of them calls this."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values
