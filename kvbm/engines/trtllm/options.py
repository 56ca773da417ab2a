"""Rules for single options in `engine.arguments` of TensorRT-LLM: what kvbm sets, and what it cannot work with.

TensorRT-LLM's interface for connectors has limits. An option beyond one of them is refused here, before a start of
minutes: TensorRT-LLM would refuse it, or the connector would disable itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.engine import flags_of_others
from kvbm.config.flags import NAME, refused_by
from kvbm.config.spelling import snake_case

CONNECTOR = {
    "connector_module": "kvbm.trtllm_integration.connector",
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}
DEFAULT_BLOCK_TOKENS = 32
# Keys of a file of options that are not keys of other files.
SIGNS = frozenset(
    (
        *("kv_cache_config", "kv_connector_config", "cuda_graph_config", "moe_config", "max_num_tokens"),
        *("cache_transceiver_config", "enable_attention_dp", "moe_expert_parallel_size", "print_iter_log"),
        *("max_batch_size", "disable_overlap_scheduler", "build_config"),
    )
)

KVBM_SETS: Mapping[str, str] = {
    "model": "use `engine.model`",
    "host": "use `server.host`",
    "port": "use `server.port`",
    "kv_connector_config": "remove it; kvbm writes it, and `kvbm serve --baseline` leaves it out",
    "extra_llm_api_options": "write the options of that file into `engine.arguments`",
    "config": "write the options of that file into `engine.arguments`",
}

# Names of other engines and of options of the command line, and the option in the file.
SAME_OPTION: Mapping[str, str] = {
    "max_model_len": "max_seq_len",
    "max_num_batched_tokens": "max_num_tokens",
    "max_num_seqs": "max_batch_size",
    "block_size": "kv_cache_config.tokens_per_block",
    "tokens_per_block": "kv_cache_config.tokens_per_block",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "gpu_memory_utilization": "kv_cache_config.free_gpu_memory_fraction",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "num_blocks": "kv_cache_config.max_tokens",
    "num_gpu_blocks_override": "kv_cache_config.max_tokens",
    "prefix_caching": "kv_cache_config.enable_block_reuse",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "ep_size": "moe_expert_parallel_size",
}


# Flags of other engines that TensorRT-LLM does not have.
_OF_OTHERS = flags_of_others("tensorrt-llm") - {"seed", "device", "pipeline_parallel_size"}


@dataclass(frozen=True, slots=True)
class Limit:
    """The value of `option` must be `required`, for this reason. If that is None, the option must not be set."""

    option: str
    required: object
    reason: str

    def is_kept(self, value: object) -> bool:
        return value == self.required and isinstance(value, bool) == isinstance(self.required, bool)

    def message(self, value: object) -> str:
        name = f"`engine.arguments.{self.option}`"
        if self.required is None:
            return f"{name} is not supported: {self.reason}"
        return f"{name} must be `{_shown(self.required)}`, not `{_shown(value)}`: {self.reason}"


_RANKS = "the connector supports tensor parallelism only"
_WEIGHTS = "the weights can change in memory, which TensorRT-LLM does not report to a connector"
LIMITS = (
    Limit("backend", "pytorch", "only this backend loads a connector"),
    Limit("max_beam_width", 1, "the hash of a block covers only the first beam"),
    Limit("speculative_config", None, "TensorRT-LLM cannot combine it with a connector"),
    Limit("pipeline_parallel_size", 1, _RANKS),
    Limit("context_parallel_size", 1, _RANKS),
    Limit("enable_attention_dp", False, _RANKS),
    Limit("ray_worker_extension_cls", None, _WEIGHTS),
    Limit("sleep_config", None, _WEIGHTS),
    Limit("enable_sleep", False, _WEIGHTS),
    Limit("orchestrator_type", "rpc", _WEIGHTS),
    Limit(
        "scheduler_config.capacity_scheduler_policy",
        "GUARANTEED_NO_EVICT",
        "with another policy, a request may lose its blocks during a copy",
    ),
    Limit("kv_cache_config.enable_block_reuse", True, "without it, the engine looks for no cached prefix"),
    Limit("kv_cache_config.enable_partial_reuse", False, "after a hit of part of a block, kvbm loads nothing"),
    Limit("kv_cache_config.host_cache_size", 0, "`tiers.host` replaces TensorRT-LLM's own host memory"),
)
_AS_IN_TRTLLM = "write the name as in TensorRT-LLM, such as `max_seq_len: 8192`"
_COUNTS = ("kv_cache_config.tokens_per_block", "kv_cache_config.max_tokens")  # kvbm computes sizes from them


def refused_options(document: Document) -> Iterator[Mistake]:
    """Yield a mistake for each option that kvbm sets, that no option is, or whose value kvbm cannot work with."""
    yield from refused_by(document, _reason_against)
    for limit in LIMITS:
        found = _option(document, limit.option)
        if found is not None and not limit.is_kept(found.value):
            yield _refused(limit.option, limit.message(found.value), found)
    for option in _COUNTS:
        found = _option(document, option)
        if found is not None and not (type(found.value) is int and found.value >= 1):
            text = f"`engine.arguments.{option}` must be a whole number of at least 1, not `{_shown(found.value)}`"
            yield _refused(option, text, found)


def _reason_against(name: str, entry: Entry) -> tuple[str, str] | None:
    if not NAME.fullmatch(name):
        meant = snake_case(name)
        hint = f"write `{SAME_OPTION.get(meant, meant)}`" if NAME.fullmatch(meant) else _AS_IN_TRTLLM
        return f"`{name}` is not a valid option name", hint
    if name in KVBM_SETS:
        return f"`{name}` is set by kvbm", KVBM_SETS[name]
    if name in SAME_OPTION:
        return f"`{name}` is not an option of the LLM API of TensorRT-LLM", f"use `{SAME_OPTION[name]}`"
    if name in _OF_OTHERS:
        return f"`{name}` is not an option of the LLM API of TensorRT-LLM", "remove it"
    return None


def _option(document: Document, option: str) -> Entry | None:
    found = entry_at(document, ["engine", "arguments", *option.split(".")])
    return None if found is None or found.value is None else found


def _refused(option: str, message: str, entry: Entry) -> Mistake:
    place = entry.key if entry.section is not None else entry.source
    return Mistake(message, place, hint="remove it", key=f"engine.arguments.{option}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
