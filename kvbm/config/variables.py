"""Variables of NVIDIA's block manager: which ones are supported, which have no effect here, and why.

The reference page is generated from the table. An unknown name that starts with `DYN_KVBM_` is an error, and so is an
invalid value; NVIDIA's block manager ignores both silently. A variable without effect causes a warning with the reason,
whatever its value.

A size of 0 means that there is no such tier, as upstream, and here it also removes the tier of a profile.

Some variables set no key: the client of the object store reads them in its own process. So credentials are in no
profile, on no command line and in no log.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kvbm.config.document import Document, Entry, Mistake, Source, entry_at
from kvbm.config.form import NO_CAPACITY, OF_KUBERNETES, Form
from kvbm.config.sizes import parse_size
from kvbm.config.spelling import NEAR
from kvbm.errors import ProfileError
from kvbm.text.outside import without_secret_value

PREFIX = "DYN_KVBM_"


@dataclass(frozen=True, slots=True)
class Variable:
    """A supported variable sets `key`. For a boolean, `states` are the values of the key for false and true.
    `upstream` describes how NVIDIA's block manager reads the same text, if it differs. One that `is_for_store` sets no
    key."""

    name: str
    about: str
    form: Form = Form.TEXT
    key: str | None = None
    states: tuple[object, object] = (False, True)
    upstream: str = ""
    is_for_store: bool = False

    @property
    def is_supported(self) -> bool:
        return self.key is not None or self.is_for_store


_PRESENCE = "any value means on, even `false` and `0`"
_FRACTION = "some parts ignore a fraction and create no tier, other parts create one"
_DEFAULTED = "text that is not a number is silently ignored"
_NOT_READ = "NVIDIA's wheel does not read it"
_NO_PORTS = "leader and workers need no address: they communicate through shared memory"
_NO_CONSOLIDATOR = "there is no consolidator: the engine's own events include those of host memory"
_NO_NCCL = "ranks of TensorRT-LLM copy blocks without NCCL"
_NO_EVENT_SOURCE = "there is no consolidator: TensorRT-LLM's own events are not changed"


def _sizes(name: str, tier: str, space: str) -> tuple[Variable, Variable]:
    key, start = f"tiers.{tier}", f"{PREFIX}{name}_CACHE_"
    about = f"{space}, summed over the ranks of one engine; 0 means no {tier} tier"
    blocks = f"{space} in blocks; overrides GB, 0 means no override"
    return (
        Variable(f"{start}GB", about, Form.GIGABYTES, f"{key}.capacity", upstream=_FRACTION),
        Variable(f"{start}OVERRIDE_NUM_BLOCKS", blocks, Form.COUNT, f"{key}.blocks", upstream=_DEFAULTED),
    )


def _for_store(name: str, about: str, form: Form = Form.TEXT) -> Variable:
    return Variable(f"{PREFIX}OBJECT_{name}", about, form, upstream=_NOT_READ, is_for_store=True)


VARIABLES: tuple[Variable, ...] = (
    *_sizes("CPU", "host", "host memory"),
    *_sizes("DISK", "disk", "disk space"),
    Variable(
        "DYN_KVBM_DISK_CACHE_DIR",
        "directory of the cache files: an absolute path, or one that starts with `~`",
        Form.TEXT,
        "tiers.disk.directory",
        upstream="default `/tmp/`; blocks are lost when the engine exits",
    ),
    Variable("DYN_KVBM_DISK_ALLOCATOR_TYPE", "`default` or `open-direct`", Form.TEXT, "tiers.disk.allocator"),
    Variable(
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK",
        "allocate space by writing zeros if fallocate is not supported",
        Form.BOOLEAN,
        "tiers.disk.zerofill",
        upstream=_PRESENCE,
    ),
    Variable(
        "DYN_KVBM_DISK_DISABLE_O_DIRECT",
        "use the page cache",
        Form.BOOLEAN,
        "tiers.disk.o_direct",
        (True, False),
        upstream=_PRESENCE,
    ),
    Variable(
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER",
        "write every block to disk (`offload.to_disk: always`)",
        Form.BOOLEAN,
        "offload.to_disk",
        ("frequency", "always"),
    ),
    Variable(
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
        "minimum priority, 0 to 100; only for engines that send priorities",
        Form.COUNT,
        "offload.min_priority",
        upstream="with an engine that sends none, any value except 0 silently disables the cache",
    ),
    Variable(
        "DYN_KVBM_MAX_CONCURRENT_TRANSFERS",
        "maximum number of parallel transfers",
        Form.COUNT,
        "transfer.max_concurrent",
    ),
    Variable(
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE",
        "maximum number of blocks in one transfer between host memory and disk",
        Form.COUNT,
        "transfer.batch_blocks",
    ),
    Variable(
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS",
        "seconds that `kvbm serve` waits for the engine; no effect if the engine is started by its own command",
        Form.COUNT,
        "transfer.init_timeout_s",
        upstream="default 1800; here 600",
    ),
    Variable(
        "DYN_KVBM_METRICS",
        "serve the kvbm_* metrics on a separate port, besides the engine's `/metrics`",
        Form.BOOLEAN,
        "metrics.serve",
    ),
    Variable("DYN_KVBM_METRICS_PORT", "port of the metrics server, by default 6880", Form.COUNT, "metrics.port"),
    Variable(
        "DYN_KVBM_METRICS_HOST",
        "address of the metrics server; an addition of this kvbm",
        Form.TEXT,
        "metrics.host",
        upstream="no such variable: the server listens on every address; here the default is 127.0.0.1",
    ),
    Variable(
        "DYN_KVBM_CACHE_STATS_MAX_REQUESTS",
        "number of recent finished requests over which the hit rates are computed",
        Form.COUNT,
        "metrics.window_requests",
    ),
    Variable(
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS",
        "interval in seconds at which hit rates are logged; 0 disables it",
        Form.COUNT,
        "metrics.log_interval_s",
    ),
    Variable("ENABLE_KVBM_RECORD", "old name of `DYN_KVBM_ENABLE_RECORD`", Form.BOOLEAN, "metrics.record"),
    Variable(
        "DYN_KVBM_ENABLE_RECORD",
        "record every decision about blocks as JSON lines in a private file in `metrics.record_directory`",
        Form.BOOLEAN,
        "metrics.record",
        upstream="always `/tmp/records.jsonl`",
    ),
    Variable(
        "DYN_KVBM_ENABLE_NUMA",
        "allocate host memory on the NUMA node of the GPU",
        Form.BOOLEAN,
        "transfer.numa",
        upstream="`false` has no effect",
    ),
    Variable(
        "DYN_MEMORY_DISABLE_NUMA", "allocate host memory on any NUMA node", Form.BOOLEAN, "transfer.numa", (True, False)
    ),
    Variable(
        "DYN_KVBM_OBJECT_BUCKET",
        "bucket of the shared tier (G4)",
        Form.BUCKET,
        "tiers.shared.url",
        upstream=_NOT_READ,
    ),
    Variable(
        "DYN_KVBM_OBJECT_ENABLED",
        "0 removes the shared tier; 1 requires `DYN_KVBM_OBJECT_BUCKET` or a profile with `tiers.shared`",
        Form.BOOLEAN,
        "tiers.shared",
        upstream=_NOT_READ,
    ),
    _for_store("ENDPOINT", "address of the S3 service; by default that of AWS, or `AWS_ENDPOINT_URL`", Form.ENDPOINT),
    _for_store("REGION", "region of the bucket; by default `AWS_REGION`"),
    _for_store("ACCESS_KEY", "name of the access key; by default `AWS_ACCESS_KEY_ID`, or the role of the machine"),
    _for_store(
        "SECRET_KEY", "secret of the access key; by default `AWS_SECRET_ACCESS_KEY`, or the role of the machine"
    ),
    Variable("DYN_KVBM_LEADER_ZMQ_HOST", _NO_PORTS),
    Variable("DYN_KVBM_LEADER_ZMQ_PUB_PORT", _NO_PORTS),
    Variable("DYN_KVBM_LEADER_ZMQ_ACK_PORT", _NO_PORTS),
    Variable("DYN_KVBM_DISABLE_WRITE_COMBINED", "host memory is never write-combined"),
    Variable("DYN_KVBM_NCCL_MLA_MODE", _NO_NCCL),
    Variable("DYN_KVBM_NCCL_MAX_CTAS", _NO_NCCL),
    Variable("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", _NO_CONSOLIDATOR),
    Variable("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", _NO_CONSOLIDATOR),
    Variable("DYN_KVBM_TRTLLM_ZMQ_PORT", _NO_EVENT_SOURCE),
    Variable("DYN_RUNTIME_ENABLED_KVBM", "there is no Dynamo runtime to attach to"),
    Variable("DYN_FATBIN_PATH", "the CUDA driver copies blocks, without a kernel from a file"),
    Variable("DYN_KVBM_ENABLE", "no version reads it: `DYN_KVBM_ENABLE=0` disables nothing"),
    Variable("DYN_KVBM_TRANSFER_BATCH_SIZE", "no version reads it; use `DYN_KVBM_MAX_TRANSFER_BATCH_SIZE`"),
    Variable(
        "DYN_KVBM_OBJECT_NUM_BLOCKS",
        "a shared store has no number of blocks: an expiry rule of the bucket limits it (`tiers.shared.expire_days`)",
    ),
    Variable("DYN_KVBM_HOST_MEMORY_PROVIDER", "no released version reads it"),
    Variable("DYN_KVBM_G2PB_ADMISSION_POLICY", "no released version reads it"),
    Variable("DYN_KVBM_NIXL_BACKEND_<NAME>", "no released version reads it; set `tiers.disk.io` instead"),
)

STORE_VARIABLES = frozenset(variable.name for variable in VARIABLES if variable.is_for_store)
_BY_NAME = {variable.name: variable for variable in VARIABLES}
_NIXL_PREFIX = PREFIX + "NIXL_BACKEND_"
_TIERS = ("host", "disk", "shared")
_SHARED_SWITCH = "DYN_KVBM_OBJECT_ENABLED"
_OVERRIDES = ("tiers.host.blocks", "tiers.disk.blocks")
_OF_SERVICE = re.compile(r"_SERVICE_(?:HOST|PORT)|_PORT_[0-9]+_(?:TCP|UDP)")


def variable_names(environment: Mapping[str, str]) -> list[str]:
    """Return the names of DYN_KVBM_* variables and other names of the table, valid or not."""
    return sorted(name for name in environment if name in _BY_NAME or _is_meant_for_kvbm(name))


def _is_meant_for_kvbm(name: str) -> bool:
    """Return whether a name is ours, also if an env file has spoilt it: `export DYN_KVBM_METRICS`."""
    return name.strip().removeprefix("export ").lstrip().upper().startswith(PREFIX)


def other_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return all other variables, to which a profile may refer."""
    ours = set(variable_names(environment))
    return {name: value for name, value in environment.items() if name not in ours}


