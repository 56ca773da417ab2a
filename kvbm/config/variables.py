"""The `DYN_KVBM_*` variables of NVIDIA's block manager: which are honoured, refused or without effect, and why.

One table; the reference page is made from it. Every name that starts with `DYN_KVBM_` and is not in it is an error, and
so is a value that its variable cannot mean: upstream ignored both without a word. A variable that asks for something
this version cannot do is refused unless its value asks for nothing (`0`, `false`). One that changes nothing here is a
warning that says why.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from kvbm.config.document import Document, Entry, Source, located

PREFIX = "DYN_KVBM_"


class Effect(enum.Enum):
    HONOURED = "sets a key"
    REFUSED = "not in this version"
    NONE = "no effect"


class Form(enum.Enum):
    """What a value must look like."""

    GIGABYTES = "a number of GB (1e9 bytes), fractions allowed"
    COUNT = "a whole number"
    BOOLEAN = "one of 1, true, yes, on, 0, false, no, off"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    form: Form
    effect: Effect
    about: str
    key: str | None = None


def _honoured(name: str, form: Form, key: str, about: str) -> Variable:
    return Variable(PREFIX + name, form, Effect.HONOURED, about, key)


def _refused(name: str, form: Form, about: str) -> Variable:
    return Variable(PREFIX + name, form, Effect.REFUSED, about)


def _no_effect(name: str, form: Form, about: str) -> Variable:
    return Variable(PREFIX + name, form, Effect.NONE, about)


_OBJECT = "no object tier ever read it, in NVIDIA's wheel or here"
_NO_PORTS = "leader and workers need no address: results travel through shared memory"

VARIABLES: tuple[Variable, ...] = (
    _honoured(
        "CPU_CACHE_GB", Form.GIGABYTES, "tiers.host.capacity", "host memory, summed over the ranks of one engine"
    ),
    _honoured(
        "CPU_CACHE_OVERRIDE_NUM_BLOCKS",
        Form.COUNT,
        "tiers.host.blocks",
        "host memory in blocks; wins over GB, and 0 means that there is no override",
    ),
    _honoured("MAX_CONCURRENT_TRANSFERS", Form.COUNT, "transfer.max_concurrent", "transfers in flight"),
    _honoured("MAX_TRANSFER_BATCH_SIZE", Form.COUNT, "transfer.batch_blocks", "blocks that one offload moves at most"),
    _honoured(
        "LEADER_WORKER_INIT_TIMEOUT_SECS",
        Form.COUNT,
        "transfer.init_timeout_s",
        "seconds that the start may take",
    ),
    _honoured(
        "DISK_CACHE_GB", Form.GIGABYTES, "tiers.disk.capacity", "disk space, summed over the ranks of one engine"
    ),
    _honoured(
        "DISK_CACHE_OVERRIDE_NUM_BLOCKS",
        Form.COUNT,
        "tiers.disk.blocks",
        "disk space in blocks; wins over GB, and 0 means that there is no override",
    ),
    _honoured("DISK_CACHE_DIR", Form.TEXT, "tiers.disk.directory", "directory of the cache files"),
    _honoured("DISK_ALLOCATOR_TYPE", Form.TEXT, "tiers.disk.allocator", "`default` or `open-direct`"),
    _honoured(
        "DISK_ZEROFILL_FALLBACK",
        Form.BOOLEAN,
        "tiers.disk.zerofill",
        "zeros are written where fallocate is not supported; `false` means false, unlike upstream",
    ),
    _honoured(
        "DISK_DISABLE_O_DIRECT",
        Form.BOOLEAN,
        "tiers.disk.o_direct",
        "goes through the page cache; `false` means false, unlike upstream",
    ),
    _honoured(
        "DISABLE_DISK_OFFLOAD_FILTER",
        Form.BOOLEAN,
        "offload.to_disk",
        "every block of host memory goes to disk: `offload.to_disk: always`",
    ),
    _honoured(
        "HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
        Form.COUNT,
        "offload.min_priority",
        "0 to 100; for engines that send priorities",
    ),
    _no_effect("METRICS", Form.BOOLEAN, "kvbm_* metrics are always served, at /metrics of the engine's own server"),
    _no_effect("METRICS_PORT", Form.COUNT, "kvbm_* metrics are at /metrics of the engine's own server, on its port"),
    _no_effect("CACHE_STATS_MAX_REQUESTS", Form.COUNT, "the hit-rate gauge always covers the last 1000 requests"),
    _no_effect("CACHE_STATS_LOG_INTERVAL_SECS", Form.COUNT, "there is no hit-rate log line in this version"),
    _refused("ENABLE_RECORD", Form.BOOLEAN, "there is no recorder in this version"),
    _refused("NCCL_MLA_MODE", Form.BOOLEAN, "there is no TensorRT-LLM in this version"),
    _no_effect("NCCL_MAX_CTAS", Form.COUNT, "it belongs to NCCL_MLA_MODE of TensorRT-LLM, which is not here"),
    _no_effect("LEADER_ZMQ_HOST", Form.TEXT, _NO_PORTS),
    _no_effect("LEADER_ZMQ_PUB_PORT", Form.COUNT, _NO_PORTS),
    _no_effect("LEADER_ZMQ_ACK_PORT", Form.COUNT, _NO_PORTS),
    _no_effect("DISABLE_WRITE_COMBINED", Form.BOOLEAN, "host memory is never write-combined here"),
    _refused("ENABLE_NUMA", Form.BOOLEAN, "host memory is not bound to a NUMA node in this version"),
    _no_effect(
        "KV_EVENTS_ENABLE_CONSOLIDATOR",
        Form.BOOLEAN,
        "there is no consolidator: events of host memory come with vLLM's own",
    ),
    _no_effect(
        "KV_EVENTS_CONSOLIDATOR_MODE", Form.TEXT, "there is no consolidator: events of host memory come with vLLM's own"
    ),
    _no_effect("TRTLLM_ZMQ_PORT", Form.COUNT, "there is no consolidator: events of host memory come with vLLM's own"),
    _no_effect("ENABLE", Form.TEXT, "nothing ever read it: `DYN_KVBM_ENABLE=0` switches nothing off"),
    _no_effect("TRANSFER_BATCH_SIZE", Form.TEXT, "nothing ever read it; `DYN_KVBM_MAX_TRANSFER_BATCH_SIZE` is read"),
    _no_effect("OBJECT_ENABLED", Form.TEXT, _OBJECT),
    _no_effect("OBJECT_BUCKET", Form.TEXT, _OBJECT),
    _no_effect("OBJECT_ENDPOINT", Form.TEXT, _OBJECT),
    _no_effect("OBJECT_REGION", Form.TEXT, _OBJECT),
    _no_effect("OBJECT_ACCESS_KEY", Form.TEXT, _OBJECT),
    _no_effect("OBJECT_SECRET_KEY", Form.TEXT, _OBJECT),
    _no_effect("OBJECT_NUM_BLOCKS", Form.TEXT, _OBJECT),
    _no_effect("HOST_MEMORY_PROVIDER", Form.TEXT, "no released version ever read it"),
    _no_effect("G2PB_ADMISSION_POLICY", Form.TEXT, "no released version ever read it"),
    _no_effect("NIXL_BACKEND_<NAME>", Form.TEXT, "the released wheel never read it; `tiers.disk.io` chooses NIXL here"),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}
_NIXL_PREFIX = PREFIX + "NIXL_BACKEND_"
_ZERO_IS_NONE = frozenset({"tiers.host.blocks", "tiers.disk.blocks", "tiers.disk.capacity"})
_MEANINGS: dict[str, tuple[object, object]] = {  # what false and true come to
    "tiers.disk.o_direct": (True, False),
    "offload.to_disk": ("frequency", "always"),
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SECRET = frozenset({PREFIX + "OBJECT_ACCESS_KEY", PREFIX + "OBJECT_SECRET_KEY"})


def read_variables(environment: Mapping[str, str]) -> tuple[Document, tuple[str, ...]]:
    """The document that the honoured variables amount to, and one warning for each that changes nothing."""
    document: Document = {}
    warnings: list[str] = []
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        variable = _known(name, environment[name])
        source = _source(name, environment[name])
        value = _parse(variable, environment[name], source)
        if variable.effect is Effect.NONE:
            warnings.append(f"`{name}` has no effect: {variable.about}")
        elif variable.effect is Effect.REFUSED and value not in (0, False):
            raise located(f"`{name}` is not in this version: {variable.about}", source, hint=f"`unset {name}`")
        elif variable.key is not None and not (variable.key in _ZERO_IS_NONE and value in (0, "0GB")):
            if variable.key in _MEANINGS:
                value = _MEANINGS[variable.key][bool(value)]
            put(document, variable.key.split("."), Entry(source, source, value))
    return document, tuple(warnings)


def drop_idle_disk(document: Document) -> tuple[str, ...]:
    """Take away what variables say about a disk that nothing gives a size, with one warning for each of them."""
    tiers = document.get("tiers")
    disk = (tiers.section or {}).get("disk") if tiers is not None else None
    written = (disk.section or {}) if disk is not None else {}
    are_variables = all(entry.source.label.startswith(PREFIX) for entry in written.values())
    if disk is None or not written or not are_variables or "capacity" in written or "blocks" in written:
        return ()
    assert tiers is not None
    rest = {name: entry for name, entry in (tiers.section or {}).items() if name != "disk"}
    del document["tiers"]
    if rest:
        document["tiers"] = Entry(tiers.key, tiers.source, rest)
    why = "there is no disk tier without `DYN_KVBM_DISK_CACHE_GB` or `tiers.disk.capacity`"
    return tuple(f"`{entry.source.label}` has no effect: {why}" for entry in written.values())


def put(document: Document, path: list[str], entry: Entry) -> None:
    """Writes `entry` at `path`, making the sections on the way from the entry's own source."""
    for name in path[:-1]:
        holder = document.setdefault(name, Entry(entry.key, entry.source, {}))
        assert isinstance(holder.value, dict), "overrides build sections only"
        document = holder.value
    document[path[-1]] = entry


