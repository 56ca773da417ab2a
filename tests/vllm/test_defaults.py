"""The defaults of facts that a configuration leaves out, against the configuration classes of transformers and vLLM."""

import json
import subprocess
import sys
from typing import Any

import pytest

from kvbm.sizing.families.facts import family_defaults

REMOTE_OR_FLAT = {"mimo", "qwen2_vl", "qwen2_5_vl"}  # their defaults are those of another type
OF_EACH_LAYER = {"gemma4_text"}  # its class refuses to name the heads of all layers
SCRIPT = """
import json, sys
from transformers import CONFIG_MAPPING
from vllm.transformers_utils.config import _CONFIG_REGISTRY
found = {}
for kind, names in json.loads(sys.argv[1]).items():
    make = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else _CONFIG_REGISTRY[kind]
    config = make()
    found[kind] = {name: getattr(config, name, None) for name in names}
    found[kind]["query heads"], found[kind]["width"] = config.num_attention_heads, config.hidden_size
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def truth() -> dict[str, dict[str, Any]]:
    kinds = {kind: list(names) for kind, names in family_defaults().items() if kind not in REMOTE_OR_FLAT}
    kinds = {kind: names for kind, names in kinds.items() if kind not in OF_EACH_LAYER}
    run = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(kinds)], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", sorted(set(family_defaults()) - REMOTE_OR_FLAT - OF_EACH_LAYER))
def test_defaults_are_those_of_the_configuration_class(kind: str, truth: dict[str, dict[str, Any]]) -> None:
    found, wrong = truth[kind], {}
    follows = {
        "num_key_value_heads": (None, found["query heads"]),
        "num_kv_heads": (None, found["query heads"]),
        "head_dim": (None, found["width"] // found["query heads"]),
    }
    for name, default in family_defaults()[kind].items():
        allowed = follows.get(name, (None,)) if default is None else (default,)
        if found[name] not in allowed:
            wrong[name] = (default, found[name])
    assert wrong == {}


def test_flat_files_have_the_defaults_of_their_text_model() -> None:
    defaults = family_defaults()
    assert defaults["qwen2_vl"] == defaults["qwen2_vl_text"]
    assert defaults["qwen2_5_vl"] == defaults["qwen2_5_vl_text"]
    assert defaults["mimo"] == defaults["qwen2"]
