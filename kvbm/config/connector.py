"""Configuration of a connector inside an engine's process: from the launcher, or from the DYN_KVBM_* variables.

`kvbm serve` resolves a profile and passes its contents on; the connector then ignores the variables. If the engine is
started by its own command, as with NVIDIA's block manager, every process resolves the same variables, and the processes
compare digests of the result.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

from pydantic import ValidationError

from kvbm.config.document import Document, Entry, Mistake, Source, entry_at, plain_values, together
from kvbm.config.key_list import keys
from kvbm.config.mistakes import FileKind, invalid_text, mistakes_in
from kvbm.config.schema import ConnectorConfig, OffloadSection, Profile
from kvbm.config.values import WrongKey
from kvbm.config.variables import drop_unused, read_variables, valid_variables
from kvbm.errors import ProfileError

Config = TypeVar("Config", ConnectorConfig, Profile)

KEY = "kvbm"
PLACE = f"kv_connector_extra_config.{KEY}"

_NO_TIER = (
    "set `DYN_KVBM_CPU_CACHE_GB` (1e9 bytes, summed over the ranks) or `DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS`; for a "
    "disk tier `DYN_KVBM_DISK_CACHE_GB`"
)
_FILE = FileKind(
    "connector's configuration", keys(ConnectorConfig), {"tiers": "it sets the sizes of host and disk tiers"}
)

log = logging.getLogger(__name__)


def resolve_connector(
    extra_config: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    engine: str,
    warns: bool = True,
    place: str = PLACE,
) -> ConnectorConfig:
    """Resolve `extra_config["kvbm"]`, or the variables if it is missing. `place` names the first in messages.

    ProfileError for a mistake or for a setting that this engine kind does not support; ProfileMistakes for several. A
    variable without effect is logged as a warning if `warns`, else at level DEBUG.
    """
    mistakes: list[ProfileError] = []
    _note_unread(extra_config, place, warns=warns)
    if KEY in extra_config:
        document = _written(extra_config[KEY], place)
    else:
        document, mistakes = _of_variables(environment, warns=warns)
    config, wrong = _validated(document, place, is_complete=not mistakes)
    if config is not None and KEY not in extra_config:
        config = as_upstream(config)
    mistakes += [*wrong, *_unfit_for(engine, document, wrong)]
    if mistakes:
        raise together(mistakes)
    assert config is not None, "no mistakes means a configuration"
    for tier in (config.tiers.host, config.tiers.disk):
        if tier is not None:
            tier.require_a_size()
    return config


def _note_unread(extra_config: Mapping[str, object], place: str, *, warns: bool) -> None:
    """Warns of keys next to `kvbm`. ProfileError if one is a section of ours, or `kvbm` misspelt."""
    level, outside = logging.WARNING if warns else logging.DEBUG, place.removesuffix(f".{KEY}")
    for key in map(str, extra_config.keys() - {KEY}):
        is_section = key in ConnectorConfig.model_fields
        if is_section or get_close_matches(key, [KEY]):
            hint = f"write it as `{place}.{key}`" if is_section else f"did you mean `{KEY}`?"
            raise ProfileError(f"unknown key `{key}` in `{outside}`", hint=hint)
        log.log(level, "`%s.%s` has no effect in kvbm", outside, key)


def _of_variables(environment: Mapping[str, str], *, warns: bool) -> tuple[Document, list[ProfileError]]:
    variables, mistakes = valid_variables(environment)
    document, warnings = read_variables(variables)
    for warning in (*warnings, *drop_unused(document, variables)):
        log.log(logging.WARNING if warns else logging.DEBUG, "%s", warning)
    places = [entry_at(document, ["tiers", name]) for name in ("host", "disk")]  # the shared tier requires one of them
    has_tier = any(tier is not None and tier.section for tier in places)
    if not has_tier and not mistakes:
        raise ProfileError("no tier is configured: kvbm cannot store blocks", hint=_NO_TIER)
    return document, mistakes


def _validated(document: Document, place: str, *, is_complete: bool) -> tuple[ConnectorConfig | None, list[Mistake]]:
    if wrong := list(invalid_text(document)):
        return None, wrong
    try:
        return ConnectorConfig.model_validate(plain_values(document)), []
    except ValidationError as error:
        return None, mistakes_in(error, document, place, _FILE, is_complete=is_complete)


def as_upstream(config: Config) -> Config:
    """Return the configuration of variables with what none of them sets as in NVIDIA's block manager: all computed
    blocks are copied, and the least recently used ones are evicted."""
    tiers = {
        name: tier.model_copy(update={"eviction": "lru"})
        for name in ("host", "disk")
        if (tier := getattr(config.tiers, name)) is not None
    }
    offload = config.offload.model_copy(update={"to_host": "always"})
    return config.model_copy(update={"tiers": config.tiers.model_copy(update=tiers), "offload": offload})


def _unfit_for(engine: str, document: Document, wrong: Sequence[Mistake]) -> Iterator[Mistake]:
    """Yield a mistake for each setting that requires what this engine kind does not say."""
    hints = {"min_priority": "`unset DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY`", "to_host": None}
    for name, hint in hints.items():
        key, kind = f"offload.{name}", type(OffloadSection.model_fields[name].default)
        entry = entry_at(document, key.split("."))
        if entry is None or not isinstance(entry.value, kind) or key in (one.key for one in wrong):
            continue
        try:
            OffloadSection.model_construct(**{name: entry.value}).require_engine(engine)
        except WrongKey as error:
            yield Mistake(f"`{key}` {error}", entry.source, hint=hint, key=key)


def _written(value: object, place: str) -> Document:
    if not isinstance(value, Mapping):
        raise ProfileError(
            f"`{place}` must be a mapping with `tiers`, `offload`, `onboard`, `transfer` and `metrics`, not `{value}`"
        )
    return _document(value, place, place)


def _document(values: Mapping[object, object], path: str, place: str) -> Document:
    """Convert values to a document. The source text of each entry is `path = JSON`."""
    document: Document = {}
    for name, value in values.items():
        here = f"{path}.{name}"
        text = f"{here} = {json.dumps(value, default=str)}"
        key = Source(place, text, len(path) + 1, len(str(name)))
        source = Source(place, text, len(here) + 3, len(text) - len(here) - 3)
        inside = _document(value, here, place) if isinstance(value, Mapping) else value
        document[str(name)] = Entry(key, source, inside)
    return document
