"""KV heads: whether all layers certainly have the same number, and how many ranks have the same head.

With fewer KV heads than tensor-parallel ranks, an engine repeats heads, and ranks have equal KV. That is known only if
each layer has as many heads as the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Names of numbers of KV heads in the configurations of transformers, and of settings per layer that contain one.
_ABOUT_HEADS = re.compile(r"kv_heads|key_value_heads|head_kv|kv_n_heads|query_group|attention_group")
_PER_LAYER = ("block_configs", "attention_other_setting", "per_layer_config")


def have_layers_equal_heads(config: Mapping[str, object], kv_heads: int) -> bool:
    """Whether no entry of the language model's configuration allows another number of KV heads than this one."""
    counts = [value for name, value in config.items() if _ABOUT_HEADS.search(name) and value is not None]
    return all(count == kv_heads for count in counts) and not any(config.get(name) for name in _PER_LAYER)


def replicas_of_heads(kv_heads: int, tensor_parallel: int) -> int:
    """Return the number of ranks with the same head: 1 if every rank has heads of its own, or if heads cannot be
    divided."""
    if not 0 < kv_heads < tensor_parallel or tensor_parallel % kv_heads:
        return 1
    return tensor_parallel // kv_heads
