"""Schema of a profile: every key with its type, default and description.

A `Profile` is frozen and complete. `load.py` makes one from files, variables and overrides; an engine process restores
it with `Profile.model_validate_json(profile.model_dump_json())`. The descriptions are written for users: the reference
page and `kvbm profile schema` show them. Values are strict: a number in quotes is not a number. Keys below `engine` are
in `engine.py`. `kvbm/engines/opening.py` passes the keys of a lower tier on to it.
"""

from __future__ import annotations

import hashlib
import os
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from kvbm.config.engine import ENGINE_KINDS, ENGINES, FIRST_KIND, EngineSection, kinds_that
from kvbm.config.values import AUTO, AbsolutePath, AutoSize, Port, Seconds, Section, SharedUrl, WrongKey
from kvbm.errors import ProfileError


class SizedTier(Section):
    """A tier with a size: `capacity` or `blocks` is required; `blocks` has priority."""

    capacity: AutoSize | None = None
    blocks: int | None = None

    @property
    def is_auto(self) -> bool:
        """Whether kvbm chooses the size when it starts the engine."""
        return self.capacity == AUTO and self.blocks is None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of `capacity`, None without one. ProfileError as `require_a_size`."""
        self.require_a_size()
        return None if self.capacity == AUTO else self.capacity

    def require_a_size(self) -> None:
        """ProfileError for `auto`, in place of which `kvbm serve` gives a size to the engine."""
        if self.is_auto:
            raise ProfileError(
                "`capacity: auto` requires `kvbm serve`, `kvbm bench` or `kvbm try`, which choose the size before they "
                "start the engine",
                hint="set a size, such as `64GiB`",
            )

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        if self.capacity is None and self.blocks is None:
            raise ValueError("requires `capacity` or `blocks`")
        return self


class HostTierSection(SizedTier):
    """G2."""

    capacity: AutoSize | None = Field(
        default=None,
        description="Host memory for blocks (G2), summed over the ranks of one engine, such as 64GiB; `auto`: what "
        "this machine can spare when the engine starts.",
    )
    blocks: int | None = Field(
        default=None, ge=1, le=2**40, description="Host memory as a number of blocks; overrides `capacity`."
    )
    eviction: Literal["lru", "adaptive"] = Field(
        default="adaptive",
        description="Which blocks leave a full host memory: the least recently used ones (`lru`), or those that the "
        "requests so far show to be the least useful (`adaptive`). Models with several KV cache groups or with states, "
        f"{kinds_that(lambda form: form.keeps_host_memory)}, and all tiers below vLLM's own offloading "
        "(`managed_by: engine`), always use `lru`.",
    )
    managed_by: Literal["kvbm", "engine"] = Field(
        default="kvbm",
        description="Who copies blocks to host memory and back: kvbm's connector, or with `engine` vLLM's own "
        "offloading, with kvbm's lower tiers below it (docs/guide/vllm-offloading.md).",
    )


class DiskTierSection(SizedTier):
    """G3."""

    capacity: AutoSize | None = Field(
        default=None,
        description="Disk space for blocks (G3), summed over the ranks of one engine, such as 500GiB; `auto`: the size "
        "of the engine's cache if it exists, otherwise the free space.",
    )
    blocks: int | None = Field(
        default=None, ge=1, le=2**40, description="Disk space as a number of blocks; overrides `capacity`."
    )
    eviction: Literal["lru", "adaptive"] = Field(
        default="adaptive", description="Which blocks leave a full disk, like `tiers.host.eviction`."
    )
    directory: AbsolutePath = Field(
        default="~/.cache/kvbm",
        description="Directory of the cache files: absolute, or starting with `~`. Several engines may share it.",
    )
    allocator: Literal["default", "open-direct"] = Field(
        default="default",
        description="How O_DIRECT is set: `default` by fcntl after the file was created, `open-direct` at open, for "
        "filesystems that ignore fcntl.",
    )
    zerofill: bool = Field(
        default=False,
        description="Whether to allocate space by writing zeros if the filesystem does not support fallocate.",
    )
    o_direct: bool = Field(
        default=True, description="Whether to bypass the page cache, which would hold a second copy of every block."
    )
    io: Literal["threads", "nixl", "gds", "auto"] = Field(
        default="threads",
        description="I/O implementation: threads of kvbm, NIXL, NIXL with GPUDirect Storage, or `auto`, which "
        "benchmarks `threads` and `nixl` at start-up and uses the faster one.",
    )
    threads: int = Field(
        default=4, ge=1, le=64, description="Maximum number of parallel reads, and of parallel writes."
    )
    persist: bool = Field(
        default=True,
        description="Whether blocks are kept after the engine exits, for the next engine with the same model.",
    )
    drain_s: Seconds = Field(
        default=10.0,
        ge=0,
        description="Seconds in which a stopping engine may write blocks to disk that are only in host memory.",
    )
    reclaim: bool = Field(
        default=False, description="Whether kvbm may delete the oldest unused caches in the directory to make room."
    )
    fit: bool = Field(
        default=False,
        description="Whether an existing cache keeps its size, and a new one takes less than `capacity` if less is "
        "free, with `reclaim` after removing unused caches. `capacity: auto` sets it.",
    )


class SharedTierSection(Section):
    """G4."""

    url: SharedUrl = Field(
        description="Where objects are stored: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, "
        "`file:///directory` or `mooncake://host:port`. Credentials come from the environment, never from the profile.",
    )
    protection: Literal["none", "hmac", "aes-gcm"] = Field(
        default="none",
        description="How objects are protected against others who may write to the store: `hmac` proves that an engine "
        "with the same secret wrote them, `aes-gcm` encrypts them as well.",
    )
    key_file: AbsolutePath | None = Field(
        default=None,
        description="File with the secret of `protection`. By default, the variable `KVBM_SHARED_KEY` has the secret.",
    )
    expire_days: float = Field(
        default=0.0,
        ge=0,
        le=36500,
        allow_inf_nan=False,
        description="Days after which a rule of the store deletes objects, 0 if none does. An object that is read in "
        "the second half of this time is written again.",
    )
    write: bool = Field(default=True, description="Whether this engine writes objects, or only reads those of others.")
    requests: int = Field(
        default=16,
        ge=1,
        le=256,
        description="Maximum number of parallel requests to the store; with Mooncake, of objects in one call.",
    )
    drain_s: Seconds = Field(
        default=10.0,
        ge=0,
        description="Seconds in which a stopping engine may write objects that are due.",
    )

    def resolved_url(self) -> str:
        """Return the URL with the user's home in place of `~`."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{os.path.expanduser(rest)}" if scheme == "file" else self.url


