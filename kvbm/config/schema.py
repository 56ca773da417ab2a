"""The profile: every key that exists, its type, its default and what it means, in one place.

A `Profile` is frozen and complete; `load.py` makes one from files, variables and overrides, and an engine process
restores the same one with `Profile.model_validate_json(profile.model_dump_json())`. Descriptions are written for users:
the reference page and the error messages are made from them. Values are strict: a number in quotes is not a number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from kvbm.config.engine import ENGINE_KINDS, AnyEngine
from kvbm.config.values import (
    Port,
    Section,
    Size,
    WrongKey,
    absolute,
    count_value,
    environment_value,
    length_value,
    names_value,
    port_value,
    size_value,
)


class HostTierSection(Section):
    """G2. One of the two keys is needed; where both are given, `blocks` wins."""

    capacity: Size | None = Field(
        default=None, description="Host memory for blocks (G2), summed over the ranks of one engine: 100GB or 64GiB."
    )
    blocks: int | None = Field(
        default=None, ge=1, le=2**40, description="Host memory as a number of blocks; wins over `capacity`."
    )

    @model_validator(mode="after")
    def _has_a_size(self) -> HostTierSection:
        if self.capacity is None and self.blocks is None:
            raise ValueError("needs `capacity` or `blocks`")
        return self


class DiskTierSection(Section):
    """G3. `capacity` or `blocks` is needed; where both are given, `blocks` wins."""

    capacity: Size | None = Field(
        default=None, description="Disk space for blocks (G3), summed over the ranks of one engine: 1TB or 500GiB."
    )
    blocks: int | None = Field(
        default=None, ge=1, le=2**40, description="Disk space as a number of blocks; wins over `capacity`."
    )
    directory: str = Field(
        default="~/.cache/kvbm",
        min_length=1,
        description="Directory of the cache files, absolute or from `~`; several engines may share it.",
    )
    allocator: Literal["default", "open-direct"] = Field(
        default="default",
        description="When O_DIRECT is set: by fcntl after the file was created, or at open, for filesystems that "
        "ignore the former.",
    )
    zerofill: bool = Field(
        default=False, description="Whether the space is taken by writing zeros where fallocate is not supported."
    )
    o_direct: bool = Field(
        default=True, description="Whether to pass by the page cache, which would hold every block a second time."
    )
    io: Literal["threads", "nixl", "gds", "auto"] = Field(
        default="threads",
        description="Who reads and writes: threads of ours, NIXL, NIXL's plugin for GPUDirect Storage, or what a probe "
        "finds faster of the first two.",
    )
    threads: int = Field(default=4, ge=1, le=64, description="Reads that are in flight at the same time; and writes.")
    persist: bool = Field(
        default=True, description="Whether the blocks outlive the engine, for the next one with the same model."
    )
    drain_s: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that the engine may take at its end to write to disk what only host memory has.",
    )
    reclaim: bool = Field(
        default=False,
        description="Whether the oldest caches that no engine uses may be deleted from the directory to make room.",
    )

    @field_validator("directory")
    @classmethod
    def _is_absolute(cls, directory: str) -> str:
        return absolute(directory)

    @model_validator(mode="after")
    def _has_a_size(self) -> DiskTierSection:
        if self.capacity is None and self.blocks is None:
            raise ValueError("needs `capacity` or `blocks`")
        return self


BOUNCE_BLOCKS = 64


class Tiers(Section):
    host: HostTierSection | None = Field(default=None, description="Host memory (G2).")
    disk: DiskTierSection | None = Field(default=None, description="Disk (G3).")

    @model_validator(mode="after")
    def _has_one(self) -> Tiers:
        if self.host is None and self.disk is None:
            raise ValueError("needs `host`, `disk` or both")
        return self

    def host_memory(self) -> HostTierSection:
        """G2, or what stands in for it where there is only a disk: a buffer through which blocks pass."""
        return self.host or HostTierSection(blocks=BOUNCE_BLOCKS)


class OffloadSection(Section):
    generated: bool = Field(
        default=True, description="Whether blocks of generated tokens are offloaded, beside those of prompts."
    )
    min_priority: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Blocks of a prompt are offloaded up to the first whose priority is lower; for engines that send "
        "priorities.",
    )
    to_disk: Literal["frequency", "always", "on_evict"] = Field(
        default="frequency",
        description="Which blocks of host memory go to disk: those asked for again, all at once, or the ones that are "
        "about to be evicted.",
    )
    frequency_threshold: int = Field(
        default=2, ge=1, le=1 << 20, description="Count at which `to_disk: frequency` lets a block through."
    )
    frequency_decay_s: float = Field(
        default=600.0, gt=0, allow_inf_nan=False, description="Seconds after which every count loses 1."
    )
    frequency_entries: int = Field(
        default=1_000_000,
        ge=1,
        le=2**32,
        description="Blocks that are counted; of more, the one not asked for longest is forgotten.",
    )

    def require_priorities_from(self, engine: str) -> None:
        """WrongKey where the threshold would leave out every block, since the engine sends no priorities."""
        if self.min_priority > 0:
            message = f"needs an engine that sends priorities; `{engine}` sends none: leave it out"
            raise WrongKey("min_priority", message)


class OnboardSection(Section):
    policy: Literal["auto", "always"] = Field(
        default="auto",
        description="Whether blocks on disk are read only where that is predicted to be faster than computing them.",
    )
    disk_timeout_s: float = Field(
        default=30.0, gt=0, allow_inf_nan=False, description="Seconds after which a request computes what it waits for."
    )


class TransferSection(Section):
    max_concurrent: int = Field(
        default=4, ge=1, le=64, description="Transfers between G1 and G2 that run at the same time, per rank."
    )
    batch_blocks: int = Field(default=16, ge=1, le=65536, description="Blocks that one offload transfer moves at most.")
    init_timeout_s: float = Field(
        default=600.0, gt=0, allow_inf_nan=False, description="Seconds that the engine may take until it is healthy."
    )
    numa: bool = Field(
        default=True,
        description="Whether the host memory of a rank is taken from the NUMA node of its GPU, where there are several "
        "nodes.",
    )


class MetricsSection(Section):
    """The kvbm_* series are at `/metrics` of the engine's own server in any case."""

    serve: bool = Field(
        default=False,
        description="Whether the kvbm_* series are served on a port of their own too, beside the engine's `/metrics`.",
    )
    host: str | None = Field(
        default=None, min_length=1, description="Address of that port; without it the one of `server.host`."
    )
    port: Port = Field(default=6880, description="That port; `0` or `auto` chooses a free one, which the log names.")
    window_requests: int = Field(
        default=1000, ge=1, le=1_000_000, description="Finished requests that the hit rates are about."
    )
    log_interval_s: float = Field(
        default=5.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds between two lines of the log with the hit rates, if a request has ended; 0 for none.",
    )
    record: bool = Field(
        default=False,
        description="Whether every decision about blocks is written to a file, as JSON lines, without prompts.",
    )
    record_directory: str = Field(
        default="~/.local/state/kvbm",
        min_length=1,
        description="Directory of those files, absolute or from `~`; each engine makes one of its own.",
    )

    @field_validator("record_directory")
    @classmethod
    def _is_absolute(cls, directory: str) -> str:
        return absolute(directory)


