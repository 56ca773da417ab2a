"""Recognises files of other tools that are given as a profile, so that one error says what the file is.

Without this, each of their keys would be an unknown key of a profile.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.key_list import keys
from kvbm.config.spelling import snake_case

OWN = frozenset({"engine", "tiers", "extends"})
DESCRIPTION = "description"  # the key whose text is for people
NEAR = 0.75  # similarity of a key to a misspelt key of a profile
MAX_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Kind:
    """A file has this kind if its keys contain one of the sets `signs`."""

    name: str
    signs: tuple[frozenset[str], ...]
    hint: str


TRTLLM_OPTIONS, VLLM_FLAGS = "a configuration of TensorRT-LLM", "a configuration of vLLM"
_IMPORT = "`kvbm profile import FILE` converts it to a profile"
_KINDS = (
    _Kind("a manifest of Kubernetes", (frozenset({"apiVersion", "kind"}),), _IMPORT),
    _Kind("a Compose file", (frozenset({"services"}),), _IMPORT),
    _Kind(
        "a values file of a Helm chart for vLLM",
        tuple(frozenset({key}) for key in ("servingEngineSpec", "modelArtifacts")),
        _IMPORT,
    ),
    _Kind(
        "a values file of a Helm chart",
        (frozenset({"replicaCount"}), frozenset({"image", "resources"})),
        "write the model and the flags of the engine into `engine.model` and `engine.arguments` of a profile",
    ),
    _Kind(
        "a recipe of vLLM",
        (frozenset({"meta", "model"}),),
        "write its model and flags into `engine.model` and `engine.arguments` of a profile with `engine.kind: vllm`",
    ),
    _Kind(
        "a configuration of Dynamo's services",
        tuple(frozenset({key}) for key in ("Frontend", "Processor", "VllmWorker", "TRTLLMWorker")),
        "write the model and the flags of a worker into `engine.model` and `engine.arguments` of a profile",
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
        TRTLLM_OPTIONS,
        tuple(
            frozenset({key})
            for key in (
                *("kv_cache_config", "kv_connector_config", "cuda_graph_config", "moe_config", "max_num_tokens"),
                *("cache_transceiver_config", "enable_attention_dp", "moe_expert_parallel_size", "print_iter_log"),
                *("max_batch_size", "disable_overlap_scheduler", "build_config"),
            )
        ),
        _IMPORT,
    ),
    _Kind(
        VLLM_FLAGS,
        tuple(
            frozenset({key})
            for key in (
                *("kv_transfer_config", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization"),
                *("kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs", "compilation_config"),
                *("enable_prefix_caching", "no_enable_prefix_caching", "served_model_name", "trust_remote_code"),
            )
        ),
        _IMPORT,
    ),
    _Kind(
        "a `--kv-transfer-config` of vLLM",
        (frozenset({"kv_connector"}),),
        "kvbm writes it for a profile with `engine.kind: vllm`; docs/guide/vllm.md is about vLLM's own command line",
    ),
    _Kind(
        "a configuration of a Hugging Face model",
        (frozenset({"architectures", "model_type"}),),
        "set its directory as `engine.model`; `kvbm size DIR` shows its sizes",
    ),
)
_MANIFEST = [re.compile(rf"^{key}:", re.MULTILINE) for key in ("apiVersion", "kind")]
_TEMPLATE = re.compile(r"^[ \t]*\{\{", re.MULTILINE)
_OWN_KEY = re.compile(rf"^(?:{'|'.join(sorted(OWN))}):", re.MULTILINE)
_VARIABLE = re.compile(r"^[ \t]*(?:export[ \t]+)?[A-Z][A-Z0-9_]+=", re.MULTILINE)


def foreign_file(names: Collection[str]) -> tuple[str, str] | None:
    """Return what the file with these keys is, and a hint; None if it may be a profile."""
    found = {name.replace("-", "_") for name in names}
    if found & OWN:
        return None
    known = next(((kind.name, kind.hint) for kind in _KINDS if any(sign <= found for sign in kind.signs)), None)
    return known or _unlike_a_profile(names)


def _unlike_a_profile(names: Collection[str]) -> tuple[str, str] | None:
    """Describe a file without a key of a profile, and most of whose keys are none of its sections either."""
    sections, leaves = _own_names()
    spelt = [snake_case(name.partition(".")[0]) for name in names]
    specific = [name for name in sections if name != DESCRIPTION]  # files of every kind have descriptions
    if any(difflib.get_close_matches(name, specific, n=1, cutoff=NEAR) for name in spelt):
        return None
    if 2 * sum(name in leaves for name in spelt) >= len(spelt):
        return None
    shown = ", ".join(f"`{name}`" for name in list(names)[:MAX_SHOWN])
    more = ", ..." if len(names) > MAX_SHOWN else ""
    return f"a file with the keys {shown}{more}", f"keys of a profile: {', '.join(f'`{name}`' for name in sections)}"


@cache
def _own_names() -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the top-level keys of a profile, and the names of all keys."""
    paths = [key.path for kind in ENGINE_KINDS for key in keys(engine=kind)]
    sections = tuple(dict.fromkeys(path.partition(".")[0] for path in paths))
    return sections, frozenset(path.rpartition(".")[2] for path in paths)


def hint_for_text(text: str) -> str | None:
    """Return a hint for a text that is not one mapping: an env file, a script, a unit, or several manifests."""
    if _OWN_KEY.search(text):
        return _IMPORT if _VARIABLE.search(text) else None
    if _TEMPLATE.search(text):
        return "this is a template of Helm, not a profile; `helm template` shows the manifests that it makes"
    if all(key.search(text) for key in _MANIFEST):
        return f"this is a manifest of Kubernetes, not a profile; {_IMPORT}"
    return _IMPORT if _VARIABLE.search(text) else None