BOUNCE_BLOCKS = 64
SHARED_BUFFER_BYTES = 512 << 20  # 2 GB/s, if a block waits for 0.25 s until the shared store has it
SHARED_BUFFER_BLOCKS = 4096  # at most


class Tiers(Section):
    host: HostTierSection | None = Field(default=None, description="Host memory (G2).")
    disk: DiskTierSection | None = Field(default=None, description="Disk (G3).")
    shared: SharedTierSection | None = Field(
        default=None, description="Store that engines share (G4): an object store, a mounted directory, or Mooncake."
    )

    @property
    def drain_s(self) -> float:
        """Return the time in which a stopping engine may write to lower tiers."""
        return sum(tier.drain_s for tier in (self.disk, self.shared) if tier is not None)

    @property
    def has_auto(self) -> bool:
        """Whether kvbm chooses the size of a tier when it starts the engine."""
        return any(tier is not None and tier.is_auto for tier in (self.host, self.disk))

    @property
    def has_lower(self) -> bool:
        """Whether there is a tier below host memory."""
        return self.disk is not None or self.shared is not None

    @property
    def are_below_engine(self) -> bool:
        """Whether host memory is the engine's, and kvbm has only the tiers below it."""
        return self.host is not None and self.host.managed_by == "engine"

    @property
    def outlive_engine(self) -> bool:
        """Whether blocks are kept for engines that start later."""
        return self.shared is not None or (self.disk is not None and self.disk.persist)

    @model_validator(mode="after")
    def _has_one(self) -> Tiers:
        if self.host is None and self.disk is None:
            raise ValueError("requires `host`, `disk` or both")
        return self

    @property
    def knows_uses(self) -> bool:
        """Whether host memory knows which blocks were used before."""
        return self.host is not None and self.host.eviction == "adaptive"

    def host_memory(self) -> HostTierSection:
        """Return G2, or a small buffer for the transfers of the disk tier if there is no host tier."""
        return self.host or HostTierSection(blocks=BOUNCE_BLOCKS)

    def buffer_blocks(self, block_bytes: int) -> int:
        """Return the blocks of the buffer below an engine with host memory of its own: they stay in it until a shared
        store has them. `block_bytes` is the size of a block over all ranks."""
        stay = 0 if self.shared is None else min(SHARED_BUFFER_BLOCKS, SHARED_BUFFER_BYTES // block_bytes)
        return max(BOUNCE_BLOCKS, stay)

    def memory_below_engine(self, block_bytes: int) -> HostTierSection:
        """Return G2 below an engine with host memory of its own: the host tier of kvbm, or else a buffer."""
        if self.host is not None and (self.shared is None or not self.are_below_engine):
            return self.host
        given = 0 if self.host is None else self.host.blocks or (self.host.capacity_bytes or 0) // block_bytes
        return HostTierSection(blocks=max(given, self.buffer_blocks(block_bytes)))


class OffloadSection(Section):
    generated: bool = Field(
        default=True, description="Whether blocks of generated tokens are offloaded too, not only those of prompts."
    )
    min_priority: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Minimum priority: blocks of a prompt are offloaded up to the first block with a lower priority. "
        "Only for engines that send priorities.",
    )
    to_host: Literal["auto", "always", "second_hit", "on_evict"] = Field(
        default="auto",
        description="Which computed blocks are copied to host memory: all (`always`), those of chains that were used "
        "before (`second_hit`), those that the engine is about to evict from device memory (`on_evict`, only vLLM), or "
        "those that host memory would keep (`auto`). Without `eviction: adaptive`, and if a lower tier takes every "
        "block, `auto` copies all. With vLLM and host memory of less than 20 times the blocks of device memory, `auto` "
        "is `on_evict` once host memory is full.",
    )
    to_disk: Literal["frequency", "always", "on_evict"] = Field(
        default="frequency",
        description="Which blocks in host memory are written to disk: those used often enough (`frequency`), all "
        "immediately (`always`), or only those about to be evicted (`on_evict`).",
    )
    to_shared: Literal["frequency", "always"] = Field(
        default="frequency",
        description="Which blocks in host memory are written to the shared tier at the end of a request: those used by "
        "enough requests (`frequency`), or all (`always`).",
    )
    frequency_threshold: int = Field(
        default=2,
        ge=1,
        le=1 << 20,
        description="Count at which `frequency` writes a block. It is 1 for a new block, and each hit doubles it.",
    )
    frequency_decay_s: Seconds = Field(
        default=600.0,
        gt=0,
        description="Interval in seconds at which every count is decreased by 1.",
    )
    frequency_entries: int = Field(
        default=1_000_000,
        ge=1,
        le=2**32,
        description="Maximum number of blocks that are counted; the least recently used one is dropped.",
    )

    def require_engine(self, kind: str) -> None:
        """WrongKey for a setting that requires what this kind of engine does not say.

        With a threshold and an engine that sends no priorities, nothing would be offloaded.
        """
        if self.min_priority > 0 and not ENGINES[kind].sends_priorities:
            message = f"requires an engine that sends priorities, but `{kind}` sends none; remove it"
            raise WrongKey("min_priority", message)
        if self.to_host == "on_evict" and not ENGINES[kind].shows_evictions:
            able = kinds_that(lambda form: form.shows_evictions)
            message = f"`on_evict` requires {able}: `{kind}` does not say which blocks it evicts next"
            raise WrongKey("to_host", message)

    def require_tiers(self, tiers: Tiers) -> None:
        """WrongKey for a setting that these tiers cannot follow."""
        if self.to_host == "second_hit" and not tiers.knows_uses:
            raise WrongKey("to_host", "`second_hit` requires `tiers.host.eviction: adaptive`, which knows earlier uses")
        if self.to_host == "on_evict" and tiers.host is None:
            raise WrongKey("to_host", "`on_evict` requires `tiers.host`: without it, host memory is only a buffer")
        if self.to_host == "on_evict" and tiers.shared is not None and tiers.shared.write:
            message = (
                "`on_evict` requires `tiers.shared.write: false`: the store takes the blocks of a request at its end"
            )
            raise WrongKey("to_host", message)


