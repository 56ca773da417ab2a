"""Recognises files of other tools that are given as a profile, so that one error says what the file is.

Without this, each of their keys would be an unknown key of a profile.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

OWN = frozenset({"engine", "tiers", "extends"})


@dataclass(frozen=True, slots=True)
class _Kind:
    """A file has this kind if its keys contain one of the sets `signs`."""

    name: str
    signs: tuple[frozenset[str], ...]
    hint: str


_IMPORT = "`kvbm profile import-env`, run in its environment, converts its `DYN_KVBM_*` variables to a profile"
_KINDS = (
    _Kind("a manifest of Kubernetes", (frozenset({"apiVersion", "kind"}),), _IMPORT),
    _Kind("a Compose file", (frozenset({"services"}),), _IMPORT),
    _Kind(
        "a values file of a Helm chart for vLLM",
        tuple(frozenset({key}) for key in ("servingEngineSpec", "modelArtifacts")),
        "write the model and the flags of vLLM into `engine.model` and `engine.arguments` of a profile",
    ),
    _Kind(
        "a configuration of LMCache",
        (
            *(frozenset({key}) for key in ("local_cpu", "max_local_cpu_size", "local_disk", "remote_serde")),
            *(frozenset({"chunk_size", key}) for key in ("local_device", "remote_url")),
        ),
        "`max_local_cpu_size` is `tiers.host.capacity`, `local_disk` is `tiers.disk`, `remote_url` is `tiers.shared`",
    ),
    _Kind(
        "a configuration of TensorRT-LLM",
        (frozenset({"kv_cache_config"}), frozenset({"kv_connector_config"})),
        "write its options into `engine.arguments` of a profile with `engine.kind: tensorrt-llm`",
    ),
    _Kind(
        "a configuration of vLLM",
        tuple(
            frozenset({key})
            for key in (
                *("kv_transfer_config", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization"),
                *("kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs", "compilation_config"),
                *("enable_prefix_caching", "no_enable_prefix_caching", "served_model_name", "trust_remote_code"),
            )
        ),
        "write its flags into `engine.arguments` of a profile with `engine.kind: vllm`",
    ),
    _Kind(
        "a configuration of a Hugging Face model",
        (frozenset({"architectures", "model_type"}),),
        "set its directory as `engine.model`; `kvbm size DIR` shows its sizes",
    ),
)
_MANIFEST = re.compile(r"^apiVersion:(?s:.*?)^kind:", re.MULTILINE)
_OWN_KEY = re.compile(rf"^(?:{'|'.join(sorted(OWN))}):", re.MULTILINE)
_VARIABLE = re.compile(r"^\s*(?:export\s+)?[A-Z][A-Z0-9_]+=", re.MULTILINE)


def foreign_file(keys: Collection[str]) -> tuple[str, str] | None:
    """Return what the file with these keys is, and a hint; None if it may be a profile."""
    names = {key.replace("-", "_") for key in keys}
    if names & OWN:
        return None
    return next(((kind.name, kind.hint) for kind in _KINDS if any(sign <= names for sign in kind.signs)), None)


def hint_for_text(text: str) -> str | None:
    """Return a hint for a text that is not one mapping: an env file, a script, a unit, or several manifests."""
    if _MANIFEST.search(text) and not _OWN_KEY.search(text):
        return f"this is a manifest of Kubernetes, not a profile; {_IMPORT}"
    return _IMPORT if _VARIABLE.search(text) else None
