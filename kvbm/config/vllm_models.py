"""What `kvbm.sizing` and the connector both ask about a model in vLLM: sizing before a start, with the arguments of a
profile and the files of the model, the connector inside vLLM, with what vLLM made of them. One table for both.

States of models (Mamba, gated delta nets): what kvbm supports.

KV heads: whether all layers certainly have the same number. With fewer KV heads than tensor-parallel ranks, an engine
repeats heads, and ranks have equal KV. That is known only if each layer has as many heads as the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

KINDS_OF_STATES = {"GDN": "GDN_ATTN", "Mamba-2": "MAMBA2"}  # that have been run with kvbm; names of kvbm and of vLLM
MODE, ALIGN, NO_STATES = "mamba_cache_mode", "align", "none"  # without prefix caching, vLLM uses `none`


def disabled_by(*, mode: str, pipeline_parallel_size: int, speculates: bool, replays: bool) -> tuple[str, str] | None:
    """Return the argument of vLLM for which kvbm disables itself with a model that has states, and why; None without
    one. `mode` is the one that vLLM uses."""
    if speculates:
        return "speculative_config", "speculative decoding with states has never been run with kvbm"
    if mode == NO_STATES:
        return "enable_prefix_caching", "without prefix caching, vLLM keeps no states"
    if replays:
        return "use_replayssm", "`use_replayssm`, which delays the update of states, has never been run with kvbm"
    if pipeline_parallel_size > 1:
        return "pipeline_parallel_size", "pipeline parallelism with states has never been run with kvbm"
    if mode != ALIGN:
        return MODE, f"`{MODE}: {mode}` has never been run with kvbm; remove it, or use `{ALIGN}`"
    return None


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
