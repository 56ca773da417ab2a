"""The variables of NVIDIA's block manager: which are honoured, which change nothing here, and why.

One table; the reference page is made from it. Every name that starts with `DYN_KVBM_` and is not in it is an error, and
so is a value that an honoured variable cannot mean: upstream ignored both without a word. A variable that changes
nothing here is a warning that says why, whatever its value.

A size of 0 is how upstream's users say that there is no such tier, and here it takes away the tier of a profile too.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kvbm.config.document import Document, Entry, Source, entry_at, located
from kvbm.config.form import NO_CAPACITY, Form
from kvbm.config.sizes import parse_size
from kvbm.errors import ProfileError

PREFIX = "DYN_KVBM_"


@dataclass(frozen=True, slots=True)
class Variable:
    """`key` is what an honoured one sets. `states` are the values of the key that false and true come to, where they
    are not these themselves. `upstream` says how the same text was read there, if that was another way."""

    name: str
    about: str
    form: Form = Form.TEXT
    key: str | None = None
    states: tuple[object, object] = (False, True)
    upstream: str = ""

    @property
    def is_honoured(self) -> bool:
        return self.key is not None


_PRESENCE = "any value switched it on, `false` and `0` too"
_FRACTION = "a fraction counted as no tier in one place and as a tier in another"
_DEFAULTED = "what was no number counted as not set, without a word"
_OBJECT = "no object tier ever read it, in NVIDIA's wheel or here"
_NO_PORTS = "leader and workers need no address: results travel through shared memory"
_NO_CONSOLIDATOR = "there is no consolidator: events of host memory come with vLLM's own"
_NO_NCCL = "it belongs to TensorRT-LLM, which is not in this version"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "DYN_KVBM_CPU_CACHE_GB",
        "host memory, summed over the ranks of one engine; 0: no host tier",
        Form.GIGABYTES,
        "tiers.host.capacity",
        upstream=_FRACTION,
    ),
    Variable(
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS",
        "host memory in blocks; wins over GB, and 0 means that there is no override",
        Form.COUNT,
        "tiers.host.blocks",
        upstream=_DEFAULTED,
    ),
    Variable(
        "DYN_KVBM_DISK_CACHE_GB",
        "disk space, summed over the ranks of one engine; 0: no disk tier",
        Form.GIGABYTES,
        "tiers.disk.capacity",
        upstream=_FRACTION,
    ),
    Variable(
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS",
        "disk space in blocks; wins over GB, and 0 means that there is no override",
        Form.COUNT,
        "tiers.disk.blocks",
        upstream=_DEFAULTED,
    ),
    Variable(
        "DYN_KVBM_DISK_CACHE_DIR",
        "directory of the cache files, absolute or from `~`",
        Form.TEXT,
        "tiers.disk.directory",
        upstream="`/tmp/` where it was not set, and nothing outlived the engine",
    ),
    Variable("DYN_KVBM_DISK_ALLOCATOR_TYPE", "`default` or `open-direct`", Form.TEXT, "tiers.disk.allocator"),
    Variable(
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK",
        "zeros are written where fallocate is not supported",
        Form.BOOLEAN,
        "tiers.disk.zerofill",
        upstream=_PRESENCE,
    ),
    Variable(
        "DYN_KVBM_DISK_DISABLE_O_DIRECT",
        "goes through the page cache",
        Form.BOOLEAN,
        "tiers.disk.o_direct",
        (True, False),
        upstream=_PRESENCE,
    ),
    Variable(
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER",
        "every block of host memory goes to disk: `offload.to_disk: always`",
        Form.BOOLEAN,
        "offload.to_disk",
        ("frequency", "always"),
    ),
    Variable(
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
        "0 to 100; for engines that send priorities",
        Form.COUNT,
        "offload.min_priority",
        upstream="under vLLM, which sends none, any other than 0 switched the cache off without a word",
    ),
    Variable("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", "transfers in flight", Form.COUNT, "transfer.max_concurrent"),
    Variable(
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", "blocks that one offload moves at most", Form.COUNT, "transfer.batch_blocks"
    ),
    Variable(
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS",
        "seconds that `kvbm serve` gives the start; a vLLM that is started by itself waits as it does",
        Form.COUNT,
        "transfer.init_timeout_s",
        upstream="1800 where it was not set; here 600",
    ),
    Variable(
        "DYN_KVBM_METRICS",
        "the kvbm_* series on a port of their own, beside the engine's `/metrics`, which has them in any case",
        Form.BOOLEAN,
        "metrics.serve",
    ),
    Variable("DYN_KVBM_METRICS_PORT", "that port, 6880 if not set", Form.COUNT, "metrics.port"),
    Variable(
        "DYN_KVBM_METRICS_HOST",
        "the address of that port; ours, not NVIDIA's",
        Form.TEXT,
        "metrics.host",
        upstream="there was none, and it listened on every address; here 127.0.0.1 where nothing else is said",
    ),
    Variable(
        "DYN_KVBM_CACHE_STATS_MAX_REQUESTS",
        "finished requests that the hit rates are about",
        Form.COUNT,
        "metrics.window_requests",
    ),
    Variable(
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS",
        "seconds between two lines of the log with the hit rates; 0: none",
        Form.COUNT,
        "metrics.log_interval_s",
    ),
    Variable("ENABLE_KVBM_RECORD", "the old name of `DYN_KVBM_ENABLE_RECORD`", Form.BOOLEAN, "metrics.record"),
    Variable(
        "DYN_KVBM_ENABLE_RECORD",
        "every decision about blocks as JSON lines, in a private file of `metrics.record_directory`",
        Form.BOOLEAN,
        "metrics.record",
        upstream="always `/tmp/records.jsonl`",
    ),
    Variable(
        "DYN_KVBM_ENABLE_NUMA",
        "host memory from the NUMA node of the GPU",
        Form.BOOLEAN,
        "transfer.numa",
        upstream="`false` changed nothing",
    ),
    Variable("DYN_MEMORY_DISABLE_NUMA", "host memory from any NUMA node", Form.BOOLEAN, "transfer.numa", (True, False)),
    Variable("DYN_KVBM_LEADER_ZMQ_HOST", _NO_PORTS),
    Variable("DYN_KVBM_LEADER_ZMQ_PUB_PORT", _NO_PORTS),
    Variable("DYN_KVBM_LEADER_ZMQ_ACK_PORT", _NO_PORTS),
    Variable("DYN_KVBM_DISABLE_WRITE_COMBINED", "host memory is never write-combined here"),
    Variable("DYN_KVBM_NCCL_MLA_MODE", _NO_NCCL),
    Variable("DYN_KVBM_NCCL_MAX_CTAS", _NO_NCCL),
    Variable("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", _NO_CONSOLIDATOR),
    Variable("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", _NO_CONSOLIDATOR),
    Variable("DYN_KVBM_TRTLLM_ZMQ_PORT", _NO_CONSOLIDATOR),
    Variable("DYN_RUNTIME_ENABLED_KVBM", "there is no Dynamo runtime here that it could attach to"),
    Variable("DYN_FATBIN_PATH", "blocks are copied by the driver's own copies, not by a kernel from a file"),
    Variable("DYN_KVBM_ENABLE", "nothing ever read it: `DYN_KVBM_ENABLE=0` switches nothing off"),
    Variable("DYN_KVBM_TRANSFER_BATCH_SIZE", "nothing ever read it; `DYN_KVBM_MAX_TRANSFER_BATCH_SIZE` is read"),
    *(
        Variable(f"DYN_KVBM_OBJECT_{name}", _OBJECT)
        for name in ("ENABLED", "BUCKET", "ENDPOINT", "REGION", "ACCESS_KEY", "SECRET_KEY", "NUM_BLOCKS")
    ),
    Variable("DYN_KVBM_HOST_MEMORY_PROVIDER", "no released version ever read it"),
    Variable("DYN_KVBM_G2PB_ADMISSION_POLICY", "no released version ever read it"),
    Variable("DYN_KVBM_NIXL_BACKEND_<NAME>", "the released wheel never read it; `tiers.disk.io` chooses NIXL here"),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}
_NIXL_PREFIX = PREFIX + "NIXL_BACKEND_"
_TIERS = ("host", "disk")
_OVERRIDES = ("tiers.host.blocks", "tiers.disk.blocks")
_SECRET = re.compile(r"SECRET|ACCESS_KEY|PASSWORD|TOKEN")


def named(environment: Mapping[str, str]) -> list[str]:
    """The names in an environment that this table is about, right or wrong ones."""
    return sorted(name for name in environment if name in _BY_NAME or name.upper().startswith(PREFIX))


def others(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this table is not about: a profile may refer to them."""
    ours = set(named(environment))
    return {name: value for name, value in environment.items() if name not in ours}