class ServerSection(Section):
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the engine's server listens on.")
    port: Port = Field(default=8000, description="Port of the engine's server; `0` or `auto` chooses a free one.")


class Bench(Section):
    workload: str | None = Field(
        default=None, min_length=1, description="Workload of `kvbm bench`: a shipped one by name, or a file."
    )


class Disaggregated(Section):
    prefill: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Engines that only prefill, each with host memory (G2) of its own; 0 for one engine that does all.",
    )
    decode: int = Field(default=0, ge=0, le=64, description="Engines that decode what those have prefilled.")

    @model_validator(mode="after")
    def _has_both_kinds(self) -> Disaggregated:
        if (self.prefill == 0) != (self.decode == 0):
            raise ValueError("needs engines of both kinds: `prefill` and `decode`")
        return self

    @property
    def is_wanted(self) -> bool:
        return self.prefill > 0


class ConnectorConfig(Section):
    """What the connector inside an engine needs of a profile, and all that it gets."""

    tiers: Tiers = Field(description="Where blocks are kept when device memory (G1) has no room for them.")
    offload: OffloadSection = Field(
        default=OffloadSection(), description="Which blocks are copied away from device memory."
    )
    onboard: OnboardSection = Field(default=OnboardSection(), description="Which blocks are brought back.")
    transfer: TransferSection = Field(default=TransferSection(), description="How blocks are copied.")
    metrics: MetricsSection = Field(default=MetricsSection(), description="What is told of the cache, and where.")

    def digest(self) -> str:
        """Equal in two processes exactly if they were configured alike."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class Profile(Section):
    description: str = Field(default="", description="One line for `kvbm profile list`.")
    engine: AnyEngine = Field(description="The engine that is launched.")
    tiers: Tiers = Field(description="Where blocks are kept when device memory (G1) has no room for them.")
    offload: OffloadSection = Field(
        default=OffloadSection(), description="Which blocks are copied away from device memory."
    )
    onboard: OnboardSection = Field(default=OnboardSection(), description="Which blocks are brought back.")
    transfer: TransferSection = Field(default=TransferSection(), description="How blocks are copied.")
    server: ServerSection = Field(default=ServerSection(), description="Where the engine serves.")
    metrics: MetricsSection = Field(default=MetricsSection(), description="What is told of the cache, and where.")
    disaggregated: Disaggregated = Field(
        default=Disaggregated(), description="Engines that prefill and engines that decode, behind one address."
    )
    bench: Bench = Field(default=Bench(), description="Defaults of `kvbm bench`.")

    @field_validator("offload")
    @classmethod
    def _has_priorities(cls, offload: OffloadSection, info: ValidationInfo) -> OffloadSection:
        engine = info.data.get("engine")
        if engine is not None:
            offload.require_priorities_from(engine.kind)
        return offload

    @field_validator("disaggregated")
    @classmethod
    def _is_for_vllm(cls, disaggregated: Disaggregated, info: ValidationInfo) -> Disaggregated:
        engine = info.data.get("engine")
        if disaggregated.is_wanted and engine is not None and engine.kind != "vllm":
            raise ValueError("needs `engine.kind: vllm`, which can hand the blocks of a request to another engine")
        if disaggregated.is_wanted and engine is not None and engine.arguments.data_parallel_size not in (None, 1):
            raise ValueError("needs engines that are one each: leave `engine.arguments.data_parallel_size` out")
        return disaggregated

    @field_validator("metrics")
    @classmethod
    def _has_a_port_of_its_own(cls, metrics: MetricsSection, info: ValidationInfo) -> MetricsSection:
        server = info.data.get("server")
        if metrics.serve and server is not None and metrics.port == server.port != 0:
            raise WrongKey("port", "must not be the one of `server.port`")
        return metrics

    def connector_config(self) -> ConnectorConfig:
        metrics = self.metrics.model_copy(update={"host": self.metrics.host or self.server.host})
        return ConnectorConfig(
            tiers=self.tiers, offload=self.offload, onboard=self.onboard, transfer=self.transfer, metrics=metrics
        )


# Keys, and whole sections, whose text may hold `${NAME}`; see interpolation.py.
INTERPOLATED = (
    "engine.model",
    "engine.python",
    "engine.environment",
    "tiers.disk.directory",
    "metrics.record_directory",
    "bench.workload",
)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a schema. `path` is dotted; a section has keys below it and no default of its own."""

    path: str
    description: str
    kind: str
    default: object
    is_section: bool
    is_required: bool


