"""What identifies a model of vLLM, and what is in doubt. Without vLLM: its configuration is played by plain objects."""

from __future__ import annotations

import shutil
import time
from types import SimpleNamespace

import pytest
from model_files import exchange, model
from vllm_configs import HfConfig, LoadConfig, ModelConfig, MultiModalConfig, vllm_config

from kvbm.engines.vllm import identity, options
from kvbm.identity import loading
from kvbm.identity.description import describe
from kvbm.identity.options import Options

HOUR_NS = 3_600_000_000_000


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """The process starts in an hour, so that no file is newer; no digest of another test is known."""
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() + HOUR_NS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def found(path, *, load=None, speculative=None, **changes):
    """Facts and doubt of a model. `changes` are values of fields of ModelConfig."""
    model_config = ModelConfig(str(path), **changes)
    sections = {"model_config": model_config, "load_config": load or LoadConfig(), "speculative_config": speculative}
    return describe(*identity._model(vllm_config(path, sections))).result()


def weights(*arguments, **keys):
    facts, doubt = found(*arguments, **keys)
    assert (doubt == "") == bool(facts)
    return facts.get("weights"), doubt


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
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() - HOUR_NS)
    assert "changed after the engine was started" in weights(model(tmp_path))[1]


@pytest.mark.parametrize(
    "selection",
    [
        LoadConfig("pt"),
        LoadConfig(ignore_patterns=["model-*.safetensors"]),
        LoadConfig(model_loader_extra_config={"pattern": "part-{part}.safetensors"}),
    ],
)
def test_what_selects_the_weight_files_counts(tmp_path, selection):
    """A directory may hold other weights in `.pt` files than in `.safetensors` files."""
    path = model(tmp_path)
    assert weights(path, load=selection) == weights(path, load=selection)
    assert weights(path, load=selection)[0] != weights(path)[0]


def test_how_media_are_processed_counts(tmp_path):
    path = model(tmp_path)

    def section(**facts):
        return found(path, multimodal_config=MultiModalConfig(**facts))[0]["options"]["model_config"]

    base = section(mm_processor_kwargs={"max_pixels": 1})
    assert section(mm_processor_kwargs={"max_pixels": 1}, mm_processor_cache_gb=1.0) == base
    assert section(mm_processor_kwargs={"max_pixels": 2}) != base
    assert section() != base


def test_the_content_of_a_file_of_encoder_scales_counts(tmp_path):
    path, scales = model(tmp_path / "model"), tmp_path / "scales.json"
    multimodal = MultiModalConfig(mm_encoder_fp8_scale_path=str(scales))
    assert "scales.json" in weights(path, multimodal_config=multimodal)[1]
    scales.write_text("[1.0]")
    first, _ = weights(path, multimodal_config=multimodal)
    scales.write_text("[2.0]")
    assert weights(path, multimodal_config=multimodal)[0] != first


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
        "VLLM_MARLIN_INPUT_DTYPE",
        "VLLM_CPU_INT4_W4A8",
        "VLLM_BATCH_INVARIANT",
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        "VLLM_VIDEO_LOADER_BACKEND",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_PLUGINS",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_MEDIA_CONNECTOR",
        "VLLM_OF_A_LATER_VERSION",
        "NVIDIA_TF32_OVERRIDE",
    ],
)
def test_variables_that_can_change_the_kv_count(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    base = options.environment(Options())
    monkeypatch.setenv(name, "1")
    assert options.environment(Options()) != base


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_PORT",
        "VLLM_HOST_IP",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_DP_RANK_LOCAL",
        "VLLM_DP_SIZE",
        "VLLM_ASSETS_CACHE",
        "VLLM_LOGGING_LEVEL",
        "VLLM_API_KEY",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CACHE_ROOT",
        "VLLM_RPC_BASE_PATH",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_SERVER_DEV_MODE",
        "HOME",
    ],
)
def test_variables_that_differ_between_starts_do_not_count(monkeypatch, name):
    base = options.environment(Options())
    monkeypatch.setenv(name, "another")
    assert options.environment(Options()) == base


def test_plugins_count_with_their_versions(tmp_path, monkeypatch):
    base = identity._plugins()
    seen = []
    for version in ("1.0", "2.0"):
        home = tmp_path / version / "other_model-1.dist-info"
        home.mkdir(parents=True)
        (home / "METADATA").write_text(f"Name: other-model\nVersion: {version}\n")
        (home / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_model:register\n")
        with monkeypatch.context() as context:
            context.syspath_prepend(str(home.parent))
            seen.append(identity._plugins())
    assert base != seen[0] != seen[1] != base


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"code_revision": "v2", "trust_remote_code": True}, "`v2`"),
        ({"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}}, "replaces the code"),
    ],
)
def test_code_outside_the_files_of_the_model_is_in_doubt(tmp_path, facts, reason):
    assert reason in weights(model(tmp_path), **facts)[1]
    harmless = {"code_revision": "v2", "trust_remote_code": False, "model_class_overrides": {}}
    assert weights(tmp_path, **harmless)[0]


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "npcache", "my_own_loader"])
def test_a_loader_that_reads_no_known_files_is_in_doubt(tmp_path, load_format):
    assert f"`{load_format}`" in weights(model(tmp_path), load=LoadConfig(load_format))[1]
    as_enum = SimpleNamespace(value=load_format)
    assert f"`{load_format}`" in weights(tmp_path, load=LoadConfig(as_enum))[1]


