"""What identifies a model of vLLM, and what is in doubt. Without vLLM: its configuration is played by plain objects."""

from __future__ import annotations

import shutil
import time
from types import SimpleNamespace

import pytest
from model_files import exchange, model

from kvbm.vllm_integration import identity

HOUR_NS = 3_600_000_000_000


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """The process starts in an hour, so that no file is newer; no digest of another test is known."""
    monkeypatch.setattr(identity, "process_start_ns", lambda: time.time_ns() + HOUR_NS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def hf_config(**facts):
    attributes = {name: facts.pop(name) for name in ("_commit_hash", "auto_map") if name in facts}
    return SimpleNamespace(to_dict=lambda: {"model_type": "llama", **facts}, **attributes)


def model_config(path, *, hf=None, **facts):
    return SimpleNamespace(model=str(path), revision=None, hf_config=hf or hf_config(), **facts)


def vllm_config(path, *, load_format="auto", speculative=None, download_dir=None, hf=None, load=None, **facts):
    load = SimpleNamespace(load_format=load_format, download_dir=download_dir, **(load or {}))
    return SimpleNamespace(
        model_config=model_config(path, hf=hf, **facts), load_config=load, speculative_config=speculative
    )


def weights(*arguments, **keys):
    found, _, doubt = identity._model(vllm_config(*arguments, **keys))
    assert (doubt == "") == bool(found)
    return found, doubt


def test_the_content_of_a_local_directory_identifies_it(tmp_path):
    one = model(tmp_path / "one")
    first, _ = weights(one)
    assert weights(shutil.copytree(one, tmp_path / "two"))[0] == first
    exchange(one / "model.safetensors", (one / "model.safetensors").read_bytes()[:-1] + b"\1")
    assert weights(one)[0] != first


def test_a_file_stands_for_its_directory(tmp_path):
    path = model(tmp_path) / "model.gguf"
    path.write_bytes(b"gguf")
    assert weights(path) == weights(tmp_path)


def test_files_that_changed_after_the_process_started_are_in_doubt(tmp_path, monkeypatch):
    """It may have loaded those from before, or a part of them."""
    monkeypatch.setattr(identity, "process_start_ns", lambda: time.time_ns() - HOUR_NS)
    assert "changed after vLLM was started" in weights(model(tmp_path))[1]


@pytest.mark.parametrize(
    "selection",
    [
        {"load_format": "pt"},
        {"load": {"ignore_patterns": ["model-*.safetensors"]}},
        {"load": {"model_loader_extra_config": {"pattern": "part-{part}.safetensors"}}},
    ],
)
def test_what_selects_the_weight_files_counts(tmp_path, selection):
    """A directory may hold other weights in `.pt` files than in `.safetensors` files."""
    path = model(tmp_path)
    assert weights(path, **selection) == weights(path, **selection)
    assert weights(path, **selection)[0] != weights(path)[0]


def test_how_media_are_processed_counts():
    def digest(**facts):
        return identity._multimodal(SimpleNamespace(limit_per_prompt={"image": 1}, **facts))

    assert digest(mm_processor_kwargs={"max_pixels": 1}) == digest(mm_processor_kwargs={"max_pixels": 1})
    assert digest(mm_processor_kwargs={"max_pixels": 1}) != digest(mm_processor_kwargs={"max_pixels": 2})
    assert identity._multimodal(None) == ""


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "my_own_loader"])
def test_a_loader_that_reads_no_known_files_is_in_doubt(tmp_path, load_format):
    assert f"`{load_format}`" in weights(model(tmp_path), load_format=load_format)[1]
    as_enum = SimpleNamespace(value=load_format)
    assert f"`{load_format}`" in weights(tmp_path, load_format=as_enum)[1]


def test_weights_in_an_object_store_are_in_doubt(tmp_path):
    assert "s3://" in weights(model(tmp_path), model_weights="s3://bucket/model")[1]


def test_a_directory_of_unknown_files_is_in_doubt(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.msgpack").write_bytes(b"1")
    assert "no weight files" in weights(tmp_path)[1]


@pytest.mark.parametrize(("trust_remote_code", "is_in_doubt"), [(True, True), (False, False)])
def test_code_of_another_repository_is_in_doubt(tmp_path, trust_remote_code, is_in_doubt):
    hf = hf_config(auto_map={"AutoModel": "other/repository--modeling.Model"})
    _, doubt = weights(model(tmp_path), hf=hf, trust_remote_code=trust_remote_code)
    assert ("another repository" in doubt) == is_in_doubt


def test_a_file_that_cannot_be_read_is_in_doubt(tmp_path, monkeypatch):
    def fails(directory):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(identity, "fingerprint", fails)
    assert "denied" in weights(model(tmp_path))[1]


def test_a_draft_model_counts(tmp_path):
    target, draft = model(tmp_path / "target"), model(tmp_path / "draft")
    alone, _ = weights(target)
    speculative = SimpleNamespace(draft_model_config=model_config(draft))
    both, _ = weights(target, speculative=speculative)
    assert both[0] == alone[0]
    exchange(draft / "model.safetensors", (draft / "model.safetensors").read_bytes()[:-1] + b"\1")
    assert weights(target, speculative=speculative)[0] != both


def test_the_configuration_counts_after_overrides(tmp_path):
    path = model(tmp_path)

    def configuration(**facts):
        return identity._model(vllm_config(path, hf=hf_config(**facts)))[1]

    base = configuration(rope_theta=10000.0)
    assert configuration(rope_theta=10000.0) == base
    assert configuration(rope_theta=500.0) != base
    assert configuration(rope_theta=10000.0, quantization_config={"bits": 4}) != base


def test_a_configuration_without_a_text_form_is_in_doubt(tmp_path):
    hf = SimpleNamespace(to_dict=lambda: {1: "a", "b": 2})
    assert "no text form" in weights(model(tmp_path), hf=hf)[1]


# -- models of the hub -------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path):
    """A cache of the hub with one commit of one model."""
    home = tmp_path / "hub" / "models--owner--name"
    model(home / "snapshots" / "c0ffee")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("c0ffee")
    return tmp_path / "hub"


def test_a_model_of_the_hub_is_its_local_files(hub):
    snapshot = hub / "models--owner--name" / "snapshots" / "c0ffee"
    by_name = weights("owner/name", download_dir=str(hub), hf=hf_config(_commit_hash="c0ffee"))
    assert by_name == weights(snapshot)


def test_a_model_of_the_hub_without_local_files_is_in_doubt(hub):
    assert "no local files" in weights("owner/other", download_dir=str(hub))[1]


def test_weights_of_another_commit_than_the_configuration_are_in_doubt(hub):
    _, doubt = weights("owner/name", download_dir=str(hub), hf=hf_config(_commit_hash="bad"))
    assert "c0ffee" in doubt
    assert "bad" in doubt


def test_a_model_of_another_hub_is_in_doubt(hub, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    assert "ModelScope" in weights("owner/name", download_dir=str(hub))[1]
