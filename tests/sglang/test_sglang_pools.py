"""Models with more than one host pool: KV, states of which the last one counts, and indexes of which every page does.

The pools are contracts with bytes (host_pools.py): no such model loads on a CPU.
"""

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from host_pools import SGLangHostPool, SGLangStatePool, storage_config
from test_sglang_storage import keys_of, leader_of, on_disk

from kvbm.engines.sglang import storage
from kvbm.errors import EnvironmentProblem

pytestmark = pytest.mark.usefixtures("identity")


@dataclass
class Result:
    """SGLang's PoolTransferResult."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: list


@pytest.fixture(autouse=True)
def interface(monkeypatch):
    monkeypatch.setattr(storage, "module_if_installed", lambda path: SimpleNamespace(PoolTransferResult=Result))


@pytest.fixture
def disk(tmp_path):
    return {"directory": str(tmp_path / "disk"), "blocks": 128, "o_direct": False, "drain_s": 2.0}


def pools():
    return {
        "kv": SGLangHostPool("page_first"),
        "mamba": SGLangStatePool(),
        "indexer": SGLangHostPool("page_first_direct", is_mla=True),
    }


@contextmanager
def opened(disk, given):
    backend = storage.KvbmHiCacheStorage(storage_config({"tiers": {"disk": disk}, "metrics": {"serve": False}}), {})
    backend.register_mem_pool_host(given["kv"])
    for name, pool in given.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    try:
        yield backend
    finally:
        backend.close()


def transfer(given, name, keys, places, policy="all_pages"):
    indices = None if places is None else given[name].indices(*places)
    return SimpleNamespace(name=name, keys=keys, host_indices=indices, hit_policy=policy)


def stored(backend, given, name, keys, places):
    for place in places:
        given[name].fill(place, int(hashlib.sha256(f"{name} {place}".encode()).hexdigest()[:6], 16))
    content = [given[name].content(place) for place in places]
    assert backend.batch_set_v2([transfer(given, name, keys, places)]) == {name: [True] * len(keys)}
    return content


def test_pages_of_every_pool_come_back_after_a_restart(disk):
    given, keys = pools(), keys_of("a", 4)
    with opened(disk, given) as backend:
        kv = stored(backend, given, "kv", keys, range(4))
        states = stored(backend, given, "mamba", keys[3:], [7])
        indexes = stored(backend, given, "indexer", keys, range(4))
        on_disk(backend, 9)
    other = pools()
    with opened(disk, other) as backend:
        wanted = [transfer(other, "mamba", keys[3:], None, "trailing_pages"), transfer(other, "indexer", keys, None)]
        assert backend.batch_exists_v2(keys, wanted) == Result(4, {"kv": 4, "mamba": 4, "indexer": 4}, [4])
        loads = [
            transfer(other, "mamba", keys[3:], [20]),
            transfer(other, "indexer", keys, range(10, 14)),
            transfer(other, "kv", keys, range(20, 24)),
        ]
        assert backend.batch_get_v2(loads) == {"mamba": [True], "indexer": [True] * 4, "kv": [True] * 4}
        assert (other["mamba"].content(20) == states[0]).all()
        for place, content in zip(range(10, 14), indexes, strict=True):
            assert (other["indexer"].content(place) == content).all()
        for place, content in zip(range(20, 24), kv, strict=True):
            assert (other["kv"].content(place) == content).all()
        assert not other["mamba"].content(21).any()


def test_a_prefix_ends_where_a_pool_has_its_last_pages(disk):
    """Of six pages of KV, states are there for the second and the fifth, and indexes for the first four."""
    given, keys = pools(), keys_of("a", 6)
    with opened(disk, given) as backend:
        stored(backend, given, "kv", keys, range(6))
        stored(backend, given, "mamba", [keys[1], keys[4]], [1, 4])
        stored(backend, given, "indexer", keys[:4], range(4))
        states = transfer(given, "mamba", keys[:1], None, "trailing_pages")
        indexes = transfer(given, "indexer", keys, None)
        assert backend.batch_exists_v2(keys, [states]) == Result(5, {"kv": 6, "mamba": 5}, [2, 5])
        assert backend.batch_exists_v2(keys, [indexes]) == Result(4, {"kv": 6, "indexer": 4}, [1, 2, 3, 4])
        assert backend.batch_exists_v2(keys, [states, indexes]) == Result(2, {"kv": 6, "mamba": 5, "indexer": 2}, [2])
        window = transfer(given, "mamba", keys[:2], None, "trailing_pages")
        assert backend.batch_exists_v2(keys, [window]) == Result(0, {"kv": 6}, [])
        assert backend.batch_exists_v2(keys_of("b", 2), [states]) == Result(0, {}, [])
        assert backend.batch_exists(keys) == 6


def test_a_page_of_one_pool_is_none_of_another_and_what_is_missing_stays_untouched(disk):
    given, keys = pools(), keys_of("a", 2)
    with opened(disk, given) as backend:
        stored(backend, given, "mamba", keys, [1, 2])
        assert backend.batch_exists(keys) == 0
        loads = [transfer(given, "indexer", keys, [5, 6]), transfer(given, "kv", keys, [5, 6])]
        assert backend.batch_get_v2(loads) == {"indexer": [False] * 2, "kv": [False] * 2}
        assert not given["indexer"].kv_buffer.any()
        assert not given["kv"].kv_buffer.any()


def test_what_kvbm_does_not_know_is_a_miss_and_reaches_nobody(disk):
    given, keys = pools(), keys_of("a", 2)
    with opened(disk, given) as backend:
        stored(backend, given, "kv", keys, range(2))
        groups = transfer(given, "indexer", keys, None, "block_groups")
        assert backend.batch_exists_v2(keys, [groups]) == Result(0, {}, [])
        wrong = [transfer(given, "mamba", keys, [3]), transfer(given, "kv", keys, None)]
        assert backend.batch_get_v2(wrong) == {"mamba": [False] * 2, "kv": [False] * 2}
        unknown = SimpleNamespace(name="swa", keys=keys, host_indices=given["kv"].indices(0, 1), hit_policy="all_pages")
        assert backend.batch_set_v2([unknown]) == {"swa": [False] * 2}
        assert backend.batch_exists(keys) == 2
        assert not backend.boundary.is_off


def test_an_engine_with_other_pools_finds_nothing(disk):
    given, keys = pools(), keys_of("a", 1)
    with opened(disk, given) as backend:
        stored(backend, given, "kv", keys, [0])
        on_disk(backend, 1)
    fewer = {"kv": SGLangHostPool("page_first")}
    with opened(disk, fewer) as backend:
        assert backend.batch_exists(keys) == 0
        assert leader_of(backend).is_on


@pytest.mark.parametrize("name", ["draft", "draft_swa"])
def test_pools_of_drafts_stop_the_start(disk, name):
    backend = storage.KvbmHiCacheStorage(storage_config({"tiers": {"disk": disk}, "metrics": {"serve": False}}), {})
    backend.register_mem_pool_host(SGLangHostPool("page_first"))
    with pytest.raises(EnvironmentProblem, match=f"`{name}`: kvbm does not know the weights"):
        backend.register_mem_host_pool_v2(SGLangHostPool("page_first"), name)
    assert backend.batch_exists(keys_of("a", 1)) == 0


def test_a_pool_that_is_added_later_or_whose_pages_are_elsewhere_is_refused(disk):
    alone = {"kv": SGLangHostPool("page_first")}
    with opened(disk, alone) as backend, pytest.raises(EnvironmentProblem, match="while SGLang runs"):
        backend.register_mem_host_pool_v2(SGLangStatePool(), "mamba")
    backend = storage.KvbmHiCacheStorage(storage_config({"tiers": {"disk": disk}, "metrics": {"serve": False}}), {})
    backend.register_mem_pool_host(SGLangHostPool("page_first"))
    states = SGLangStatePool()
    states.get_page_buffer_meta = lambda indices: (_ for _ in ()).throw(NotImplementedError("side states"))
    with pytest.raises(EnvironmentProblem, match=r"`mamba`: SGLang cannot tell .*side states"):
        backend.register_mem_host_pool_v2(states, "mamba")
    backend.close()