def variable_of(name: str) -> Variable | None:
    """The row of a name, None for a name that there is not."""
    return _BY_NAME.get(_NIXL_PREFIX + "<NAME>" if name.startswith(_NIXL_PREFIX) else name)


def read_variables(environment: Mapping[str, str]) -> tuple[Document, tuple[str, ...]]:
    """The document that the honoured variables amount to, and one warning for each that changes nothing."""
    document: Document = {}
    warnings: list[str] = []
    for name in named(environment):
        variable = variable_of(name)
        source = _source(name, environment[name])
        if variable is None:
            raise _unknown(source)
        if variable.key is None:
            warnings.append(f"`{name}` has no effect: {variable.about}")
            continue
        value = variable.form.parse(environment[name], source)
        if variable.form is Form.BOOLEAN:
            value = variable.states[bool(value)]
        if not (variable.key in _OVERRIDES and value == 0):
            _put_once(document, variable.key.split("."), Entry(source, source, value))
    return document, (*warnings, *_take_zero_tiers(document))


def usable(environment: Mapping[str, str]) -> tuple[dict[str, str], list[ProfileError]]:
    """Those without a mistake, and all mistakes."""
    found: dict[str, str] = {}
    mistakes: list[ProfileError] = []
    for name in named(environment):
        try:
            read_variables({**found, name: environment[name]})
        except ProfileError as mistake:
            mistakes.append(mistake)
        else:
            found[name] = environment[name]
    return found, mistakes


