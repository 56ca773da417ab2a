"""The look at a model's files before vLLM loads them. Its executor is played by a class of the same name."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from model_files import exchange, model
from vllm_configs import vllm_config

from kvbm.engines.vllm import loads
from kvbm.identity import look
from kvbm.identity.digests import Unidentified

DISK = {"tiers": {"host": {"blocks": 8}, "disk": {"blocks": 8, "directory": "/tmp/x"}}}


@pytest.fixture(autouse=True)
def executor(monkeypatch, tmp_path):
    """The class that vLLM creates to load a model. What it does while it loads is its `load`."""

    class Executor:
        def __init__(self, config, *, load=lambda: None):
            load()

    module = ModuleType(loads.EXECUTOR)
    module.Executor = Executor
    monkeypatch.setitem(sys.modules, loads.EXECUTOR, module)
    monkeypatch.setattr(loads, "_LOADED", {})
    monkeypatch.setattr(look, "CLOCK_SLACK_NS", 20_000_000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    loads.register()
    loads.register()
    return Executor


def config_of(path, kvbm=None, module="kvbm.vllm_integration.connector", **more):
    transfer = SimpleNamespace(kv_connector_module_path=module, kv_connector_extra_config={"kvbm": kvbm or DISK})
    config = SimpleNamespace(**vars(vllm_config(path)), kv_transfer_config=transfer, **more)
    time.sleep(0.05)
    return config


def test_files_that_were_made_just_before_the_start_are_identified(tmp_path, executor):
    path = model(tmp_path / "model")
    executor(config_of(path))
    assert loads.content_of(path).text()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_files_that_were_exchanged_while_vllm_loaded_are_in_doubt(tmp_path, executor, name):
    path = model(tmp_path / "model")
    (path / "tokenizer.json").write_text("[]")
    executor(config_of(path), load=lambda: exchange(path / name, (path / name).read_bytes()))
    with pytest.raises(Unidentified, match=f"`{name}` changed while"):
        loads.content_of(path)


def test_a_file_that_only_code_of_the_model_reads_is_watched_too(tmp_path, executor):
    path = model(tmp_path / "model")
    config = config_of(path)
    config.model_config = replace(config.model_config, trust_remote_code=True)
    executor(config, load=lambda: (path / "scales.dat").write_bytes(b"1"))
    with pytest.raises(Unidentified, match=r"scales\.dat"):
        loads.content_of(path, every=True)


def test_a_model_that_vllm_has_downloaded_is_in_doubt(tmp_path, executor):
    executor(config_of(tmp_path / "model"), load=lambda: model(tmp_path / "model"))
    with pytest.raises(Unidentified, match="just before"):
        loads.content_of(tmp_path / "model")


@pytest.mark.parametrize(
    "more",
    [
        {"module": "other.connector"},
        {"kvbm": {"tiers": {"host": {"blocks": 8}}}},
        {"kvbm": {"tiers": {"disk": {"blocks": 8, "persist": False, "directory": "/tmp/x"}}}},
        {"kvbm": {"no": "such key"}},
        {"lora_config": object()},
    ],
)
def test_an_engine_whose_blocks_do_not_outlive_it_looks_at_nothing(tmp_path, executor, monkeypatch, more):
    monkeypatch.setattr("kvbm.identity.loading.Loading", None)
    executor(config_of(model(tmp_path / "model"), **more))
    assert loads._LOADED == {}


def test_a_connector_inside_of_another_one_counts(tmp_path, executor):
    path = model(tmp_path / "model")
    config = config_of(path, module=None)
    inner = {"kv_connector_module_path": "kvbm.vllm_integration.connector", "kv_connector_extra_config": {"kvbm": DISK}}
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": [{"kv_connector": "Other"}, inner]}
    executor(config)
    assert loads.content_of(path).text()


def test_without_an_executor_nothing_is_wrapped(monkeypatch):
    monkeypatch.delitem(sys.modules, loads.EXECUTOR)
    loads.register()


def test_a_tier_below_vllms_own_offloading_keeps_blocks_too(tmp_path, executor):
    path = model(tmp_path / "model")
    config = config_of(path, module=None)
    tier = {"type": "KvbmTier", "module_path": "kvbm.vllm_integration.secondary_tier", "kvbm": DISK}
    config.kv_transfer_config.kv_connector_extra_config = {"secondary_tiers": [{"type": "fs"}, tier]}
    executor(config)
    assert loads.content_of(path).text()
    assert loads.last_config() is config
