"""Rules for single flags in `engine.arguments` of vLLM: their spelling, and the flags that kvbm sets itself.

A flag that kvbm sets is refused, with the profile key that sets it: of two values, one would be ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.flags import invalid_name, refused_by

CONNECTOR = "DynamoConnector"
CONNECTOR_MODULE = "kvbm.vllm_integration.connector"
OFFLOADING_CONNECTOR = "OffloadingConnector"  # vLLM's own
TIER = "KvbmTier"
TIER_MODULE = "kvbm.vllm_integration.secondary_tier"
# Keys of a file of flags that are not keys of other files.
SIGNS = frozenset(
    (
        *("kv_transfer_config", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization"),
        *("kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs", "compilation_config"),
        *("enable_prefix_caching", "no_enable_prefix_caching", "served_model_name", "trust_remote_code"),
    )
)

_PLAIN_HTTP = "kvbm uses plain HTTP; use a reverse proxy for TLS"
_NATIVE = "kvbm replaces it; set the size of host memory with `tiers.host`"

KVBM_SETS: Mapping[str, str] = {
    "model": "use `engine.model`",
    "model_tag": "use `engine.model`",
    "host": "use `server.host`",
    "port": "use `server.port`",
    "uds": "use `server.host` and `server.port`",
    "config": "write the flags of that file into `engine.arguments`",
    "help": "remove it; `vllm serve --help=all` shows the flags",
    "headless": "remove it; kvbm requires the server of the engine",
    "grpc": "remove it; kvbm uses HTTP",
    "ssl_keyfile": _PLAIN_HTTP,
    "ssl_certfile": _PLAIN_HTTP,
    "kv_offloading_size": _NATIVE,
    "kv_offloading_backend": _NATIVE,
    "enable_prompt_tokens_details": "remove it; kvbm always sets it, to learn the number of cached tokens",
}
# Flags of the embedded engine that vLLM has not, and what to write instead. They are listed, because a flag that
# `VllmArguments` does not declare may be one of vLLM.
EMBEDDED_ONLY: Mapping[str, str] = {
    "num_blocks": "use `num_gpu_blocks_override` with vLLM",
    "prefix_caching": "use `enable_prefix_caching` with vLLM",
    "device": "remove it; a build of vLLM has one device",
    "threads": "set the cores in `engine.environment`: `VLLM_CPU_OMP_THREADS_BIND: 0-7`",
    **dict.fromkeys(("verify", "kv_layout", "worker_process"), "remove it, or use `engine.kind: embedded`"),
}


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
