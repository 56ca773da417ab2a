"""Rules for single flags in `engine.arguments` of vLLM: their spelling, and the flags that kvbm sets itself.

A flag that kvbm sets is refused, with the profile key that sets it: of two values, one would be ignored. flags.json
has the names and what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.flags import invalid_name, refused_by

CONNECTOR = "DynamoConnector"
CONNECTOR_MODULE = "kvbm.vllm_integration.connector"
OFFLOADING_CONNECTOR = "OffloadingConnector"  # vLLM's own
TIER = "KvbmTier"
TIER_MODULE = "kvbm.vllm_integration.secondary_tier"

_NAMES = json.loads(Path(__file__).with_name("flags.json").read_text())
SIGNS: frozenset[str] = frozenset(_NAMES["signs"])  # keys of a file of flags that are not keys of other files
KVBM_SETS: Mapping[str, str] = _NAMES["kvbm_sets"]
# Flags of the embedded engine that vLLM has not. They are listed, because a flag that `VllmArguments` does not declare
# may be one of vLLM.
EMBEDDED_ONLY: Mapping[str, str] = _NAMES["embedded_only"]


def refused_flags(document: Document) -> Iterator[Mistake]:
    """Yield a mistake for each invalid flag, flag that kvbm sets, and setting that replaces the connector's."""
    yield from refused_by(document, _reason_against)
    transfer = entry_at(document, ["engine", "arguments", "kv_transfer_config"])
    yield from _contradictions((transfer.section if transfer else None) or {})


def _reason_against(name: str, entry: Entry) -> tuple[str, str] | None:
    if (reason := invalid_name(name, entry, example="max_model_len: 8192")) is not None:
        return reason
    if name in KVBM_SETS:
        return f"`{name}` is set by kvbm", KVBM_SETS[name]
    if name in EMBEDDED_ONLY:
        return f"`{name}` is a flag of the embedded engine", EMBEDDED_ONLY[name]
    if entry.value == "" and name.startswith(("enable_", "disable_")):
        return f"`{name}` has an empty text as its value", f"write `{name}: true`"
    if name.startswith("no_"):
        return f"`{name}` is the negated form of a flag", f"write `{name.removeprefix('no_')}: false`"
    return None


def _contradictions(transfer: Mapping[str, Entry]) -> Iterator[Mistake]:
    extra = transfer.get("kv_connector_extra_config")
    inside = (extra.section or {}).get("kvbm") if extra is not None else None
    if inside is not None:
        hint, name = "use `tiers`, `offload` and `transfer` of the profile", "kv_connector_extra_config.kvbm"
        key = f"engine.arguments.kv_transfer_config.{name}"
        yield Mistake(f"`{name}` is set by kvbm from the profile", inside.key, hint=hint, key=key)
