"""Engine kinds of a profile, and the flags of each.

All flags of the embedded engine are declared here. vLLM, TensorRT-LLM and SGLang have hundreds, which change with every
version: only those that kvbm reads are declared, all others are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from kvbm.config.values import (
    Count,
    EnvironmentValue,
    FlagValue,
    Length,
    Names,
    OptionValue,
    Ranks,
    Section,
    VariableName,
    WrongKey,
)

MIN_SHUTDOWN_TIMEOUT_S, MAX_SHUTDOWN_TIMEOUT_S = 5, 25  # at 0 vLLM kills its scheduler; kvbm waits 30 s

# Flags that several engines have, under different names.
_Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
_DTYPE: Any = Field(None, description="Data type of weights and KV cache; by default from the model's configuration.")
_TENSOR_RANKS: Any = Field(None, description="Number of ranks that share every layer.")
_STAGES: Any = Field(None, description="Pipeline stages: groups of ranks that each have a part of the layers.")
_COPIES: Any = Field(None, description="Number of engine copies, each with device and host memory of its own.")


class EmbeddedArguments(Section):
    """Flags of `python -m kvbm.engines.embedded`. A missing key keeps the default of the engine."""

    LENGTH: ClassVar[str] = "max_model_len"

    num_blocks: int = Field(default=2048, ge=2, le=2**31, description="Number of blocks in device memory (G1).")
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in a block.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Data type of weights and KV cache. With float32, outputs are exactly reproducible.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of the model. `auto` uses a GPU if there is one."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Maximum length of a request in tokens, prompt and output; by default that of the model.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Maximum number of tokens that one step computes; by default 1024 on a CPU and 2048 on a GPU.",
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, le=2**31, description="Maximum number of requests that run in parallel; by default 64."
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**63 - 1,
        description="Seed of synthetic weights, and of sampling for requests without a seed.",
    )
    threads: int | None = Field(default=None, ge=1, le=4096, description="Number of CPU threads of the model.")
    prefix_caching: bool = Field(
        default=True, description="Whether the engine keeps the blocks of finished requests in G1 for reuse."
    )
    verify: bool = Field(
        default=True, description="Whether the engine compares its attention with the model's own at start-up."
    )
    kv_layout: Literal["block_first", "layer_first"] = Field(
        default="block_first", description="Memory layout of G1: a block is contiguous, or each layer is."
    )
    worker_process: bool = Field(default=False, description="Whether the worker of kvbm runs in a process of its own.")
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Name of the model in the API; by default the value of `engine.model`."
    )


class VllmArguments(Section):
    """Flags of `vllm serve`, by their long names; `max_model_len` and `max-model-len` are the same key."""

    LENGTH: ClassVar[str] = "max_model_len"
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FlagValue] = Field(init=False)

    max_model_len: Length | None = Field(
        default=None,
        description="Maximum length of a request in tokens, prompt and output; `32k` is 32000, `32K` is 32768.",
    )
    dtype: _Dtype | None = _DTYPE
    kv_cache_dtype: str | None = Field(
        default=None,
        min_length=1,
        description="Data type of the KV cache, if it differs from the weights, such as `fp8`.",
    )
    block_size: int | None = Field(
        default=None, ge=1, le=2**16, description="Tokens in a block; by default 128 on a CPU and 16 elsewhere."
    )
    num_gpu_blocks_override: int | None = Field(
        default=None,
        ge=2,
        le=2**31,
        description="Number of blocks in device memory (G1), also on a CPU. vLLM reserves one of them.",
    )
    kv_cache_memory_bytes: Count | None = Field(default=None, description="Device memory for blocks (G1), per rank.")
    max_num_batched_tokens: Count | None = Field(
        default=None, description="Maximum number of tokens that one step computes."
    )
    tensor_parallel_size: Ranks | None = _TENSOR_RANKS
    pipeline_parallel_size: Ranks | None = _STAGES
    data_parallel_size: Ranks | None = _COPIES
    enable_prefix_caching: bool | None = Field(
        default=None,
        description="Whether the engine keeps the blocks of finished requests in G1 for reuse; by default it does.",
    )
    prefix_cache_retention_interval: int | None = Field(
        default=None,
        ge=0,
        le=2**31,
        description="For layers with states or a sliding window: vLLM keeps what a later prompt needs every so many "
        "tokens, a multiple of the block size; by default 0: only at the end of a prompt and of a shared prefix.",
    )
    disable_hybrid_kv_cache_manager: bool | None = Field(
        default=None, description="Whether layers with a sliding window keep all tokens, like the other layers."
    )
    served_model_name: Names | None = Field(
        default=None, description="Name of the model in the API, or a list of names."
    )
    shutdown_timeout: int | None = Field(
        default=None,
        ge=MIN_SHUTDOWN_TIMEOUT_S,
        le=MAX_SHUTDOWN_TIMEOUT_S,
        description="Seconds in which a stopping engine may finish requests; by default 10, more with a disk tier.",
    )
    kv_transfer_config: dict[str, FlagValue] | None = Field(
        default=None,
        description="Entries to add to the configuration of the connector, such as `kv_role` or `engine_id`.",
    )


class TrtllmArguments(Section):
    """Options of TensorRT-LLM's LLM API, as in the file of `--extra_llm_api_options`."""

    LENGTH: ClassVar[str] = "max_seq_len"
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, OptionValue] = Field(init=False)

    max_seq_len: int | None = Field(
        default=None, ge=1, le=2**31, description="Maximum length of a request in tokens, prompt and output."
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] | None = _DTYPE
    tensor_parallel_size: Ranks | None = _TENSOR_RANKS
    kv_cache_config: dict[str, OptionValue] | None = Field(
        default=None,
        description="Options of the KV cache, such as `free_gpu_memory_fraction`, `tokens_per_block` or `dtype`.",
    )
    scheduler_config: dict[str, OptionValue] | None = Field(default=None, description="Options of the scheduler.")

    @property
    def cache(self) -> dict[str, Any]:
        """The options of the KV cache that the profile sets."""
        return dict(self.kv_cache_config or {})

    @model_serializer(mode="wrap")
    def _with_every_option(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keep undeclared options that are null, also where keys without a value are left out."""
        return {**serialize(self), **(self.model_extra or {})}


class SglangArguments(Section):
    """Flags of `python -m sglang.launch_server`, by their long names; `page_size` and `page-size` are the same key."""

    LENGTH: ClassVar[str] = "context_length"
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FlagValue] = Field(init=False)

    context_length: Length | None = Field(
        default=None, description="Maximum length of a request in tokens, prompt and output."
    )
    dtype: _Dtype | None = _DTYPE
    kv_cache_dtype: str | None = Field(
        default=None,
        min_length=1,
        description="Data type of the KV cache, if it differs from the weights, such as `fp8_e4m3`.",
    )
    page_size: int = Field(
        default=64,
        ge=1,
        le=2**16,
        description="Tokens in a page, which is a block of kvbm. SGLang's own default of one token is too small for a "
        "disk.",
    )
    max_total_tokens: Count | None = Field(default=None, description="Tokens in device memory (G1).")
    tp_size: Ranks | None = _TENSOR_RANKS
    pp_size: Ranks | None = _STAGES
    dp_size: Ranks | None = _COPIES
    enable_hierarchical_cache: bool = Field(
        default=True,
        description="Whether SGLang has host memory of its own, below which kvbm stores pages. `false` requires "
        "`--baseline`, or `--compare baseline:PROFILE` of `kvbm bench`.",
    )
    hicache_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="Size of SGLang's own host memory, as a multiple of G1; by default 2.",
    )
    hicache_size: int | None = Field(
        default=None, ge=0, le=10**6, description="Size of SGLang's own host memory per rank, in GB (1e9 bytes)."
    )
    hicache_storage_backend_extra_config: dict[str, FlagValue] | None = Field(
        default=None,
        description="Entries to add to the configuration of the storage, such as `prefetch_threshold`.",
    )
    served_model_name: str | None = Field(default=None, min_length=1, description="Name of the model in the API.")


class EngineSection(Section):
    """Keys of every engine kind, and what its engines can do, as far as other keys require it.

    `has_presets`: `synthetic:NAME` names a model for it. `keeps_host_memory`: of its own. `offloads`: blocks to host
    memory of its own, if it is configured to. `sends_priorities`: of requests. `shows_evictions`: which blocks it
    evicts next. `transfers_blocks`: of a request, to another engine.
    `tiers_hint` names the tier to add if there is none.
    """

    has_presets: ClassVar[bool] = True
    sends_priorities: ClassVar[bool] = False
    keeps_host_memory: ClassVar[bool] = False
    offloads: ClassVar[bool] = False
    shows_evictions: ClassVar[bool] = False
    transfers_blocks: ClassVar[bool] = False
    tiers_hint: ClassVar[str] = "add `tiers.host.capacity`, such as `64GiB`"

    kind: str = Field(description="Engine that serves the model.")
    model: str = Field(min_length=1, description="Model; the allowed values depend on the engine.")
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Python interpreter that runs the engine; by default the one that runs `kvbm`.",
    )
    arguments: Any
    environment: dict[VariableName, EnvironmentValue] = Field(
        default={}, description="Environment variables for the engine, in addition to those of the caller."
    )

    @classmethod
    def require_tiers(cls, *, has_host: bool, has_lower: bool) -> None:
        """WrongKey, of `tiers`, if the engine cannot use these."""

    def require_one_copy(self) -> None:
        """ValueError if the arguments start several copies of the engine."""

    @property
    def served_name(self) -> str:
        """Name of the model in requests."""
        names = self.arguments.served_model_name
        return str((names[0] if isinstance(names, list) else names) or self.model)


class EmbeddedEngine(EngineSection):
    kind: Literal["embedded"] = Field(default="embedded", description="Engine that serves the model.")
    model: str = Field(
        min_length=1,
        description="`synthetic:tiny`, `synthetic:small` or `synthetic:8b` (random weights, no download), or a local "
        "Hugging Face directory.",
    )
    arguments: EmbeddedArguments = Field(default=EmbeddedArguments(), description="Flags of the engine.")


class VllmEngine(EngineSection):
    offloads: ClassVar[bool] = True
    shows_evictions: ClassVar[bool] = True
    transfers_blocks: ClassVar[bool] = True

    kind: Literal["vllm"] = Field(description="Engine that serves the model.")
    model: str = Field(
        min_length=1,
        description="A local Hugging Face directory, a name on the Hugging Face hub, or `synthetic:vllm-25m`, "
        "`synthetic:vllm-81m` or `synthetic:vllm-hybrid` (random weights, generated at first use).",
    )
    arguments: VllmArguments = Field(default=VllmArguments(), description="Flags of `vllm serve`.")

    def require_one_copy(self) -> None:
        if self.arguments.data_parallel_size not in (None, 1):
            raise ValueError("cannot be combined with `engine.arguments.data_parallel_size`; remove one of them")


class TrtllmEngine(EngineSection):
    has_presets: ClassVar[bool] = False
    sends_priorities: ClassVar[bool] = True  # requests with a retention configuration
    transfers_blocks: ClassVar[bool] = True

    kind: Literal["tensorrt-llm"] = Field(description="Engine that serves the model.")
    model: str = Field(min_length=1, description="A local Hugging Face directory, or a name on the Hugging Face hub.")
    arguments: TrtllmArguments = Field(
        default=TrtllmArguments(), description="Options of the LLM API, which `trtllm-serve` reads from a file."
    )

    @classmethod
    def require_tiers(cls, *, has_host: bool, has_lower: bool) -> None:
        if not has_host:
            message = "is required with `tensorrt-llm`, because TensorRT-LLM loads blocks only from host memory"
            raise WrongKey("host", message)

    @property
    def served_name(self) -> str:
        """Name of the model in requests: `trtllm-serve` uses the name of a directory without its path."""
        return self.model.rstrip("/").rpartition("/")[2] if self.model.startswith(("/", "~")) else self.model


class SglangEngine(EngineSection):
    keeps_host_memory: ClassVar[bool] = True
    tiers_hint: ClassVar[str] = "add `tiers.disk.capacity`, such as `1TB`"

    kind: Literal["sglang"] = Field(description="Engine that serves the model.")
    model: str = Field(
        min_length=1,
        description="A local Hugging Face directory, a name on the Hugging Face hub, or `synthetic:vllm-25m` or "
        "`synthetic:vllm-81m` (random weights, generated at first use).",
    )
    arguments: SglangArguments = Field(default=SglangArguments(), description="Flags of `sglang.launch_server`.")
    cpu_stand_ins: bool = Field(
        default=False,
        description="Whether SGLang runs on a CPU, with plain torch in place of its kernels: to try it, not to measure "
        "it.",
    )

    @classmethod
    def require_tiers(cls, *, has_host: bool, has_lower: bool) -> None:
        if not has_lower:
            message = "is required with `sglang`, which has host memory of its own; or set `tiers.shared`"
            raise WrongKey("disk", message)

    @property
    def served_name(self) -> str:
        """Name of the model in requests: SGLang refuses colons, which separate the name of an adapter."""
        return super().served_name.removeprefix("synthetic:")


ENGINES: Mapping[str, type[EngineSection]] = {
    "embedded": EmbeddedEngine,
    "vllm": VllmEngine,
    "tensorrt-llm": TrtllmEngine,
    "sglang": SglangEngine,
}
ENGINE_KINDS = ENGINES.keys()
FIRST_KIND = "embedded"  # reads an engine of an unknown kind, which it refuses
DEFAULT_KIND = "vllm"  # where none is named
ACCEPTS_EVERY_FLAG = "vllm"  # a profile of an unknown kind is examined as one of this kind


def flags_of_others(kind: str) -> Set[str]:
    """Return the declared flags of the other engines that this one does not declare."""
    declared: dict[str, set[str]] = {
        name: set(type(form.model_fields["arguments"].default).model_fields) for name, form in ENGINES.items()
    }
    own = declared.pop(kind)
    return set().union(*declared.values()) - own


def kinds_that(can: Callable[[type[EngineSection]], bool]) -> str:
    """Return the kinds of engines that can do something, for a message."""
    *others, last = [f"`{kind}`" for kind, form in ENGINES.items() if can(form)]
    return f"{', '.join(others)} or {last}" if others else last