def variable_of(name: str) -> Variable | None:
    """Return the row of a name, None for an unknown name."""
    return _BY_NAME.get(_NIXL_PREFIX + "<NAME>" if name.startswith(_NIXL_PREFIX) else name)


def read_variables(environment: Mapping[str, str]) -> tuple[Document, tuple[str, ...]]:
    """Return the document of the supported variables, and one warning for each variable without effect.

    Variables for the store are only checked.
    """
    document: Document = {}
    switch: Entry | None = None
    warnings: list[str] = []
    for name in variable_names(environment):
        variable = variable_of(name)
        source = _source(name, environment[name])
        if variable is None:
            raise _unknown(source)
        if not variable.is_supported:
            warnings.append(f"`{name}` has no effect: {variable.about}")
            continue
        value = variable.form.parse(environment[name], source)
        if variable.form is Form.BOOLEAN:
            value = variable.states[bool(value)]
        if name == _SHARED_SWITCH:
            switch = Entry(source, source, value)
        elif variable.key is not None and not (variable.key in _OVERRIDES and value == 0):
            _put_once(document, variable.key.split("."), Entry(source, source, value))
    return document, (*warnings, *_remove_zero_tiers(document), *_switch_shared(document, switch))


def valid_variables(environment: Mapping[str, str]) -> tuple[dict[str, str], list[ProfileError]]:
    found: dict[str, str] = {}
    mistakes: list[ProfileError] = []
    for name in variable_names(environment):
        try:
            read_variables({**found, name: environment[name]})
        except ProfileError as mistake:
            mistakes.append(mistake)
        else:
            found[name] = environment[name]
    return found, mistakes


