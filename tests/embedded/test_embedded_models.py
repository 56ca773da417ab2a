"""Loading: what the synthetic models are, what names their KV, and how everything unsuitable is refused."""

import json
import os
import sys

import pytest
import tiny_models
import torch
from engine_rig import EngineRig

from kvbm.engines.embedded.engine import attention, model, synthetic_models, tokenizer
from kvbm.engines.embedded.engine.config import EngineConfig
from kvbm.errors import EnvironmentProblem, ProfileError

TEXTS = ["Once upon a time", "def main():\n    return", "The capital of France is", "1, 2, 3, 4,", "x"]


def load(path, **config) -> model.LoadedModel:
    return model.load(EngineConfig(model=str(path), **config))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tiny_models.save("qwen3", tmp_path_factory.mktemp("model"))


def change_config(path, **changes) -> None:
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(facts | changes))


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the saved model that a test may spoil."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
        os.utime(tmp_path / file.name, ns=(1, file.stat().st_mtime_ns))
    return tmp_path


# -- synthetic models --------------------------------------------------------------------------------------------------


def test_outputs_of_the_tiny_model_vary_and_differ_from_prompt_to_prompt():
    with EngineRig("synthetic:tiny", num_blocks=64, threads=1) as rig:
        prompts = [rig.engine.model.tokenizer.encode(text) for text in TEXTS]
        outputs = [result.token_ids for result in rig.generate(prompts, max_tokens=24)]
    assert all(len(set(output)) >= 10 for output in outputs), [len(set(output)) for output in outputs]
    assert len({tuple(output) for output in outputs}) == len(TEXTS)


def test_weights_follow_from_the_seed():
    first, same, other = (load("synthetic:tiny", seed=seed, verify=False) for seed in (1, 1, 2))
    for name, weight in first.network.state_dict().items():
        assert torch.equal(weight, same.network.state_dict()[name])
    assert not torch.equal(first.network.lm_head.weight, other.network.lm_head.weight)
    assert first.namespace == same.namespace != other.namespace


def test_loading_leaves_the_random_state_of_others_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load("synthetic:tiny", verify=False)
    assert torch.equal(torch.rand(1), expected)


def test_presets_have_the_sizes_that_they_claim():
    tiny = load("synthetic:tiny", verify=False)
    assert tiny.parameter_count == pytest.approx(5e6, rel=0.05)
    assert tiny.geometry.token_bytes == 8192
    for name, facts in synthetic_models.SYNTHETIC.items():
        assert facts["vocab_size"] == len(tokenizer.byte_tokenizer()), name


def test_the_byte_tokenizer_gives_any_text_back():
    byte_tokenizer = tokenizer.byte_tokenizer()
    text = "héllo\x00 wörld 🎈\n\ttabs  and  spaces "
    assert byte_tokenizer.encode(text) == list(text.encode())
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


def test_the_chat_template_marks_the_turns():
    byte_tokenizer = tokenizer.byte_tokenizer()
    text = byte_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert byte_tokenizer.encode("<|im_end|>") == [byte_tokenizer.eos_token_id] == [258]
    assert load("synthetic:tiny", verify=False).stop_token_ids == {258}


# -- what names the KV -------------------------------------------------------------------------------------------------


def test_the_namespace_changes_with_everything_that_changes_the_bytes(copy):
    base = load(copy, verify=False).namespace
    assert load(copy, verify=False).namespace == base
    for change in ({"dtype": "bfloat16"}, {"block_size": 32}, {"kv_layout": "layer_first"}):
        assert load(copy, verify=False, **change).namespace != base, change
    equal = {
        "num_blocks": 7,
        "max_num_seqs": 3,
        "seed": 9,
        "max_model_len": 40,
        "served_model_name": "mine",
        "threads": 1,
    }
    assert load(copy, verify=False, **equal).namespace == base
    os.utime(next(copy.glob("*.safetensors")), ns=(1, 1))
    assert load(copy, verify=False).namespace == base, "a time is no content"
    copy = copy.rename(copy.with_name("renamed"))
    assert load(copy, verify=False).namespace == base, "a path is no content"
    tokenizer.byte_tokenizer().save_pretrained(copy)
    assert load(copy, verify=False).namespace == base, "a tokenizer decides tokens, which name the blocks, and no bytes"
    change_config(copy, rms_norm_eps=1e-3)
    assert load(copy, verify=False).namespace != base


