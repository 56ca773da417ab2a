"""Which options of vLLM count for the identity of its blocks: all, except those named here.

Two replicas of one model differ in addresses, ranks, sizes of memory and limits, and share their blocks. An option that
is not named here counts, also one that a later version of vLLM adds: that costs hits, never answers.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any

from kvbm.identity.description import Hashed
from kvbm.identity.machine import precision_variables
from kvbm.identity.options import Options, depends_on_length

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Sections that change no KV, or that count elsewhere.
OTHER_SECTIONS = frozenset(
    {"scheduler_config", "structured_outputs_config", "reasoning_config", "watermark_config"}  # order, sampling, output
    | {"aux_output_config", "observability_config", "logging_config", "profiler_config", "instance_id"}
    | {"shutdown_timeout", "kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config"}
    | {"weight_transfer_config"}  # weights that change in memory are noticed, see weight_updates.py
    | {"offload_config"}  # where weights lie
    | {"device_config", "load_config", "lora_config"}  # counted as `instruction_set`; as `weights`; in doubt
    | {"quant_config"}  # made from `quantization` and the model's files
    | {"compilation_config"}  # COMPILATION
    | {"additional_config"}  # `platform`
)
COMPILATION = ("mode", "level", "backend", "custom_ops", "pass_config", "use_inductor_graph_partition")

OMITTED = {
    "ModelConfig": frozenset(
        # Names and places. What they lead to counts as content of the model's files.
        {"model", "model_weights", "tokenizer", "served_model_name", "hf_token", "revision", "tokenizer_revision"}
        | {"code_revision", "hf_config_path", "config_format", "allowed_local_media_path"}
        | {"allowed_media_domains"}
        # Made from the model's files, after overrides; `hf_config` counts as `configuration`.
        | {"hf_config", "hf_overrides"}
        # Limits; `length` counts for models whose KV depends on it.
        | {"max_model_len", "spec_target_max_model_len", "max_logprobs"}
        # Tokens are hashed, so how they are made and chosen does not count. Weights from `seed` are in doubt.
        | {"tokenizer_mode", "skip_tokenizer_init", "seed", "generation_config", "override_generation_config"}
        | {"logprobs_mode", "return_sampling_mask", "use_fp64_gumbel", "logits_processors", "io_processor_plugin"}
        | {"renderer_num_workers", "pooler_config", "allow_deprecated_quantization"}
        # What is done with memory while the engine sleeps.
        | {"enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph"}
        | {"enable_nccl_comm_suspend", "enable_cumem_allocator"}
    ),
    "CacheConfig": frozenset(
        # How many blocks fit.
        {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "num_gpu_blocks"}
        | {"num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "swap_space", "cpu_offload_gb"}
        # Other caches; how the block size was chosen.
        | {"kv_offloading_size", "kv_offloading_backend", "user_specified_block_size", "_block_size_resolved"}
        # Counted as `hash`.
        | {"enable_prefix_caching", "prefix_caching_hash_algo"}
    ),
    "ParallelConfig": frozenset(
        # Replicas.
        {"data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_rank_local"}
        | {"data_parallel_index", "data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb"}
        | {"dp_sync_interval", "disable_nccl_for_dp_synchronization", "enable_elastic_ep", "elastic_ep_max_dp_size"}
        # Addresses and ports.
        | {"data_parallel_master_ip", "data_parallel_rpc_port", "data_parallel_master_port", "master_addr"}
        | {"master_port", "_data_parallel_master_port_list", "_coord_store_port"}
        # Processes, machines and devices. The world size follows from the sizes of TP, PP and CP.
        | {"rank", "node_rank", "nnodes", "world_size", "_api_process_count", "_api_process_rank", "placement_group"}
        | {"distributed_executor_backend", "ray_workers_use_nsight", "ray_runtime_env", "max_parallel_loading_workers"}
        | {"numa_bind", "numa_bind_nodes", "numa_bind_cpus", "assigned_physical_gpu_ids"}
        # Failures.
        | {"distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "enable_fault_tolerance"}
        | {"fault_tolerance_config"}
    ),
    "LoadConfig": frozenset(  # how fast the files are read
        {"download_dir", "safetensors_load_strategy", "safetensors_prefetch_num_threads", "use_tqdm_on_load", "device"}
        | {"safetensors_prefetch_block_size", "pt_load_map_location"}
    ),
    "AttentionConfig": frozenset({"sparse_mla_prefill_workspace_factor"}),  # follows from the maximum length
    "SpeculativeConfig": frozenset(
        {"target_model_config", "target_parallel_config", "max_model_len", "revision", "code_revision"}
    ),
    "MultiModalConfig": frozenset(  # caches, and where scales are read from and written to
        {"mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "mm_processor_cache_gb", "mm_tensor_ipc"}
        | {"mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_ipc_gpu_memory_gb", "skip_mm_profiling"}
    ),
    "EngramConfig": frozenset({"cpu_offload", "embedding_across_dp", "dp_shared_memory", "use_thp"}),
}
# Parts of names of variables that differ between starts or replicas of one set-up, and that change no KV.
OTHER_VARIABLES = re.compile(
    "ADDR|API|BUFFER_NAME|BUILD|CACHE_DIR|DEBUG|DEV_MODE|DIST_IDENT|_DP_|ELASTIC_EP|HOST|IMAGE_TAG|_IP$|KEEP_ALIVE|LOG"
    "|ASSETS_CACHE|KVCACHE_SPACE|MEDIA_CACHE|_NIC_|OMP_THREADS|PATH|PORT|PROC|RANK|RAY|RESERVED_CPU|ROOT|RPC|STATS"
    "|TIMEOUT|TRACE|TRACK|USAGE"
)


def sections(vllm_config: VllmConfig, options: Options) -> dict[str, str | Hashed]:
    """Return a digest of each section of the configuration that counts. Raises Unidentified or OSError."""
    names = (field.name for field in dataclasses.fields(vllm_config))
    values = {name: getattr(vllm_config, name, None) for name in names if name not in OTHER_SECTIONS}
    compilation = getattr(vllm_config, "compilation_config", None)
    values["compilation"] = {name: getattr(compilation, name, None) for name in COMPILATION}
    platform: Any = getattr(vllm_config, "additional_config", None)
    values["platform"] = platform.compute_hash() if hasattr(platform, "compute_hash") else platform
    return {name: options.digest(value) for name, value in values.items() if value is not None}


def environment(options: Options) -> str | Hashed:
    """Return a digest of the variables that can change how vLLM computes, such as a quantised reduction."""
    names = {name for name in os.environ if name.startswith("VLLM_") and not OTHER_VARIABLES.search(name)}
    return options.digest({name: os.environ[name] for name in names} | precision_variables())


def length(model_config: Any) -> int:
    """Return the maximum length of a sequence if the KV of shorter ones depends on it, otherwise 0. It is that with
    which the model was loaded: -1 if the configuration gave it, whatever vLLM has reduced it to since."""
    if not depends_on_length(model_config.hf_config.to_dict()):
        return 0
    is_derived = getattr(model_config, "original_max_model_len", None) == -1
    return -1 if is_derived else int(model_config.max_model_len)