def drop_unused(
    document: Document, environment: Mapping[str, str], *, below: Mapping[str, Entry] | None = None
) -> tuple[str, ...]:
    """Remove values of variables that have no effect in a merged document, and return a warning for each.

    `below` is the document below the variables. A warning also reports a tier of `below` that a variable removes.
    Settings of a disk tier without a size have no effect, and neither have a port without a metrics server and settings
    of a store without a shared tier in S3.
    """
    removed = tuple(
        f"`{entry.source.text}` removes `tiers.{name}` of the profile"
        for name in _TIERS
        if (entry := entry_at(document, ["tiers", name])) is not None
        and entry.value is None
        and _is_of_variable(entry)
        and entry_at(below or {}, ["tiers", name]) is not None
    )
    return (*removed, *_remove_idle_disk(document), *_idle_port(document), *_idle_store(document, environment))


def overridden_values(variables: Document, merged: Document, below: Document, own: Collection[str]) -> Iterator[str]:
    """Yield a warning for each value in the files `own` that a variable replaces by a different one.

    `variables` is the document of the variables. Values of shipped profiles may be replaced without a warning.
    """
    for path, entry in _leaves(variables):
        key = _equivalent_key(below, path)
        other, winner = entry_at(below, key.split(".")), entry_at(merged, path.split("."))
        is_own = other is not None and other.source.label in own
        if other is None or not is_own or winner is None or winner.source is not entry.source:
            continue
        if key != path or _meaning(key, entry.value) != _meaning(key, other.value):
            message = f"`{entry.source.text}` overrides `{key}: {other.source.written}` ({other.source.origin})"
            yield f"{message}; `unset {entry.source.label}` to use the value of the file"