class OnboardSection(Section):
    policy: Literal["auto", "always"] = Field(
        default="auto",
        description="When blocks on disk or in the shared tier are read: `always`, or with `auto` if reading is "
        "predicted to be faster than recomputing.",
    )
    disk_timeout_s: Seconds = Field(
        default=30.0,
        gt=0,
        description="Seconds after which a request stops waiting for the disk or the shared tier and recomputes the "
        "blocks.",
    )


class TransferSection(Section):
    max_concurrent: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Maximum number of parallel transfers between G1 and G2, per rank. On a GPU it is 2 at most.",
    )
    batch_blocks: int = Field(
        default=16, ge=1, le=65536, description="Maximum number of blocks in one transfer between host memory and disk."
    )
    init_timeout_s: Seconds = Field(
        default=600.0,
        gt=0,
        description="Seconds that the engine may take to become healthy.",
    )
    numa: bool = Field(
        default=True,
        description="Whether the host memory of a rank is allocated on the NUMA node of its GPU, if there are several "
        "nodes.",
    )
    share_equal_kv: bool = Field(
        default=True,
        description="Whether ranks with equal KV keep one copy in host memory and on disk: with latent attention "
        "(MLA), or fewer KV heads than ranks. vLLM only.",
    )


class MetricsSection(Section):
    """The engine's server always serves the kvbm_* metrics at `/metrics`."""

    serve: bool = Field(
        default=False,
        description="Whether the kvbm_* metrics are also served on a separate port, besides the engine's `/metrics`.",
    )
    host: str | None = Field(
        default=None, min_length=1, description="Address of the metrics server; by default `server.host`."
    )
    port: Port = Field(
        default=6880, description="Port of the metrics server; `0` or `auto` chooses a free port, which is logged."
    )
    control_token_file: AbsolutePath | None = Field(
        default=None,
        description="File with a token: who sends it may list and clear the cache by `POST /control` on the metrics "
        "port. An absolute path, or one that starts with `~`.",
    )
    spans_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="OTLP/HTTP address, such as `http://127.0.0.1:4318/v1/traces`, that receives OpenTelemetry spans "
        "of each request; requires `pip install 'kvbm-cli[spans]'`. Not for "
        f"{kinds_that(lambda form: form.keeps_host_memory)}.",
    )
    nvtx: bool = Field(
        default=False,
        description="Whether hooks of the connector and copies open NVTX ranges, for NVIDIA's profilers; vLLM only, "
        "requires `pip install nvtx`.",
    )
    capacities: bool = Field(
        default=False,
        description="Whether the hit rates that host memory of other sizes would have are measured, for "
        "`kvbm plan RUN`; takes up to a tenth of a core. Not for "
        f"{kinds_that(lambda form: form.keeps_host_memory)}, nor for models with several KV cache groups.",
    )
    window_requests: int = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        description="Number of recent finished requests over which the hit rates are computed.",
    )
    log_interval_s: float = Field(
        default=5.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Interval in seconds at which hit rates are logged, if a request has finished; 0 disables it.",
    )
    record: bool = Field(
        default=False,
        description="Whether every decision about blocks is recorded as JSON lines in a file, without prompts.",
    )
    record_directory: AbsolutePath = Field(
        default="~/.local/state/kvbm",
        description="Directory of the recordings: an absolute path, or one that starts with `~`.",
    )


