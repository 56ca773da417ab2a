"""Variables of NVIDIA's block manager: which ones are supported, which have no effect here, and why.

`variables.json` has them, and the reference page is generated from it. An unknown name that starts with `DYN_KVBM_` is
an error, and so is an invalid value; NVIDIA's block manager ignores both silently. A variable without effect causes a
warning with the reason, whatever its value.

A size of 0 means that there is no such tier, as upstream, and here it also removes the tier of a profile.

Some variables set no key: the client of the object store reads them in its own process. So credentials are in no
profile, on no command line and in no log.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.config.document import Document, Entry, Mistake, Source, entry_at
from kvbm.config.findings import remove
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
    form: Form
    key: str | None = None
    states: Sequence[object] = (False, True)
    upstream: str = ""
    is_for_store: bool = False

    @property
    def is_supported(self) -> bool:
        return self.key is not None or self.is_for_store


_TABLE: list[dict[str, Any]] = json.loads(Path(__file__).with_name("variables.json").read_text(encoding="utf-8"))
VARIABLES = tuple(Variable(**{**row, "form": Form[row.get("form", "TEXT")]}) for row in _TABLE)
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
            remove(document, ["tiers", tier, "capacity"])
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
    remove(document, ["tiers", "disk"])
    if not document["tiers"].section:
        del document["tiers"]
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