def test_weights_in_an_object_store_are_in_doubt(tmp_path):
    assert "s3://" in weights(model(tmp_path), model_weights="s3://bucket/model")[1]


def test_a_directory_of_unknown_files_is_in_doubt(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.msgpack").write_bytes(b"1")
    assert "no weight files" in weights(tmp_path)[1]


@pytest.mark.parametrize(("trust_remote_code", "is_in_doubt"), [(True, True), (False, False)])
def test_code_of_another_repository_is_in_doubt(tmp_path, trust_remote_code, is_in_doubt):
    hf = HfConfig(auto_map={"AutoModel": "other/repository--modeling.Model"})
    _, doubt = weights(model(tmp_path), hf_config=hf, trust_remote_code=trust_remote_code)
    assert ("another repository" in doubt) == is_in_doubt


@pytest.mark.parametrize("name", ["scales.dat", "data/noise", ".hidden"])
def test_every_file_counts_if_the_code_of_the_model_runs(tmp_path, name):
    """That code can read any of them. Without it, names of caches stay."""
    path = model(tmp_path / "model")
    base, plain = weights(path, trust_remote_code=True), weights(path)
    assert base == plain
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"1")
    first = weights(path, trust_remote_code=True)
    assert first != base
    (path / name).write_bytes(b"2")
    assert weights(path, trust_remote_code=True) != first
    assert weights(path) == plain


def test_a_file_that_cannot_be_read_is_in_doubt(tmp_path, monkeypatch):
    def fails(directory, *, every):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(loading, "look", fails)
    assert "denied" in weights(model(tmp_path))[1]


def test_a_draft_model_counts(tmp_path):
    target, draft = model(tmp_path / "target"), model(tmp_path / "draft")
    alone, _ = weights(target)
    speculative = SimpleNamespace(draft_model_config=ModelConfig(str(draft)))
    both, _ = weights(target, speculative=speculative)
    assert both[0] == alone[0]
    exchange(draft / "model.safetensors", (draft / "model.safetensors").read_bytes()[:-1] + b"\1")
    assert weights(target, speculative=speculative)[0] != both


def test_the_configuration_counts_after_overrides(tmp_path):
    path = model(tmp_path)

    def configuration(**facts):
        return found(path, hf_config=HfConfig(**facts))[0]["configuration"]

    base = configuration(rope_theta=10000.0)
    assert configuration(rope_theta=10000.0) == base
    assert configuration(rope_theta=500.0) != base
    assert configuration(rope_theta=10000.0, quantization_config={"bits": 4}) != base


def test_a_configuration_without_a_text_form_is_in_doubt(tmp_path):
    assert "no text form" in weights(model(tmp_path), hf_config=HfConfig(rope=object()))[1]


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
    by_name = weights("owner/name", load=LoadConfig(download_dir=str(hub)), hf_config=HfConfig(_commit_hash="c0ffee"))
    assert by_name == weights(snapshot)


def test_a_model_of_the_hub_without_local_files_is_in_doubt(hub):
    assert "no local files" in weights("owner/other", load=LoadConfig(download_dir=str(hub)))[1]


def test_weights_of_another_commit_than_the_configuration_are_in_doubt(hub):
    _, doubt = weights("owner/name", load=LoadConfig(download_dir=str(hub)), hf_config=HfConfig(_commit_hash="bad"))
    assert "c0ffee" in doubt
    assert "bad" in doubt


def test_a_name_that_may_have_meant_another_commit_during_the_start_is_in_doubt(hub, monkeypatch):
    """Both commits may have been there for long. vLLM looks up the name several times, and kvbm at other moments."""
    commit = "c0ffee".ljust(40, "0")
    snapshots = hub / "models--owner--name" / "snapshots"
    (snapshots / "c0ffee").rename(snapshots / commit)
    (snapshots.parent / "refs" / "main").write_text(commit)
    load = LoadConfig(download_dir=str(hub))
    assert weights("owner/name", load=load)[1] == ""
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() - HOUR_NS)
    assert "refs/main` changed after the engine was started" in weights("owner/name", load=load)[1]
    assert "refs" not in weights("owner/name", load=load, revision=commit)[1]


def test_a_model_of_another_hub_is_in_doubt(hub, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    assert "ModelScope" in weights("owner/name", load=LoadConfig(download_dir=str(hub)))[1]