def _known(name: str, value: str) -> Variable:
    variable = _BY_NAME.get(name)
    if variable is None and name.startswith(_NIXL_PREFIX):
        return _BY_NAME[_NIXL_PREFIX + "<NAME>"]
    if variable is None:
        nearest = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.8)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"`unset {name}`"
        raise located(f"unknown variable `{name}`", Source(name, f"{name}={value}", 0, len(name)), hint=hint)
    return variable


def _source(name: str, value: str) -> Source:
    shown = "***" if name in _SECRET else value
    return Source(name, f"{name}={shown}", len(name) + 1, max(1, len(shown)))


def _parse(variable: Variable, text: str, source: Source) -> object:
    """The value in the form that the profile key takes. ProfileError where the text is not of the variable's form."""
    stripped = text.strip()
    if not stripped:
        raise located(f"`{source.label}` is empty", source, hint=f"`unset {source.label}`, or give it a value")
    if variable.form is Form.TEXT:
        return stripped
    parsed = _PARSERS[variable.form](stripped)
    if parsed is None:
        raise located(f"`{source.label}` must be {variable.form.value}, not `{stripped}`", source)
    return f"{parsed:f}GB" if variable.form is Form.GIGABYTES else parsed


_NUMBER = re.compile(r"(?:[0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?")


def _gigabytes(text: str) -> Decimal | None:
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _boolean(text: str) -> bool | None:
    lowered = text.lower()
    return True if lowered in _TRUE else False if lowered in _FALSE else None


_PARSERS = {Form.GIGABYTES: _gigabytes, Form.COUNT: _count, Form.BOOLEAN: _boolean}