class EventsSection(Section):
    """KV events, which report cached blocks to a router. The engine publishes them if its own setting enables them."""

    repeat_s: Seconds = Field(
        default=0.0,
        ge=0,
        description="Interval in seconds at which all present blocks are announced again, for routers that connect "
        "late; 0 disables it.",
    )


class ServerSection(Section):
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the engine's server listens on.")
    port: Port = Field(default=8000, description="Port of the engine's server; `0` or `auto` chooses a free port.")


class Bench(Section):
    workload: str | None = Field(
        default=None,
        min_length=1,
        description="Workload of `kvbm bench`: name of a shipped workload, or path to a file.",
    )


class Disaggregated(Section):
    prefill: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Number of prefill engines, each with its own host memory (G2); 0 for one engine that does both.",
    )
    decode: int = Field(default=0, ge=0, le=64, description="Number of decode engines.")

    @model_validator(mode="after")
    def _has_both_kinds(self) -> Disaggregated:
        if (self.prefill == 0) != (self.decode == 0):
            raise ValueError("requires engines of both kinds: set `prefill` and `decode`")
        return self

    @property
    def is_enabled(self) -> bool:
        return self.prefill > 0


# Sections that both a profile and the configuration of a connector have.
_TIERS: Any = Field(description="Tiers below device memory (G1) that store blocks.")
_OFFLOAD: Any = Field(
    default=OffloadSection(), description="Which blocks are copied from device memory to lower tiers."
)
_ONBOARD: Any = Field(default=OnboardSection(), description="Which blocks are copied back to device memory.")
_TRANSFER: Any = Field(default=TransferSection(), description="How blocks are transferred.")
_METRICS: Any = Field(default=MetricsSection(), description="Cache metrics and logging.")
_EVENTS: Any = Field(default=EventsSection(), description="KV events for routers.")


