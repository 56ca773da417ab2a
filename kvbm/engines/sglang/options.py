"""Rules for single flags in `engine.arguments` of SGLang: what kvbm sets, and other caches in its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

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
_PLAIN_HTTP = "kvbm uses plain HTTP; use a reverse proxy for TLS"
_OTHER_CACHE = "remove it: kvbm stores what SGLang's hierarchical cache hands down"

KVBM_SETS: Mapping[str, str] = {
    "model_path": "use `engine.model`",
    "model": "use `engine.model`",
    "host": "use `server.host`",
    "port": "use `server.port`",
    "config": "write the flags of that file into `engine.arguments`",
    "help": "remove it; `python -m sglang.launch_server --help` shows the flags",
    "ssl_keyfile": _PLAIN_HTTP,
    "ssl_certfile": _PLAIN_HTTP,
    "enable_metrics": "remove it; kvbm always sets it, to read the server's counters",
    "enable_cache_report": "remove it; kvbm always sets it, to learn the number of cached tokens",
    "hicache_storage_backend": "remove it; kvbm sets it, and `kvbm serve --baseline` leaves it out",
    **dict.fromkeys(("enable_lmcache", "enable_flexkv", "radix_cache_backend"), _OTHER_CACHE),
    "disable_radix_cache": "remove it: without its prefix cache, SGLang stores nothing",
}

# Names of other engines, and the flag of SGLang.
SAME_FLAG: Mapping[str, str] = {
    "max_model_len": "context_length",
    "max_seq_len": "context_length",
    "block_size": "page_size",
    "tokens_per_block": "page_size",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_batch_size": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_tokens": "chunked_prefill_size",
    "num_blocks": "max_total_tokens",
    "num_gpu_blocks_override": "max_total_tokens",
}
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