def keys(model: type[BaseModel] = Profile, *, engine: str = ENGINE_KINDS[0]) -> tuple[Key, ...]:
    """Every key in the order of the schema, each section before what it holds; of a profile, with that engine's."""
    return tuple(_walk(model, "", engine))


def _walk(model: type[BaseModel], prefix: str, engine: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = _section_of(field, engine)
        path = f"{prefix}{name}"
        required = field.is_required()
        default = None if required else field.default
        yield Key(path, field.description or "", _kind(field, section), default, section is not None, required)
        if section is not None:
            yield from _walk(section, f"{path}.", engine)


def _section_of(field: FieldInfo, engine: str) -> type[BaseModel] | None:
    sections = [annotation for annotation in _alternatives(field.annotation) if _is_model(annotation)]
    if len(sections) > 1:
        sections = [section for section in sections if engine in get_args(section.model_fields["kind"].annotation)]
    return sections[0] if sections else None


def _alternatives(annotation: Any) -> list[Any]:
    """The types of a union without what `Annotated` adds to them, or the type itself."""
    return [getattr(one, "__origin__", one) for one in get_args(annotation) or (annotation,)]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_KINDS_BY_VALIDATOR = {
    size_value: "size",
    port_value: "port",
    count_value: "whole number or such as `32k`",
    length_value: "whole number, such as `32k`, or `auto`",
    names_value: "name or names",
    environment_value: "names to text",
}


def _kind(field: FieldInfo, section: type[BaseModel] | None) -> str:
    if section is not None:
        return "section"
    annotation: Any = field.annotation
    candidates = [annotation, *get_args(annotation)]
    for holder in [field, *candidates]:
        for validator in _validators(holder):
            if validator in _KINDS_BY_VALIDATOR:
                return _KINDS_BY_VALIDATOR[validator]
    for candidate in candidates:
        if str(candidate).startswith("dict"):
            return "mapping"
        if str(candidate).startswith("typing.Literal"):
            return " or ".join(f"`{choice}`" for choice in get_args(candidate))
    return next(_KINDS[candidate] for candidate in candidates if candidate in _KINDS)


def _validators(holder: Any) -> list[Any]:
    metadata: Any = getattr(holder, "metadata", None) or getattr(holder, "__metadata__", ())
    return [entry.func for entry in metadata if isinstance(entry, BeforeValidator)]
