"""Adapters: a name that may stand for other weights is noticed, and one that stands for the same is not."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from model_files import exchange

from kvbm.vllm_integration.adapters import Adapters


@pytest.fixture
def path(tmp_path):
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


def test_an_adapter_without_local_files_is_known_by_its_id(path):
    adapters = Adapters()
    assert not adapters.use(request("owner/adapter"))
    assert not adapters.use(request("owner/adapter"))
    assert adapters.use(request("owner/adapter", number=2))


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
