"""Engine facts: what the two sides of the connector read from vLLM's configuration, besides its KV cache groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from kvbm.engines.vllm.cache_groups import KNOWS_FAILED_REQUESTS
from kvbm.engines.vllm.identity import encodes_by_content
from kvbm.identity.machine import version_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """`hash_bytes`: length of vLLM's block hashes. `index`: number of this engine in a data-parallel server.

    `continues_prompts`: the engine can compute more than the last token of a prompt after a hit. `gives_up_blocks`: it
    frees the blocks of a failed load. `publishes_events`: vLLM publishes KV events. `encodes_here`: the engine computes
    every encoding of media itself, and from the content alone. `info`: labels of the metric `kvbm_info`.
    `hash_algorithm`: vLLM's name of the one for block hashes.
    """

    rank_count: int
    hash_bytes: int
    index: int = 0
    continues_prompts: bool = True
    gives_up_blocks: bool = True
    publishes_events: bool = False
    encodes_here: bool = True
    info: dict[str, str] = field(default_factory=dict)
    hash_algorithm: str = "sha256"

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> VllmFacts:
        from vllm.utils.hashing import get_hash_fn_by_name

        parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
        return cls(
            rank_count_of(vllm_config),
            hash_bytes=len(get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)(b"")),
            hash_algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
            # vLLM resets the rank to 0 if engines share no experts.
            index=int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)),
            continues_prompts=_continues_prompts(vllm_config),
            gives_up_blocks=KNOWS_FAILED_REQUESTS,
            publishes_events=bool(events and events.enable_kv_cache_events),
            encodes_here=encodes_by_content(vllm_config),
            info=_info(vllm_config),
        )


def _info(vllm_config: VllmConfig) -> dict[str, str]:
    model = vllm_config.model_config
    return {
        "engine_name": "vllm",
        "engine_version": version_of("vllm"),
        "model": PurePath(str(model.model)).name,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def rank_count_of(vllm_config: VllmConfig) -> int:
    """Return how many ranks an engine has: tensor and pipeline parallel, not data parallel."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def rank_of(vllm_config: VllmConfig) -> int:
    """Return the rank of this worker among them."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    stage: int = get_pp_group().rank_in_group
    part: int = get_tp_group().rank_in_group
    return stage * int(vllm_config.parallel_config.tensor_parallel_size) + part


def _continues_prompts(vllm_config: VllmConfig) -> bool:
    """Return whether the engine can compute more than one token after a cached prefix.

    vLLM's reference attention for latent (MLA) caches on CPUs cannot: it silently ignores the cached part of a prompt.
    vLLM itself disables chunked prefill and its prefix cache for it.
    """
    from vllm.platforms import current_platform

    is_reference = current_platform.is_cpu() and getattr(vllm_config.model_config, "use_mla", False)
    return not is_reference or bool(vllm_config.scheduler_config.enable_chunked_prefill)