def test_one_value_of_the_weights_and_one_of_the_rope_change_the_namespace(copy):
    seen = [load(copy, verify=False)]
    (file,) = copy.glob("*.safetensors")
    contents = file.read_bytes()
    file.write_bytes(contents[:-4] + bytes(byte ^ 1 for byte in contents[-4:]))
    seen.append(load(copy, verify=False))
    file.write_bytes(contents)
    change_config(copy, rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    seen.append(load(copy, verify=False))
    assert len({one.namespace for one in seen}) == 3


def test_the_identity_names_no_path_and_no_patch_of_a_library(copy, monkeypatch):
    found = load(copy, verify=False)
    assert str(copy) not in json.dumps(found.identity)
    library = sys.modules["transformers"]  # it replaces itself while it is imported
    monkeypatch.setattr(library, "__version__", ".".join([*library.__version__.split(".")[:2], "99"]))
    assert load(copy, verify=False).namespace == found.namespace
    monkeypatch.setattr(library, "__version__", "4.1.0")
    assert load(copy, verify=False).namespace != found.namespace


def test_random_weights_count_by_their_values():
    one, same, other = (load("synthetic:tiny", verify=False, seed=seed).identity["weights"] for seed in (0, 0, 1))
    assert one == same
    assert one["tensors"] != other["tensors"]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "is a `mamba2` model, which the embedded engine does not support"),
        (
            {"model_type": "qwen3_next"},
            "is a `qwen3_next` model, which the embedded engine does not support; the nearest supported type is `qwen3",
        ),
        ({"model_type": "gemma3"}, "the nearest supported type is `gemma3_text`"),
        ({"model_type": "t5"}, "is a `t5` model"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized weights"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
    ],
)
def test_models_that_would_run_wrongly_are_refused_before_their_weights_are_read(copy, changes, message):
    for file in copy.glob("*.safetensors"):
        file.unlink()
    change_config(copy, **changes)
    with pytest.raises(ProfileError, match=message):
        load(copy)


def test_a_model_with_an_adapter_is_refused(copy):
    """With peft installed, transformers would apply it, and no digest of tensors covers its scale."""
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ProfileError, match="has an adapter"):
        load(copy)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="there is no directory"):
        load(tmp_path / "nowhere")


def test_a_directory_without_a_usable_config_is_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"cannot read .*config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ProfileError, match="is not JSON"):
        load(tmp_path)


def test_missing_weights_are_refused(copy):
    from safetensors.torch import load_file, save_file

    path = next(copy.glob("*.safetensors"))
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"has no usable weights for model.layers.1.mlp.up_proj.weight"):
        load(copy)
    path.write_bytes(b"short")
    with pytest.raises(EnvironmentProblem, match="cannot be loaded"):
        load(copy)
    path.unlink()
    with pytest.raises(EnvironmentProblem, match="cannot be loaded"):
        load(copy)


def test_a_directory_without_a_tokenizer_serves_token_ids(saved):
    assert load(saved).tokenizer is None


def test_a_tokenizer_that_cannot_be_loaded_is_an_error(copy):
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(EnvironmentProblem, match="tokenizer"):
        load(copy)


def test_a_tokenizer_in_the_directory_is_used(copy):
    tokenizer.byte_tokenizer().save_pretrained(copy)
    assert load(copy, verify=False).tokenizer.decode([72, 105]) == "Hi"


def test_rope_that_changes_with_the_length_limits_the_length(copy):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    change_config(copy, rope_parameters=rope)
    assert load(copy, verify=False).max_positions == 128


def test_a_missing_gpu_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EnvironmentProblem, match="no CUDA device"):
        load("synthetic:tiny", device="cuda")


def test_attention_that_differs_from_the_models_own_stops_the_start(saved, monkeypatch):
    # A wrong mask is a bug in our own attention: it can only be planted.
    right = attention._mask

    def leaking(query_count, key_count, window, device):
        mask = right(query_count, key_count, window, device)
        return None if mask is None else torch.ones_like(mask)

    load(saved)
    monkeypatch.setattr(attention, "_mask", leaking)
    with pytest.raises(EnvironmentProblem, match="other logits than its own attention"):
        load(saved)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_start_up_check(saved, dtype):
    assert load(saved, dtype=dtype).geometry.dtype == dtype
