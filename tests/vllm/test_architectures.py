"""Every architecture that sizing accepts, in forms that configurations may have, against vLLM's own classes.

Where vLLM constructs a model, the sizes are the same or sizing refuses the model; it never gives another number.
Long: `pytest -m soak tests/vllm/test_architectures.py`, about 15 minutes on an idle machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_forms import configurations
from model_specs import MORE_ARGUMENTS
from test_model_sizes import ours

from kvbm.errors import ProfileError
from kvbm.sizing import SizeUnknown
from kvbm.sizing.families.table import READERS

REGISTERED = "from vllm.model_executor.models import ModelRegistry as r; print(' '.join(r.get_supported_archs()))"
BY_TRANSFORMERS = {  # vLLM has no class for them and uses its backend for transformers
    *("ArceeForCausalLM", "GlmForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
    *("OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "PhiForCausalLM", "SeedOssForCausalLM"),
    *("SmolLM3ForCausalLM", "Starcoder2ForCausalLM"),
}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "blocks of 64 tokens": {"block_size": 64},
    "blocks of 256 tokens": {"block_size": 256},
    "8 bits": {"kv_cache_dtype": "fp8"},
    "8 bits in blocks of 96 tokens": {"kv_cache_dtype": "fp8", "block_size": 96},
    "32 bits": {"dtype": "float32"},
}


def compare(models: dict[str, dict[str, Any]], file: Path, *ranks: str, **more: Any) -> int:
    """Compare all models and return how many have a size. Where vLLM refuses one, we may say anything."""
    file.write_text(json.dumps(models))
    command = [sys.executable, str(Path(__file__).with_name("model_specs.py")), str(file), *ranks]
    environment = {**os.environ, MORE_ARGUMENTS: json.dumps(more)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    wrong, equal = {}, 0
    for name, found in json.loads(run.stdout.splitlines()[-1]).items():
        for form, expected in found.items():
            if not isinstance(expected, dict):
                continue
            count, layout, cpu = form.split()
            try:
                size = ours(models[name], int(count), layout, cpu, **more)
            except (SizeUnknown, ProfileError):
                continue
            equal += size == expected
            if size != expected:
                wrong[name, form] = (expected, size)
    assert wrong == {}
    return equal


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_no_architecture_has_another_size_than_in_vllm(tmp_path: Path) -> None:
    models = configurations()
    assert compare(models, tmp_path / "models.json", "1") > len(models) / 2


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_the_engine_change_sizes_as_in_vllm(name: str, tmp_path: Path) -> None:
    models = {name: facts for name, facts in configurations().items() if name.endswith(" plain")}
    assert compare(models, tmp_path / "models.json", "1", "2", **ARGUMENTS[name]) > len(models)


@pytest.mark.timeout(300)
def test_every_other_architecture_of_vllm_is_refused_by_name() -> None:
    run = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=True)
    registered = set(run.stdout.splitlines()[-1].split())
    assert len(registered) > 200
    for architecture in registered - set(READERS):
        with pytest.raises(SizeUnknown, match=f"`{architecture}`"):
            ours({"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 2}, 1, "LBNHC")
    assert set(READERS) - registered - BY_TRANSFORMERS == {"MiniMaxM3ForCausalLM"}  # in the file of the model itself
