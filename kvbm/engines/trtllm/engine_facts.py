"""Engine facts: what the connector reads from TensorRT-LLM's arguments, and the engines that kvbm does not support.

The arguments are `TorchLlmArgs`, or `ExecutorConfig` in 1.1.0rc2. Every rank reads the same ones, so that all ranks
come to the same decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbm.errors import EnvironmentProblem

# Of reinforcement learning, which updates weights. TensorRT-LLM calls no hook of a connector then.
_WEIGHT_UPDATES = ("ray_worker_extension_cls", "sleep_config", "enable_sleep")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`block_tokens` is the number of tokens per block. `has_adapters`: requests may name a LoRA adapter."""

    block_tokens: int
    rank_count: int
    has_adapters: bool
    max_tokens: int | None

    @classmethod
    def of(cls, arguments: Any) -> EngineFacts:
        """Raise EnvironmentProblem if the arguments do not contain the block size."""
        cache = getattr(arguments, "kv_cache_config", None)
        block_tokens = getattr(cache, "tokens_per_block", None) or getattr(arguments, "tokens_per_block", None)
        if not block_tokens:
            raise EnvironmentProblem(
                f"`{type(arguments).__name__}` of TensorRT-LLM has no `tokens_per_block`",
                hint="set `kv_cache_config.tokens_per_block`",
            )
        return cls(
            int(block_tokens),
            rank_count=int(getattr(_mapping(arguments), "world_size", 1)),
            has_adapters=getattr(arguments, "lora_config", None) is not None,
            max_tokens=getattr(arguments, "max_seq_len", None),
        )


def decline_reason(arguments: Any, *, reports_resets: bool) -> str | None:
    """Return why kvbm does not support this engine, or None. `reports_resets`: the interface calls `request_reset`
    before it takes blocks away from a running request."""
    mapping = _mapping(arguments)
    if int(getattr(arguments, "max_beam_width", None) or 1) > 1:
        return "beam width is larger than 1: the hash of a block covers only the first beam"
    if getattr(arguments, "speculative_config", None) is not None:
        return "it has a speculative configuration, which the connector interface does not support"
    changes = [name for name in _WEIGHT_UPDATES if getattr(arguments, name, None) not in (None, False)]
    if str(getattr(arguments, "orchestrator_type", None)) == "ray":  # whose workers let a caller run any method
        changes.append("orchestrator_type: ray")
    if changes:
        return f"`{changes[0]}` can change its weights in memory, which TensorRT-LLM does not report to connectors"
    if int(getattr(mapping, "pp_size", 1)) > 1:
        return "pipeline parallelism is not supported"
    if int(getattr(mapping, "cp_size", 1)) > 1:
        return "context parallelism is not supported"
    if bool(getattr(mapping, "enable_attention_dp", False)):
        return "attention data parallelism is not supported"
    policy = getattr(getattr(arguments, "scheduler_config", None), "capacity_scheduler_policy", None)
    if not reports_resets and policy is not None and "MAX_UTILIZATION" in str(policy):
        return "its capacity policy is not GUARANTEED_NO_EVICT: a request may lose its blocks during a copy"
    windows = getattr(getattr(arguments, "kv_cache_config", None), "max_attention_window", None) or ()
    longest = getattr(arguments, "max_seq_len", None)
    if any(cuts(window, longest) for window in windows):
        return "layers with a sliding window are not supported: the engine reuses their blocks during a copy"
    return None


def cuts(window: int | None, max_tokens: int | None) -> bool:
    """Whether a layer with this attention window gives up blocks of a request with `max_tokens`."""
    return window is not None and (max_tokens is None or window < max_tokens)


def _mapping(arguments: Any) -> Any:
    parallel = getattr(arguments, "parallel_config", None)
    return parallel.to_mapping() if parallel is not None else getattr(arguments, "mapping", None)
