"""SGLang's flush, which ends its server if one of its storage threads is held for more than 10 s."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from host_pools import SGLangHostPool, storage_config
from waiting import eventually

from kvbm.engines.sglang import flushes, leader_thread, storage
from kvbm.errors import EnvironmentProblem

pytestmark = pytest.mark.usefixtures("identity")
KEYS = ["ab" * 32]


@pytest.fixture
def backend(tmp_path):
    tiers = {"disk": {"directory": str(tmp_path / "disk"), "blocks": 8, "o_direct": False}}
    made = storage.KvbmHiCacheStorage(storage_config({"tiers": tiers, "metrics": {"serve": False}}), {})
    yield made
    made.close()


def have_module(monkeypatch, name, **values):
    """Let SGLang have a module, in packages that exist."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(values)


def test_a_flush_gives_up_the_questions_that_wait_and_later_ones_are_answered(backend, monkeypatch):
    class HiCacheController:
        def _stop_storage_threads(self):
            self.during = backend.batch_set_v1(KEYS, pool.indices(0))
            self.thread.join(60)
            self.has_ended = not self.thread.is_alive()

    have_module(monkeypatch, flushes.CONTROLLER[0], HiCacheController=HiCacheController)
    monkeypatch.setattr(leader_thread, "LIMIT_S", 600.0)
    monkeypatch.setattr(leader_thread.LeaderThread.ask, "__kwdefaults__", {"limit_s": 600.0})
    pool = SGLangHostPool("page_first")
    backend.register_mem_pool_host(pool)
    backend._thread._total_s = 600.0
    controller = HiCacheController()

    def endless(*_):
        while True:
            yield

    controller.thread = threading.Thread(target=backend._ask, args=(endless,), daemon=True)
    controller.thread.start()
    eventually(lambda: backend._thread._asked)
    controller._stop_storage_threads()
    assert controller.has_ended
    assert controller.during == [False]
    assert backend.batch_set_v1(KEYS, pool.indices(0)) == [True]
    assert backend.batch_exists(KEYS) == 1


def test_the_extension_that_names_pages_is_built_when_the_storage_opens(backend, monkeypatch):
    built = []
    have_module(monkeypatch, flushes.HASHES, get_native_hash=lambda *arguments: built.append(arguments))
    backend.register_mem_pool_host(SGLangHostPool("page_first"))
    assert len(built) == 1


def test_without_a_compiler_the_storage_does_not_open_and_names_what_to_install(backend, monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to load") from RuntimeError("Ninja is required to load C++ extensions\nmore")

    have_module(monkeypatch, flushes.HASHES, get_native_hash=fail)
    with pytest.raises(EnvironmentProblem, match="Ninja is required to load C\\+\\+ extensions") as found:
        backend.register_mem_pool_host(SimpleNamespace())
    assert "libssl-dev" in found.value.hint
