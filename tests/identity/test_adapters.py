"""Adapters: a name that may stand for other weights is noticed, and one that stands for the same is not."""

from __future__ import annotations

import os
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
from model_files import exchange

from kvbm.engines.vllm.adapters import Adapters
from kvbm.identity import content


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "LIVE_FILE_SYSTEMS", content.LIVE_FILE_SYSTEMS | {content.file_system_type(tmp_path)})
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    return tmp_path


def request(path, *, name="mine", number=1, load_inplace=False):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=load_inplace)


def test_requests_of_an_unchanged_adapter_change_nothing(path):
    adapters = Adapters()
    assert not adapters.load(request(path))
    assert not adapters.use(request(path))
    assert not adapters.load(request(path)), "vLLM does not load it twice"
    assert adapters.is_certain(request(path))


@pytest.mark.parametrize("note", ["load", "use"])
@pytest.mark.parametrize("change", [{"number": 2}, {"path": "/elsewhere", "number": 2}])
def test_another_adapter_under_a_name_is_noticed_once(path, note, change):
    adapters = Adapters()
    adapters.use(request(path))
    new = request(**({"path": path} | change))
    assert getattr(adapters, note)(new)
    assert not adapters.use(new)
    assert adapters.is_certain(new)


def test_an_adapter_that_is_loaded_in_place_is_noticed_and_not_cached(path):
    """vLLM reads its files again with every request."""
    adapters = Adapters()
    adapters.use(request(path))
    assert adapters.load(request(path, load_inplace=True))
    assert not adapters.is_certain(request(path, load_inplace=True))


def test_an_adapter_whose_files_change_is_not_cached_until_it_is_loaded_under_another_id(path):
    """vLLM keeps the one in memory until it needs the room, and then reads the other."""
    adapters = Adapters()
    adapters.use(request(path))
    exchange(path / "adapter_model.safetensors", b"two")
    assert adapters.use(request(path))
    assert not adapters.use(request(path))
    assert not adapters.is_certain(request(path))
    assert not adapters.load(request(path)), "vLLM does not read it"
    assert not adapters.is_certain(request(path))
    assert adapters.load(request(path, number=2))
    assert adapters.is_certain(request(path, number=2))


def test_an_adapter_on_tmpfs_is_not_cached(path, monkeypatch, caplog):
    """A store through a mapping leaves no trace, and vLLM may read the files again."""
    monkeypatch.setattr(content, "SILENT_FILE_SYSTEMS", {content.file_system_type(path)})
    adapters = Adapters()
    assert not adapters.use(request(path))
    assert not adapters.is_certain(request(path))
    assert not adapters.is_certain(request(path))
    assert len([message for message in caplog.messages if "copy it to a disk" in message]) == 1


def test_an_adapter_on_an_overlay_is_cached_if_it_has_been_quiet_for_a_minute(path, monkeypatch):
    """Its dirty pages cannot be written back, and a store to one leaves no trace."""
    monkeypatch.setattr(content, "LIVE_FILE_SYSTEMS", set())
    adapters, now = Adapters(), time.time_ns
    adapters.load(request(path))
    assert not adapters.is_certain(request(path))
    monkeypatch.setattr(time, "time_ns", lambda: now() + 61 * 10**9)
    adapters.load(request(path, number=2))
    assert adapters.is_certain(request(path, number=2))


def test_an_adapter_that_is_edited_through_a_mapping_is_not_cached(path):
    mapped = np.memmap(path / "adapter_model.safetensors", mode="r+", dtype=np.uint8)
    mapped[0] = 1  # its page is dirty when vLLM loads the adapter
    time.sleep(0.05)
    adapters = Adapters()
    adapters.load(request(path))
    time.sleep(0.05)
    mapped[1] = 2
    assert adapters.use(request(path))
    assert not adapters.is_certain(request(path))


def test_an_adapter_without_local_files_is_known_by_its_id_and_not_cached(path, caplog):
    """vLLM downloads it, and may download another one when it needs it again."""
    adapters = Adapters()
    assert not adapters.use(request("owner/adapter"))
    assert not adapters.use(request("owner/adapter"))
    assert not adapters.is_certain(request("owner/adapter"))
    assert len([message for message in caplog.messages if "not on this machine yet" in message]) == 1
    assert adapters.use(request("owner/adapter", number=2))


def test_a_change_below_the_home_directory_is_noticed(path, monkeypatch):
    """vLLM resolves `~` when it reads the files."""
    monkeypatch.setenv("HOME", str(path.parent))
    adapters = Adapters()
    adapters.use(request(f"~/{path.name}"))
    assert adapters.is_certain(request(f"~/{path.name}"))
    exchange(path / "adapter_model.safetensors", b"two")
    assert adapters.use(request(f"~/{path.name}"))
    assert not adapters.is_certain(request(f"~/{path.name}"))


def test_another_commit_of_an_adapter_of_the_hub_is_noticed(path, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    adapter = home / "models--owner--adapter"
    for commit in ("one", "two"):
        shutil.copytree(path, adapter / "snapshots" / commit)
    (adapter / "refs").mkdir()
    (adapter / "refs" / "main").write_text("one")
    adapters = Adapters()
    assert not adapters.load(request("owner/adapter"))
    assert not adapters.use(request("owner/adapter"))
    assert adapters.is_certain(request("owner/adapter"))
    (adapter / "refs" / "main").write_text("two")
    assert adapters.use(request("owner/adapter"))
    assert not adapters.is_certain(request("owner/adapter"))


def test_a_link_to_another_adapter_is_noticed(path, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "adapter_model.safetensors").write_bytes(b"two")
    link = tmp_path_factory.mktemp("links") / "current"
    link.symlink_to(path)
    adapters = Adapters()
    adapters.use(request(link))
    os.unlink(link)
    link.symlink_to(other)
    assert adapters.use(request(link))