def settle(document: Document, *, below: Mapping[str, Entry] | None = None) -> tuple[str, ...]:
    """Take away what variables in a merged document have no use for, with a warning for each that is worth one.

    `below` is what lies under the variables. Told of are tiers of it that they take away; what they say about a disk
    that nothing gives a size is idle, and so is a port that nothing serves on.
    """
    taken = tuple(
        f"`{entry.source.text}` takes away `tiers.{name}` of the profile"
        for name in _TIERS
        if (entry := entry_at(document, ["tiers", name])) is not None
        and entry.value is None
        and _is_of_variable(entry)
        and entry_at(below or {}, ["tiers", name]) is not None
    )
    return (*taken, *_take_idle_disk(document), *_idle_port(document))


def overruled(said: Document, merged: Document, below: Document, own: Collection[str]) -> Iterator[str]:
    """Of each value in the files `own`, below the variables, that one of these replaces by another.

    `said` is what the variables say. The values of shipped profiles are there to be replaced.
    """
    for path, entry in _leaves(said):
        key = _spoken_of(below, path)
        other, winner = entry_at(below, key.split(".")), entry_at(merged, path.split("."))
        is_own = other is not None and other.source.label in own
        if other is None or not is_own or winner is None or winner.source is not entry.source:
            continue
        if key != path or _meaning(key, entry.value) != _meaning(key, other.value):
            told = f"`{entry.source.text}` wins over `{key}: {other.source.written}` ({other.source.origin})"
            yield f"{told}; `unset {entry.source.label}` to go by the file"


