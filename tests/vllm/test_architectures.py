"""Every architecture that sizing accepts, in forms that configurations may have, against vLLM's own classes.

Where vLLM constructs a model, the sizes are the same or sizing refuses the model; it never gives another number.
Long: `pytest -m soak tests/vllm/test_architectures.py`, about 15 minutes on an idle machine.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from model_forms import configurations
from test_model_sizes import ours

from kvbm.errors import ProfileError
from kvbm.sizing import SizeUnknown
from kvbm.sizing.families import READERS

REGISTERED = "from vllm.model_executor.models import ModelRegistry as r; print(' '.join(r.get_supported_archs()))"
BY_TRANSFORMERS = {  # vLLM has no class for them and uses its backend for transformers
    *("ArceeForCausalLM", "GlmForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
    *("OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "PhiForCausalLM", "SeedOssForCausalLM"),
    *("SmolLM3ForCausalLM", "Starcoder2ForCausalLM"),
}


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_no_architecture_has_another_size_than_in_vllm(tmp_path: Path) -> None:
    models = configurations()
    file = tmp_path / "models.json"
    file.write_text(json.dumps(models))
    script = Path(__file__).with_name("model_specs.py")
    run = subprocess.run([sys.executable, script, file, "1"], capture_output=True, text=True, check=True)
    wrong, equal = {}, 0
    for name, found in json.loads(run.stdout.splitlines()[-1]).items():
        for form, expected in found.items():
            if not isinstance(expected, dict):
                continue  # vLLM refuses it as well
            ranks, layout = form.split()
            try:
                size = ours(models[name], int(ranks), layout)
            except (SizeUnknown, ProfileError):
                continue
            equal += size == expected
            if size != expected:
                wrong[name, form] = (expected, size)
    assert wrong == {}
    assert equal > len(models) / 2


@pytest.mark.timeout(300)
def test_every_other_architecture_of_vllm_is_refused_by_name() -> None:
    run = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=True)
    registered = set(run.stdout.splitlines()[-1].split())
    assert len(registered) > 200
    for architecture in registered - set(READERS):
        with pytest.raises(SizeUnknown, match=f"`{architecture}`"):
            ours({"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 2}, 1, "LBNHC")
    assert set(READERS) - registered - BY_TRANSFORMERS == {"MiniMaxM3ForCausalLM"}  # in the file of the model itself
