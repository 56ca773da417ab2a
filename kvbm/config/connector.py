"""The configuration of a connector, inside an engine's process: what a launcher wrote, or the DYN_KVBM_* variables.

`kvbm serve` resolves a profile and hands over its contents, and then the variables no longer count. Under an engine's
own command line, as NVIDIA's block manager is used, every process resolves the same variables; digests tell whether
they came to the same result.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from pydantic import ValidationError

from kvbm.config.document import Document, Entry, Source, plain_values, together
from kvbm.config.mistakes import FileKind, mistakes_in
from kvbm.config.schema import ConnectorConfig, keys
from kvbm.config.variables import read_variables, settle
from kvbm.errors import ProfileError

KEY = "kvbm"
PLACE = f"kv_connector_extra_config.{KEY}"

_NO_TIER = (
    "set `DYN_KVBM_CPU_CACHE_GB` (1e9 bytes, over all ranks) or `DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS`, for a disk "
    "`DYN_KVBM_DISK_CACHE_GB`"
)
_FILE = FileKind("connector's configuration", keys(ConnectorConfig), {"tiers": "it says how large host and disk are"})

log = logging.getLogger(__name__)


def resolve_connector(
    extra_config: Mapping[str, object], environment: Mapping[str, str], *, engine: str, warns: bool = True
) -> ConnectorConfig:
    """What `extra_config["kvbm"]` says, else what the variables say. ProfileError for a mistake, without a tier, or for
    what this kind of engine cannot do.

    A variable that has no effect is logged as a warning, if this is the process that `warns`.
    """
    config = _resolve(extra_config, environment, warns=warns)
    try:
        config.offload.require_priorities_from(engine)
    except ValueError as error:
        raise ProfileError(
            f"`offload.min_priority` {error}", hint="`unset DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY`"
        ) from None
    return config


def _resolve(extra_config: Mapping[str, object], environment: Mapping[str, str], *, warns: bool) -> ConnectorConfig:
    if KEY in extra_config:
        return _validated(_written(extra_config[KEY]))
    document, warnings = read_variables(environment)
    for warning in (*warnings, *settle(document)):
        log.log(logging.WARNING if warns else logging.DEBUG, "%s", warning)
    tiers = document.get("tiers")
    if tiers is None or not any(tier.section for tier in (tiers.section or {}).values()):
        raise ProfileError("no tier is configured: kvbm has nowhere to keep blocks", hint=_NO_TIER)
    return _validated(document)


def _validated(document: Document) -> ConnectorConfig:
    try:
        return ConnectorConfig.model_validate(plain_values(document))
    except ValidationError as error:
        raise together(mistakes_in(error, document, PLACE, _FILE)) from None


def _written(value: object) -> Document:
    if not isinstance(value, Mapping):
        raise ProfileError(
            f"`{PLACE}` must be a mapping with `tiers`, `offload`, `onboard`, `transfer` and `metrics`, not `{value}`"
        )
    return _document(value, PLACE)


def _document(values: Mapping[object, object], path: str) -> Document:
    """The values as a document whose every entry shows its own line: path, equals sign, JSON."""
    document: Document = {}
    for name, value in values.items():
        here = f"{path}.{name}"
        text = f"{here} = {json.dumps(value, default=str)}"
        key = Source(PLACE, text, len(path) + 1, len(str(name)))
        source = Source(PLACE, text, len(here) + 3, len(text) - len(here) - 3)
        inside = _document(value, here) if isinstance(value, Mapping) else value
        document[str(name)] = Entry(key, source, inside)
    return document
