"""Models made on the spot: whole or not there, the same whoever makes them, and refused where they would overwrite."""

import json
import os
import subprocess
import sys

import pytest
from terminal import HANGS_S

from kvbm.engines import make_model

pytest.importorskip("torch")
PROGRAM = (sys.executable, "-m", "kvbm_cli.make_model")
MATERIALISE = "from kvbm.engines.make_model import materialise; print(materialise('vllm-25m-lora-a'))"


def tensors(directory):
    from safetensors.torch import load_file

    return load_file(directory / "adapter_model.safetensors")


def test_two_that_want_a_model_at_once_get_one_whole_model(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", MATERIALISE], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    found = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert found == {str(path) for path in (tmp_path / "kvbm" / "models").iterdir()}
    assert {path.name for path in next((tmp_path / "kvbm" / "models").iterdir()).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "complete",
    }


def test_weights_follow_from_the_preset_alone(tmp_path):
    import torch

    for name, preset in (("one", "vllm-25m-lora-a"), ("two", "vllm-25m-lora-a"), ("other", "vllm-25m-lora-b")):
        make_model.make(preset, tmp_path / name)
    one, two, other = (tensors(tmp_path / name) for name in ("one", "two", "other"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one)


def test_a_model_is_bfloat16_with_a_tokenizer_that_gives_any_text_back(tmp_path):
    from transformers import AutoTokenizer

    make_model.make("vllm-swa", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["sliding_window"]) == ("bfloat16", 256)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == make_model.VOCABULARY_SIZE
    text = "Grüße, 世界!\n\ttabs and  spaces"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("preset", ["vllm-granite4", "vllm-qwen3-next"])
def test_the_states_of_a_hybrid_remember(tmp_path, preset):
    """With the usual weights, a state that was not loaded changes no token."""
    from safetensors.torch import load_file

    make_model.make(preset, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for suffix, value in {**make_model.LONG_MEMORY, "mamba.norm.weight": 3.0, "linear_attn.norm.weight": 3.0}.items():
        found = [tensor for name, tensor in weights.items() if name.endswith(suffix)]
        assert all((tensor == value).all() for tensor in found), suffix
        assert len(found) == 3 or suffix.endswith("norm.weight"), suffix
    assert sum(name.endswith(("mamba.norm.weight", "linear_attn.norm.weight")) for name in weights) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "usage:"), (("vllm-26m", "x"), "presets: vllm-25m"), (("vllm-25m-lora-a", "."), "exists already")],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path, arguments, message):
    done = subprocess.run([*PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_torchvision_that_does_not_load_is_left_out(tmp_path):
    """SGLang installs one for CUDA, beside a torch for CPUs."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    program = (
        "from kvbm.engines import make_model; make_model._hide_broken_torchvision()\n"
        "from transformers.utils import is_torchvision_available; assert not is_torchvision_available()"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