def _leaves(document: Mapping[str, Entry], prefix: str = "") -> Iterator[tuple[str, Entry]]:
    for name, entry in document.items():
        if entry.section is not None:
            yield from _leaves(entry.section, f"{prefix}{name}.")
        elif entry.value is not None:  # `drop_unused` reports a removed tier
            yield f"{prefix}{name}", entry


def _equivalent_key(below: Document, path: str) -> str:
    """Return the key of `below` that `path` replaces. For the size of a tier: blocks, capacity, or the tier itself."""
    section, _, name = path.rpartition(".")
    if name not in ("capacity", "blocks"):
        return path
    candidates = (f"{section}.blocks", f"{section}.capacity", section)
    found = {key: entry_at(below, key.split(".")) for key in candidates}
    return next((key for key, entry in found.items() if entry is not None and entry.section is None), path)


def _meaning(key: str, value: object) -> object:
    with contextlib.suppress(ValueError):  # a mistake, which is reported elsewhere
        return parse_size(value) if key.endswith(".capacity") and isinstance(value, str) else value
    return value


def put(document: Document, path: list[str], entry: Entry) -> None:
    """Put `entry` at `path` and create missing sections with the source of the entry."""
    for name in path[:-1]:
        holder = document.setdefault(name, Entry(entry.key, entry.source, {}))
        assert isinstance(holder.value, dict), "a value in place of a section"
        document = holder.value
    document[path[-1]] = entry


def _put_once(document: Document, path: list[str], entry: Entry) -> None:
    """Put an entry. Two variables may set the same key, but only to the same value."""
    other = entry_at(document, path)
    if other is not None and other.value != entry.value:
        message = f"`{entry.source.text}` contradicts `{other.source.text}`"
        raise Mistake(message, entry.source, hint=f"both set `{'.'.join(path)}`: `unset` one of them")
    put(document, path, entry)