def _leaves(document: Mapping[str, Entry], prefix: str = "") -> Iterator[tuple[str, Entry]]:
    for name, entry in document.items():
        if entry.section is not None:
            yield from _leaves(entry.section, f"{prefix}{name}.")
        elif entry.value is not None:  # a tier that is taken away is told of by `settle`
            yield f"{prefix}{name}", entry


def _spoken_of(below: Document, path: str) -> str:
    """The key with which a document says what `path` says: of a tier's size its blocks, its capacity, or no tier."""
    section, _, name = path.rpartition(".")
    if name not in ("capacity", "blocks"):
        return path
    asked = (f"{section}.blocks", f"{section}.capacity", section)
    found = {key: entry_at(below, key.split(".")) for key in asked}
    return next((key for key, entry in found.items() if entry is not None and entry.section is None), path)


def _meaning(key: str, value: object) -> object:
    with contextlib.suppress(ValueError):  # a mistake, which is told elsewhere
        return parse_size(value) if key.endswith(".capacity") and isinstance(value, str) else value
    return value


def put(document: Document, path: list[str], entry: Entry) -> None:
    """Writes `entry` at `path`, making the sections on the way from the entry's own source."""
    for name in path[:-1]:
        holder = document.setdefault(name, Entry(entry.key, entry.source, {}))
        assert isinstance(holder.value, dict), "overrides build sections only"
        document = holder.value
    document[path[-1]] = entry


def _put_once(document: Document, path: list[str], entry: Entry) -> None:
    """Two variables may set one key, but not to different values."""
    other = entry_at(document, path)
    if other is not None and other.value != entry.value:
        message = f"`{entry.source.text}` contradicts `{other.source.text}`"
        raise located(message, entry.source, hint=f"`unset` one of them; both set `{'.'.join(path)}`")
    put(document, path, entry)


def _unknown(source: Source) -> ProfileError:
    name = source.label
    nearest = difflib.get_close_matches(name.upper(), _BY_NAME, n=1, cutoff=0.8)
    hint = f"did you mean `{nearest[0]}`?" if nearest else f"`unset {name}`"
    return located(f"unknown variable `{name}`", Source(name, source.text, 0, len(name)), hint=hint)


def _source(name: str, value: str) -> Source:
    shown = "***" if _SECRET.search(name.upper()) else value
    return Source(name, f"{name}={shown}", len(name) + 1, max(1, len(shown)))


def _is_of_variable(entry: Entry) -> bool:
    return entry.source.label in _BY_NAME


def _take_zero_tiers(document: Document) -> Iterator[str]:
    """A size of 0 becomes a tier that is null. A number of blocks wins over it; what else there is of it is idle."""
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


def _take_idle_disk(document: Document) -> tuple[str, ...]:
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
    why = "the series have no port of their own without `DYN_KVBM_METRICS=1` or `metrics.serve`"
    return tuple(f"`{entry.source.label}` has no effect: {why}" for entry in entries if _is_of_variable(entry))


def _section(document: Document, tier: str) -> Mapping[str, Entry]:
    entry = entry_at(document, ["tiers", tier])
    return (entry.section if entry is not None else None) or {}


def _replace(document: Document, tier: str, section: Document) -> None:
    """This section for a tier; an empty one takes the tier away, and `tiers` itself with the last."""
    tiers = document["tiers"]
    rest = {name: entry for name, entry in (tiers.section or {}).items() if name != tier}
    if section:
        old = (tiers.section or {})[tier]
        rest[tier] = Entry(old.key, old.source, section)
    del document["tiers"]
    if rest:
        document["tiers"] = Entry(tiers.key, tiers.source, rest)