class ConnectorConfig(Section):
    """The part of a profile that the connector inside an engine receives."""

    tiers: Tiers = _TIERS
    offload: OffloadSection = _OFFLOAD
    onboard: OnboardSection = _ONBOARD
    transfer: TransferSection = _TRANSFER
    metrics: MetricsSection = _METRICS
    events: EventsSection = _EVENTS

    @field_validator("offload")
    @classmethod
    def _fits_tiers(cls, offload: OffloadSection, info: ValidationInfo) -> OffloadSection:
        if (tiers := info.data.get("tiers")) is not None:
            offload.require_tiers(tiers)
        return offload

    def digest(self) -> str:
        """Digest that is equal in two processes exactly if their configurations are equal."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def _kind_of(engine: object) -> str:
    """Return the tag by which pydantic chooses the model."""
    kind = engine.get("kind") if isinstance(engine, dict) else getattr(engine, "kind", None)
    return kind if isinstance(kind, str) and kind in ENGINE_KINDS else FIRST_KIND


if TYPE_CHECKING:
    AnyEngine = EngineSection
else:
    _TAGGED = (Annotated[form, Tag(kind)] for kind, form in ENGINES.items())
    AnyEngine = Annotated[reduce(or_, _TAGGED), Discriminator(_kind_of)]


def _below_offloading(tiers: Tiers, engine: EngineSection | None) -> Tiers:
    """Return the tiers with vLLM's eviction. WrongKey for what `tiers.host.managed_by: engine` excludes."""
    host = tiers.host
    assert host is not None, "these tiers are below the engine's host memory"
    if engine is not None and not engine.offloads:
        able = kinds_that(lambda form: form.offloads)
        raise WrongKey("host", f"`managed_by: engine` requires {able}; `{engine.kind}` has no offloading of its own")
    if not tiers.has_lower:
        raise WrongKey("host", "`managed_by: engine` requires `tiers.disk` or `tiers.shared`, which kvbm adds below it")
    if host.blocks is not None:
        raise WrongKey("host", "`managed_by: engine` requires `capacity` in place of `blocks`: vLLM takes bytes")
    if "eviction" in host.model_fields_set and host.eviction != "lru":
        raise WrongKey(
            "host", "`managed_by: engine` requires `eviction: lru`: vLLM evicts the blocks of its host memory"
        )
    return tiers.model_copy(update={"host": host.model_copy(update={"eviction": "lru"})})


