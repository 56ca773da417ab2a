"""Rules for single flags in `engine.arguments` of vLLM: their spelling, and the flags that kvbm sets itself.

A flag that kvbm sets is refused, with the profile key that sets it: of two values, one would be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.spelling import snake_case

CONNECTOR = "DynamoConnector"
CONNECTOR_MODULE = "kvbm.vllm_integration.connector"

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
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


def flag_name(written: str) -> str:
    """Return the name of a flag in the schema, with underscores instead of hyphens."""
    return written.replace("-", "_")


def refused_by(document: Document, reason_against: Callable[[str, Entry], tuple[str, str] | None]) -> Iterator[Mistake]:
    """Yield a mistake for each entry of `engine.arguments` with a reason against it: a message and a hint."""
    arguments = entry_at(document, ["engine", "arguments"])
    for name, entry in ((arguments.section if arguments else None) or {}).items():
        if (reason := reason_against(name, entry)) is not None:
            yield Mistake(reason[0], entry.key, hint=reason[1], key=f"engine.arguments.{name}")


def invalid_name(name: str, entry: Entry, *, example: str) -> tuple[str, str] | None:
    """Return the message and the hint for a name that is not written as a flag."""
    if NAME.fullmatch(name):
        return None
    written = entry.key.written if entry.key.line else entry.key.written.rpartition(".")[2]
    meant = snake_case(name)
    hint = f"write `{meant}`" if NAME.fullmatch(meant) else f"write the name as a key, such as `{example}`"
    return f"`{written}` is not a valid flag name", hint


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
