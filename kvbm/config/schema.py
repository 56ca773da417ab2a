"""The profile: every key that exists, its type, its default and what it means, in one place.

A `Profile` is frozen and complete; `load.py` makes one from files, variables and overrides, and an engine process
restores the same one with `Profile.model_validate_json(profile.model_dump_json())`. Descriptions are written for users:
the reference page and the error messages are made from them. Values are strict: a number in quotes is not a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from pydantic.fields import FieldInfo

from kvbm.config.sizes import exact_size, parse_size


def _size(value: object) -> object:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"needs a unit: `{value}GB` or `{value}GiB`")
    raise ValueError("must be a size such as 100GB or 64GiB")


def _written_size(byte_count: int | None) -> str | None:
    return None if byte_count is None else exact_size(byte_count)


def _port(value: object) -> object:
    return 0 if value == "auto" else value


def _environment_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be text: an environment knows no booleans; write `'{str(value).lower()}'` or `'1'`")
    return str(value) if isinstance(value, int | float) else value


Size = Annotated[int, BeforeValidator(_size), PlainSerializer(_written_size)]
Port = Annotated[int, BeforeValidator(_port), Field(ge=0, le=65535)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvironmentValue = Annotated[str, BeforeValidator(_environment_value)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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


class Engine(Section):
    kind: Literal["embedded"] = Field(default="embedded", description="Which engine serves the model.")
    model: str = Field(
        min_length=1,
        description="`synthetic:tiny`, `synthetic:small` or `synthetic:8b` (random weights, no download), or a local "
        "Hugging Face directory.",
    )
    python: str | None = Field(
        default=None, min_length=1, description="Interpreter that runs the engine; left out, the one that runs `kvbm`."
    )
    arguments: EmbeddedArguments = Field(default=EmbeddedArguments(), description="Flags of the engine.")
    environment: dict[VariableName, EnvironmentValue] = Field(
        default={}, description="Variables that the engine gets in addition to those of the caller."
    )


class HostTier(Section):
    """G2. One of the two keys is needed; where both are given, `blocks` wins."""

    capacity: Size | None = Field(
        default=None, description="Host memory for blocks (G2), summed over the ranks of one engine: 100GB or 64GiB."
    )
    blocks: int | None = Field(
        default=None, ge=1, le=2**40, description="Host memory as a number of blocks; wins over `capacity`."
    )

    @model_validator(mode="after")
    def _has_a_size(self) -> HostTier:
        if self.capacity is None and self.blocks is None:
            raise ValueError("needs `capacity` or `blocks`")
        return self


class Tiers(Section):
    host: HostTier = Field(description="Host memory (G2).")


class Offload(Section):
    generated: bool = Field(
        default=True, description="Whether blocks of generated tokens are offloaded, beside those of prompts."
    )


class Transfer(Section):
    max_concurrent: int = Field(
        default=4, ge=1, le=64, description="Transfers between G1 and G2 that run at the same time, per rank."
    )
    batch_blocks: int = Field(default=16, ge=1, le=65536, description="Blocks that one offload transfer moves at most.")
    init_timeout_s: float = Field(
        default=600.0, gt=0, allow_inf_nan=False, description="Seconds that the engine may take until it is healthy."
    )


class Server(Section):
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the engine's server listens on.")
    port: Port = Field(default=8000, description="Port of the engine's server; `0` or `auto` chooses a free one.")


class Bench(Section):
    workload: str | None = Field(
        default=None, min_length=1, description="Workload of `kvbm bench`: a shipped one by name, or a file."
    )


class Profile(Section):
    description: str = Field(default="", description="One line for `kvbm profile list`.")
    engine: Engine = Field(description="The engine that is launched.")
    tiers: Tiers = Field(description="Where blocks are kept when device memory (G1) has no room for them.")
    offload: Offload = Field(default=Offload(), description="Which blocks are copied away from device memory.")
    transfer: Transfer = Field(default=Transfer(), description="How blocks are copied.")
    server: Server = Field(default=Server(), description="Where the engine serves.")
    bench: Bench = Field(default=Bench(), description="Defaults of `kvbm bench`.")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a schema. `path` is dotted; a section has keys below it and no default of its own."""

    path: str
    description: str
    kind: str
    default: object
    is_section: bool
    is_required: bool


def keys(model: type[BaseModel] = Profile) -> tuple[Key, ...]:
    """Every key in the order of the schema, each section before what it holds."""
    return tuple(_walk(model, ""))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = _section_of(field)
        path = f"{prefix}{name}"
        required = field.is_required()
        default = None if required else field.default
        yield Key(path, field.description or "", _kind(field, section), default, section is not None, required)
        if section is not None:
            yield from _walk(section, f"{path}.")


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation: Any = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def _kind(field: FieldInfo, section: type[BaseModel] | None) -> str:
    if section is not None:
        return "section"
    annotation: Any = field.annotation
    candidates = [annotation, *get_args(annotation)]
    if any(_size in _validators(candidate) for candidate in [field, *candidates]):
        return "size"
    if _port in _validators(field):
        return "port"
    if str(annotation).startswith("dict"):
        return "names to text"
    if str(annotation).startswith("typing.Literal"):
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    return next(_KINDS[candidate] for candidate in candidates if candidate in _KINDS)


def _validators(holder: Any) -> list[object]:
    metadata: Any = getattr(holder, "metadata", None) or getattr(holder, "__metadata__", ())
    return [entry.func for entry in metadata if isinstance(entry, BeforeValidator)]
