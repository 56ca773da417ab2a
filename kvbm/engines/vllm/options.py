"""Which options of vLLM count for the identity of its blocks: all, except those in options.yaml.

Two replicas of one model differ in addresses, ranks, sizes of memory and limits, and share their blocks. An option that
is not named there counts, also one that a later version of vLLM adds: that costs hits, never answers.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbm.identity.description import Hashed
from kvbm.identity.machine import precision_variables
from kvbm.identity.options import Options, depends_on_length

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNCOUNTED = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text())
OTHER_SECTIONS = frozenset(" ".join(_UNCOUNTED["sections"]).split())
OMITTED = {name: frozenset(" ".join(fields).split()) for name, fields in _UNCOUNTED["fields"].items()}
OTHER_VARIABLES = re.compile("|".join(_UNCOUNTED["variables"].split()))
COMPILATION = ("mode", "level", "backend", "custom_ops", "pass_config", "use_inductor_graph_partition")


def sections(vllm_config: VllmConfig, options: Options) -> dict[str, str | Hashed]:
    """Return a digest of each section of the configuration that counts. Raises Unidentified or OSError."""
    names = (field.name for field in dataclasses.fields(vllm_config))
    values = {name: getattr(vllm_config, name, None) for name in names if name not in OTHER_SECTIONS}
    compilation = getattr(vllm_config, "compilation_config", None)
    values["compilation"] = {name: getattr(compilation, name, None) for name in COMPILATION}
    platform: Any = getattr(vllm_config, "additional_config", None)
    values["platform"] = platform.compute_hash() if hasattr(platform, "compute_hash") else platform
    return {name: options.digest(value) for name, value in values.items() if value is not None}


def environment(options: Options) -> str | Hashed:
    """Return a digest of the variables that can change how vLLM computes, such as a quantised reduction."""
    names = {name for name in os.environ if name.startswith("VLLM_") and not OTHER_VARIABLES.search(name)}
    return options.digest({name: os.environ[name] for name in names} | precision_variables())


def length(model_config: Any) -> int:
    """Return the maximum length of a sequence if the KV of shorter ones depends on it, otherwise 0. It is that with
    which the model was loaded: -1 if the configuration gave it, whatever vLLM has reduced it to since."""
    if not depends_on_length(model_config.hf_config.to_dict()):
        return 0
    is_derived = getattr(model_config, "original_max_model_len", None) == -1
    return -1 if is_derived else int(model_config.max_model_len)
