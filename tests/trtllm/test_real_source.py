"""The connector against a real interface file of TensorRT-LLM, under stub modules.

    KVBM_TRTLLM_SOURCE=/path/to/kv_cache_connector.py pytest tests/trtllm/test_real_source.py

Without the variable, only the loader and the checks are tested, with a short file that has the same imports.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from interface import CONNECTOR, NEW_PATH, OLD_PATH, VERSIONS, Collectives, State, installed

CLASSES = {
    "KvCacheConnectorScheduler": "DynamoKVBMConnectorLeader",
    "KvCacheConnectorWorker": "DynamoKVBMConnectorWorker",
}
READ_FIELDS = ("request_id", "new_tokens", "new_block_ids", "computed_position")
PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"
STUBS = {
    "tensorrt_llm": {},
    "tensorrt_llm._utils": {"mpi_allgather": list, "mpi_broadcast": list, "mpi_rank": int},
    "tensorrt_llm.logger": {"logger": SimpleNamespace()},
    "tensorrt_llm.bindings": {"LlmRequestState": State},
    "tensorrt_llm.bindings.internal": {},
    "tensorrt_llm.bindings.internal.batch_manager": {"KvCacheConnectorManager": object, "LlmRequest": object},
    "tensorrt_llm.llmapi": {},
    "tensorrt_llm.llmapi.llm_args": {"TorchLlmArgs": object},
    "tensorrt_llm._torch": {},
    PYEXECUTOR: {},
    f"{PYEXECUTOR}.connectors": {},
    f"{PYEXECUTOR}.scheduler": {"ScheduledRequests": object},
    f"{PYEXECUTOR}.llm_request": {"get_draft_token_length": len},
    f"{PYEXECUTOR}.kv_cache": {},
    f"{PYEXECUTOR}.kv_cache.kv_cache_manager_v2": {"KVCacheManagerV2": object},
}
SHORT = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from tensorrt_llm._utils import mpi_allgather, mpi_broadcast, mpi_rank
from tensorrt_llm.bindings import LlmRequestState
from tensorrt_llm.bindings.internal.batch_manager import KvCacheConnectorManager, LlmRequest
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
SCHEDULER
@dataclass
class RequestData:
    request_id: int
    new_tokens: list
    new_block_ids: list
    computed_position: int
class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args): ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
    EXTRA
class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args): ...
    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor): ...
"""


@pytest.fixture
def load(monkeypatch):
    """Return a function that loads an interface file at its module path, and the connector against it."""

    def loaded(text, path):
        for name, values in STUBS.items():
            module = ModuleType(name)
            module.__path__ = []
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
        interface = ModuleType(path)
        interface.__package__ = path.rpartition(".")[0]
        monkeypatch.setitem(sys.modules, path, interface)
        exec(compile(text, path, "exec"), vars(interface))
        monkeypatch.delitem(sys.modules, CONNECTOR, raising=False)
        connector = importlib.import_module(CONNECTOR)
        monkeypatch.delitem(sys.modules, CONNECTOR)
        return interface, connector

    return loaded


def gaps(interface, connector):
    """Yield what of the interface the connector does not implement, or implements with other parameters."""
    for theirs, ours in CLASSES.items():
        base, implementation = getattr(interface, theirs), getattr(connector, ours)
        assert issubclass(implementation, base)
        yield from (f"{ours}.{name} is abstract" for name in implementation.__abstractmethods__)
        for name, method in vars(base).items():
            own = vars(implementation).get(name)
            if inspect.isfunction(method) and inspect.isfunction(own):
                wanted, found = list(inspect.signature(method).parameters), list(inspect.signature(own).parameters)
                if wanted != found:
                    yield f"{ours}.{name}{tuple(found)}, but the interface has {tuple(wanted)}"
    fields = tuple(field.name for field in dataclasses.fields(interface.RequestData))
    if fields[:4] != READ_FIELDS:
        yield f"RequestData has the fields {fields}"


@pytest.mark.skipif("KVBM_TRTLLM_SOURCE" not in os.environ, reason="KVBM_TRTLLM_SOURCE names no interface file")
def test_the_connector_implements_a_real_interface_file(load):
    source = Path(os.environ["KVBM_TRTLLM_SOURCE"])
    path = NEW_PATH if source.parent.name == "connectors" else OLD_PATH
    assert list(gaps(*load(source.read_text(), path))) == []


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_the_connector_implements_the_interface_of_each_version(version):
    with installed(version, Collectives(1)) as (connector, interface):
        assert list(gaps(interface, connector)) == []


@pytest.mark.parametrize(
    ("path", "scheduler"), [(OLD_PATH, "from .scheduler import"), (NEW_PATH, "from ..scheduler import")]
)
def test_the_loader_finds_nothing_in_a_file_that_fits(load, path, scheduler):
    text = SHORT.replace("SCHEDULER", f"{scheduler} ScheduledRequests").replace("EXTRA", "")
    assert list(gaps(*load(text, path))) == []


@pytest.mark.parametrize(
    ("extra", "gap"),
    [
        ("@abstractmethod\n    def brand_new(self): ...", "DynamoKVBMConnectorLeader.brand_new is abstract"),
        (
            "def request_reset(self, request, why): ...",
            "DynamoKVBMConnectorLeader.request_reset('self', 'request'), "
            "but the interface has ('self', 'request', 'why')",
        ),
    ],
)
def test_the_loader_finds_a_method_that_does_not_fit(load, extra, gap):
    text = SHORT.replace("SCHEDULER", "").replace("EXTRA", extra)
    assert list(gaps(*load(text, NEW_PATH))) == [gap]
