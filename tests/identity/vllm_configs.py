"""Configurations of vLLM, played by dataclasses of the same names, for tests of the identity without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any


class HfConfig:
    """A configuration of Hugging Face. Some values are attributes only, as there."""

    __module__ = "transformers"

    def __init__(self, **facts: object) -> None:
        self._facts = {"model_type": "llama", **facts}
        self._commit_hash = self._facts.pop("_commit_hash", None)
        self.auto_map = self._facts.pop("auto_map", None)

    def to_dict(self) -> dict[str, object]:
        return dict(self._facts)


@dataclass(frozen=True)
class ModelConfig:
    model: str
    hf_config: Any = field(default_factory=HfConfig)
    hf_text_config: Any = None
    revision: str | None = None
    max_model_len: int = 4096
    tokenizer: str = ""
    served_model_name: str = ""
    max_logprobs: int = 20
    seed: int = 0
    dtype: str = "bfloat16"
    quantization: str | None = None
    disable_sliding_window: bool = False
    model_weights: str = ""
    trust_remote_code: bool = False
    code_revision: str | None = None
    model_class_overrides: dict[str, str] = field(default_factory=dict)
    multimodal_config: Any = None
    of_a_later_version: object = None


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks: int = 100
    prefix_match_unit: int | None = None


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_master_port: int = 0
    master_addr: str = "127.0.0.1"
    distributed_timeout_seconds: int | None = None
    enable_expert_parallel: bool = False


@dataclass(frozen=True)
class LoadConfig:
    load_format: object = "auto"
    download_dir: str | None = None
    ignore_patterns: list[str] | None = None
    model_loader_extra_config: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class MultiModalConfig:
    mm_processor_kwargs: dict[str, object] | None = None
    mm_encoder_fp8_scale_path: str | None = None
    mm_processor_cache_gb: float = 4.0


@dataclass(frozen=True)
class KernelConfig:
    moe_backend: str = "auto"


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = 128


@dataclass(frozen=True)
class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig = CacheConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    load_config: LoadConfig = LoadConfig()
    kernel_config: KernelConfig = KernelConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    compilation_config: Any = field(default_factory=lambda: SimpleNamespace(mode=3, cache_dir="/cache/one"))
    speculative_config: Any = None
    additional_config: Any = None
    instance_id: str = "1"
    of_a_later_version: object = None


def vllm_config(path: object, changes: dict[str, object] | None = None, **sections: object) -> VllmConfig:
    """Return a configuration of the model in `path`. `changes` has values by `section.field`, or by section."""
    config = VllmConfig(ModelConfig(str(path)), **sections)  # type: ignore[arg-type]
    for name, value in (changes or {}).items():
        section, _, inner = name.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{inner: value}) if inner else value})
    return config
