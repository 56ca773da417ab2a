"""The kinds of engines that a profile can ask for, and the flags of each.

The embedded engine's flags are all declared here. Of vLLM's there are hundreds, which change with every version: those
that kvbm itself reads are declared, all others are passed on as they are written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from kvbm.config.values import (
    Count,
    EnvironmentValue,
    FlagValue,
    Length,
    Names,
    Section,
    VariableName,
)

ENGINE_KINDS = ("embedded", "vllm")
MIN_SHUTDOWN_TIMEOUT_S, MAX_SHUTDOWN_TIMEOUT_S = 5, 25  # at 0 vLLM kills its scheduler; kvbm waits for 30 s


class EmbeddedArguments(Section):
    """Flags of `python -m kvbm.embedded`. A key that is left out keeps the engine's own default."""

    num_blocks: int = Field(default=2048, ge=2, le=2**31, description="Blocks of device memory (G1).")
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in a block.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights and KV cache; float32 makes outputs exactly repeatable."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; `auto` takes a GPU if there is one."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, le=2**31, description="Longest request in tokens, prompt and output."
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, le=2**31, description="Tokens that one step may compute."
    )
    max_num_seqs: int | None = Field(default=None, ge=1, le=2**31, description="Requests that run at the same time.")
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Seed of synthetic weights and of sampling without a seed."
    )
    threads: int | None = Field(default=None, ge=1, le=4096, description="CPU threads of the model.")
    prefix_caching: bool = Field(default=True, description="Whether the engine keeps finished prompts in G1 for reuse.")
    verify: bool = Field(
        default=True, description="Whether the start compares the engine's attention with the model's own."
    )
    kv_layout: Literal["block_first", "layer_first"] = Field(
        default="block_first", description="Byte order of G1: a block in one piece, or one piece per layer."
    )
    worker_process: bool = Field(
        default=False, description="Whether the worker of the block manager runs in a process of its own."
    )
    served_model_name: str | None = Field(default=None, min_length=1, description="Model name in the API.")


class VllmArguments(Section):
    """Flags of `vllm serve`, by their long names; `max_model_len` and `max-model-len` are the same key."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FlagValue] = Field(init=False)

    max_model_len: Length | None = Field(
        default=None, description="Longest request in tokens, prompt and output; `32k` is 32000, `32K` is 32768."
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = Field(
        default=None,
        description="Type of weights and KV cache; left out, the one that the model's configuration names.",
    )
    kv_cache_dtype: str | None = Field(
        default=None,
        min_length=1,
        description="Type of the KV cache where it is not that of the weights, such as `fp8`.",
    )
    block_size: int | None = Field(
        default=None, ge=1, le=2**16, description="Tokens in a block; left out, 128 on a CPU and 16 elsewhere."
    )
    num_gpu_blocks_override: int | None = Field(
        default=None,
        ge=2,
        le=2**31,
        description="Blocks of device memory (G1), one of which vLLM keeps for itself; also on a CPU.",
    )
    kv_cache_memory_bytes: Count | None = Field(default=None, description="Device memory for blocks (G1), per rank.")
    max_num_batched_tokens: Count | None = Field(default=None, description="Tokens that one step may compute.")
    tensor_parallel_size: int | None = Field(default=None, ge=1, le=1024, description="Ranks that share every layer.")
    pipeline_parallel_size: int | None = Field(
        default=None, ge=1, le=1024, description="Groups of ranks that share the layers between them."
    )
    data_parallel_size: int | None = Field(
        default=None, ge=1, le=1024, description="Copies of the engine, each with device and host memory of its own."
    )
    enable_prefix_caching: bool | None = Field(
        default=None, description="Whether the engine keeps finished prompts in G1 for reuse; left out, it does."
    )
    disable_hybrid_kv_cache_manager: bool | None = Field(
        default=None, description="Whether layers with a sliding window keep all their tokens, as the others do."
    )
    served_model_name: Names | None = Field(default=None, description="Model name in the API, or a list of them.")
    shutdown_timeout: int | None = Field(
        default=None,
        ge=MIN_SHUTDOWN_TIMEOUT_S,
        le=MAX_SHUTDOWN_TIMEOUT_S,
        description="Seconds in which the engine finishes what it serves when it is told to stop; left out, 10.",
    )
    kv_transfer_config: dict[str, FlagValue] | None = Field(
        default=None,
        description="Entries that are added to the connector's configuration, such as `kv_role` or `engine_id`.",
    )


class EngineSection(Section):
    """What every kind of engine has."""

    kind: str = Field(description="Which engine serves the model.")
    model: str = Field(min_length=1, description="The model; what it may be depends on the engine.")
    python: str | None = Field(
        default=None, min_length=1, description="Interpreter that runs the engine; left out, the one that runs `kvbm`."
    )
    arguments: Any
    environment: dict[VariableName, EnvironmentValue] = Field(
        default={}, description="Variables that the engine gets in addition to those of the caller."
    )


class EmbeddedEngine(EngineSection):
    kind: Literal["embedded"] = Field(default="embedded", description="Which engine serves the model.")
    model: str = Field(
        min_length=1,
        description="`synthetic:tiny`, `synthetic:small` or `synthetic:8b` (random weights, no download), or a local "
        "Hugging Face directory.",
    )
    arguments: EmbeddedArguments = Field(default=EmbeddedArguments(), description="Flags of the engine.")


class VllmEngine(EngineSection):
    kind: Literal["vllm"] = Field(description="Which engine serves the model.")
    model: str = Field(
        min_length=1,
        description="A local Hugging Face directory, a name on the Hugging Face hub, or `synthetic:vllm-25m` or "
        "`synthetic:vllm-81m` (random weights, made on the spot).",
    )
    arguments: VllmArguments = Field(default=VllmArguments(), description="Flags of `vllm serve`.")


def _kind_of(engine: object) -> str:
    """The tag that pydantic reads an engine by. What is no kind is read as embedded, whose `kind` then refuses it."""
    kind = engine.get("kind") if isinstance(engine, dict) else getattr(engine, "kind", None)
    return kind if kind in ENGINE_KINDS else ENGINE_KINDS[0]


AnyEngine = Annotated[
    Annotated[EmbeddedEngine, Tag("embedded")] | Annotated[VllmEngine, Tag("vllm")], Discriminator(_kind_of)
]
