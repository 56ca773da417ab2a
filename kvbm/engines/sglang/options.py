"""Rules for single flags in `engine.arguments` of SGLang: what kvbm sets, and other caches in its place.

options.json has the names and what to write instead.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.engine import SglangArguments, flags_of_others
from kvbm.config.flags import invalid_name, refused_by
from kvbm.config.spelling import NEAR

STORAGE = {
    "backend_name": "kvbm",
    "module_path": "kvbm.sglang_integration.storage",
    "class_name": "KvbmHiCacheStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")  # of its host memory, that kvbm can store

_NAMES = json.loads(Path(__file__).with_name("options.json").read_text())
KVBM_SETS: Mapping[str, str] = _NAMES["kvbm_sets"]
SAME_FLAG: Mapping[str, str] = _NAMES["same_flag"]  # names of other engines, and the flag of SGLang
# Flags of other engines that SGLang does not have. They are listed, because a flag that `SglangArguments` does not
# declare may be one of SGLang.
_OF_OTHERS = flags_of_others("sglang") - {"device"}
# Declared names to which no other flag of SGLang is similar: one that is similar to them is misspelt.
_DISTINCT = SglangArguments.model_fields.keys() - {"tp_size", "pp_size", "dp_size"}


def refused_flags(document: Document) -> Iterator[Mistake]:
    """Yield a mistake for each flag that is not SGLang's, that kvbm sets, or that replaces its storage."""
    yield from refused_by(document, _reason_against)
    extra = entry_at(document, ["engine", "arguments", "hicache_storage_backend_extra_config"])
    for name, entry in ((extra.section if extra else None) or {}).items():
        if name in STORAGE or name == "kvbm":
            hint = "use `tiers`, `offload` and `metrics` of the profile" if name == "kvbm" else "remove it"
            key = f"engine.arguments.hicache_storage_backend_extra_config.{name}"
            yield Mistake(f"`{name}` is set by kvbm", entry.key, hint=hint, key=key)


def _reason_against(name: str, entry: Entry) -> tuple[str, str] | None:
    if (reason := invalid_name(name, entry, example="page_size: 64")) is not None:
        return reason
    if name in KVBM_SETS:
        return f"`{name}` is set by kvbm" if "set" in KVBM_SETS[name] else f"`{name}` cannot be used", KVBM_SETS[name]
    if name == "served_model_name" and ":" in str(entry.value):
        return "`served_model_name` has a colon, which SGLang refuses", "write a name without a colon"
    if name in SAME_FLAG:
        return f"`{name}` is not a flag of SGLang", f"write `{SAME_FLAG[name]}`"
    if name in _OF_OTHERS:
        return f"`{name}` is not a flag of SGLang", "remove it"
    if name not in SglangArguments.model_fields and (meant := similar_flag(name)) is not None:
        return f"`{name}` is not a flag of SGLang", f"did you mean `{meant}`?"
    return None


def similar_flag(name: str) -> str | None:
    """Return the declared flag of which an undeclared one is a misspelling; None if it may be one of SGLang."""
    return next(iter(difflib.get_close_matches(name, _DISTINCT, n=1, cutoff=NEAR)), None)