def _unknown(source: Source) -> ProfileError:
    name = source.label
    supported = {one.name.removeprefix(PREFIX): one.name for one in VARIABLES if one.is_supported}
    written = name.strip().removeprefix("export ").strip().upper().removeprefix(PREFIX)
    nearest = difflib.get_close_matches(written, supported, n=1, cutoff=NEAR)
    hint = f"did you mean `{supported[nearest[0]]}`?" if nearest else f"`unset {name}`"
    if _OF_SERVICE.search(name):
        hint = OF_KUBERNETES
    return Mistake(f"unknown variable `{name}`", Source(name, source.text, 0, len(name)), hint=hint)


def _source(name: str, value: str) -> Source:
    shown = str(without_secret_value(name, value))
    return Source(name, f"{name}={shown}", len(name) + 1, max(1, len(shown)))


def _is_of_variable(entry: Entry) -> bool:
    return entry.source.label in _BY_NAME


def _remove_zero_tiers(document: Document) -> Iterator[str]:
    """Make a tier of size 0 null, unless a number of blocks is set. Its other settings then have no effect."""
    for tier in _TIERS:
        capacity = entry_at(document, ["tiers", tier, "capacity"])
        if capacity is None or capacity.value != NO_CAPACITY:
            continue
        rest = {name: entry for name, entry in _section(document, tier).items() if name != "capacity"}
        if "blocks" in rest:
            _replace(document, tier, rest)
            continue
        put(document, ["tiers", tier], Entry(capacity.key, capacity.source, None))
        yield from (f"`{one.source.label}` has no effect: `{capacity.source.text}`" for one in rest.values())


def _switch_shared(document: Document, switch: Entry | None) -> Iterator[str]:
    """Make the shared tier null if it is switched off. Its bucket then has no effect."""
    if switch is None or switch.value:
        return
    bucket = _section(document, "shared")
    put(document, ["tiers", "shared"], Entry(switch.key, switch.source, None))
    yield from (f"`{one.source.label}` has no effect: `{switch.source.text}`" for one in bucket.values())


def _remove_idle_disk(document: Document) -> tuple[str, ...]:
    written = _section(document, "disk")
    if not written or "capacity" in written or "blocks" in written or not all(map(_is_of_variable, written.values())):
        return ()
    _replace(document, "disk", {})
    why = "there is no disk tier without `DYN_KVBM_DISK_CACHE_GB` or `tiers.disk.capacity`"
    return tuple(f"`{entry.source.label}` has no effect: {why}" for entry in written.values())


def _idle_port(document: Document) -> tuple[str, ...]:
    serve = entry_at(document, ["metrics", "serve"])
    if serve is not None and serve.value is not False:
        return ()
    entries = [entry for name in ("port", "host") if (entry := entry_at(document, ["metrics", name])) is not None]
    why = "there is no metrics server without `DYN_KVBM_METRICS=1` or `metrics.serve`"
    return tuple(f"`{entry.source.label}` has no effect: {why}" for entry in entries if _is_of_variable(entry))


def _idle_store(document: Document, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable of a store that is not in S3, or that does not exist."""
    switch = entry_at(document, ["tiers", "shared"])
    url = entry_at(document, ["tiers", "shared", "url"])
    is_s3 = url is not None and str(url.value).startswith("s3://")
    names = sorted(STORE_VARIABLES & environment.keys()) if not is_s3 else []
    if url is None and _SHARED_SWITCH in environment and not (switch is not None and _is_of_variable(switch)):
        names.insert(0, _SHARED_SWITCH)
    why = "there is no shared tier in S3 without `DYN_KVBM_OBJECT_BUCKET` or `tiers.shared.url`"
    yield from (f"`{name}` has no effect: {why}" for name in names)


def _section(document: Document, tier: str) -> Mapping[str, Entry]:
    entry = entry_at(document, ["tiers", tier])
    return (entry.section if entry is not None else None) or {}


def _replace(document: Document, tier: str, section: Document) -> None:
    """Replace the section of a tier. An empty one removes the tier, and `tiers` with the last tier."""
    tiers = document["tiers"]
    rest = {name: entry for name, entry in (tiers.section or {}).items() if name != tier}
    if section:
        old = (tiers.section or {})[tier]
        rest[tier] = Entry(old.key, old.source, section)
    del document["tiers"]
    if rest:
        document["tiers"] = Entry(tiers.key, tiers.source, rest)