class Profile(Section):
    description: str = Field(default="", description="One-line description for `kvbm profile list`.")
    engine: AnyEngine = Field(description="Engine to start.")
    tiers: Tiers = _TIERS
    offload: OffloadSection = _OFFLOAD
    onboard: OnboardSection = _ONBOARD
    transfer: TransferSection = _TRANSFER
    server: ServerSection = Field(default=ServerSection(), description="Address and port of the engine's server.")
    metrics: MetricsSection = _METRICS
    events: EventsSection = _EVENTS
    disaggregated: Disaggregated = Field(
        default=Disaggregated(),
        description="Disaggregated prefill: separate engines for prefill and decode behind one address.",
    )
    bench: Bench = Field(default=Bench(), description="Defaults for `kvbm bench`.")

    @field_validator("tiers")
    @classmethod
    def _fits_engine(cls, tiers: Tiers, info: ValidationInfo) -> Tiers:
        engine = info.data.get("engine")
        if engine is not None:
            engine.require_tiers(has_host=tiers.host is not None, has_lower=tiers.has_lower)
        return _below_offloading(tiers, engine) if tiers.are_below_engine else tiers

    @field_validator("offload")
    @classmethod
    def _fits_engine_and_tiers(cls, offload: OffloadSection, info: ValidationInfo) -> OffloadSection:
        engine, tiers = info.data.get("engine"), info.data.get("tiers")
        if engine is not None:
            offload.require_engine(engine.kind)
        if tiers is not None:
            offload.require_tiers(tiers)
            if tiers.are_below_engine and "to_host" in offload.model_fields_set:
                message = (
                    "has no effect with `tiers.host.managed_by: engine`: vLLM copies all blocks at once; remove it"
                )
                raise WrongKey("to_host", message)
        return offload

    @field_validator("disaggregated")
    @classmethod
    def _transfers_blocks(cls, disaggregated: Disaggregated, info: ValidationInfo) -> Disaggregated:
        engine = info.data.get("engine")
        if not disaggregated.is_enabled or engine is None:
            return disaggregated
        if not engine.transfers_blocks:
            able = kinds_that(lambda form: form.transfers_blocks)
            raise ValueError(
                f"requires `engine.kind` {able}, which can transfer the blocks of a request to another engine"
            )
        engine.require_one_copy()
        return disaggregated

    @field_validator("metrics")
    @classmethod
    def _has_a_port_of_its_own(cls, metrics: MetricsSection, info: ValidationInfo) -> MetricsSection:
        server = info.data.get("server")
        if metrics.serve and server is not None and metrics.port == server.port != 0:
            raise WrongKey("port", "must differ from `server.port`")
        return metrics

    def connector_config(self) -> ConnectorConfig:
        metrics = self.metrics.model_copy(update={"host": self.metrics.host or self.server.host})
        rest = {name: getattr(self, name) for name in ConnectorConfig.model_fields}
        if self.tiers.are_below_engine:
            buffer = None
            if self.tiers.disk is None:
                buffer = HostTierSection(blocks=BOUNCE_BLOCKS, managed_by="engine")
            rest["tiers"] = self.tiers.model_copy(update={"host": buffer})
        return ConnectorConfig(**{**rest, "metrics": metrics})


# Keys and sections whose text may contain `${NAME}`; see interpolation.py. Of the paths among them,
# `engine.model`, `engine.python` and `bench.workload` may be relative (relative_paths.py); the others are absolute.
INTERPOLATED = (
    "engine.model",
    "engine.python",
    "engine.environment",
    "tiers.disk.directory",
    "tiers.shared.url",
    "tiers.shared.key_file",
    "metrics.record_directory",
    "bench.workload",
)
