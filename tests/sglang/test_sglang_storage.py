"""The storage backend of SGLang on its real disk process and its real directory store; SGLang's host pool is a
contract with bytes (host_pools.py)."""

import hashlib
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from host_pools import LAYOUTS, SGLangHostPool, storage_config

from kvbm.child import deadlines
from kvbm.engines.opening import known
from kvbm.engines.sglang import leader_thread, storage
from kvbm.errors import EnvironmentProblem
from kvbm.leader import storage_leader
from kvbm.types import Tier
from kvbm_cli.serve.reported_sizes import ReportedSizes

pytestmark = pytest.mark.usefixtures("identity")
DISK_PAGES = 128


def keys_of(name, count):
    return [hashlib.sha256(f"{name}/{index}".encode()).hexdigest() for index in range(count)]


def wait_until(condition, limit_s=30.0):
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def disk(tmp_path):
    return {"directory": str(tmp_path / "disk"), "blocks": DISK_PAGES, "o_direct": False, "drain_s": 2.0}


@contextmanager
def opened(pool, tiers, *, offload=None, **changes):
    config = {"tiers": tiers, "metrics": {"serve": False}, **({"offload": offload} if offload else {})}
    backend = storage.KvbmHiCacheStorage(storage_config(config, **changes), {})
    backend.register_mem_pool_host(pool)
    try:
        yield backend
    finally:
        backend.close()


def leader_of(backend):
    return backend._thread._leader


def on_disk(backend, count):
    wait_until(lambda: leader_of(backend).counters.disk.offload_blocks >= count)


def filled(pool, pages):
    for page in pages:
        pool.fill(page, page)
    return [pool.content(page) for page in pages]


def assert_come_back(backend, pool, keys, pages, expected):
    assert backend.batch_get_v1(keys, pool.indices(*pages)) == [True] * len(keys)
    assert_pages(pool, pages, expected)


def assert_pages(pool, pages, expected):
    for page, content in zip(pages, expected, strict=True):
        assert (pool.content(page) == content).all(), page


@pytest.mark.parametrize("is_mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_into_other_places_after_a_restart(layout, is_mla, disk):
    if is_mla and layout == "page_head":
        pytest.skip("SGLang has no such pool")
    pool, keys = SGLangHostPool(layout, is_mla=is_mla), keys_of("a", 5)
    expected = filled(pool, range(5))
    with opened(pool, {"disk": disk}, is_mla_model=is_mla) as backend:
        assert backend.batch_exists(keys) == 0
        assert backend.batch_set_v1(keys, pool.indices(*range(5))) == [True] * 5
        on_disk(backend, 5)
    other = SGLangHostPool(layout, is_mla=is_mla)
    with opened(other, {"disk": disk}, is_mla_model=is_mla) as backend:
        assert backend.batch_exists([*keys, *keys_of("b", 1)]) == 5
        assert_come_back(backend, other, keys, [30, 9, 2, 11, 4], expected)
        assert int(other.kv_buffer.count_nonzero()) == sum(int(one.count_nonzero()) for one in expected)


@pytest.mark.parametrize("host", [None, {"blocks": 8}], ids=["buffer", "host tier"])
def test_more_pages_than_host_memory_pass_through_it(host, disk):
    pool, keys = SGLangHostPool("page_first", pages=180), keys_of("a", 90)
    expected = filled(pool, range(90))
    step = 90 if host is None else 8  # a host tier drops what does not fit; the buffer waits
    with opened(pool, {"disk": disk, "host": host}, offload={"to_disk": "always"}) as backend:
        for begin in range(0, 90, step):
            span = range(begin, min(90, begin + step))
            assert backend.batch_set_v1(keys[begin : begin + step], pool.indices(*span)) == [True] * len(span)
            on_disk(backend, len(span) + begin)
        assert backend.batch_exists(keys) == 90
        assert_come_back(backend, pool, keys, range(90, 180), expected)
        counters = leader_of(backend).counters
        assert counters.onboard_blocks == 90
        assert counters.disk.onboard_blocks >= 26


def test_kvbm_serve_finds_the_sizes_in_the_log(disk, caplog):
    caplog.set_level("INFO", "kvbm")
    pool = SGLangHostPool("page_first")
    with opened(pool, {"disk": disk, "host": {"blocks": 8}}) as backend:
        found = ReportedSizes.of(caplog.text)
        assert found.host_blocks == 8
        assert found.block_bytes == backend._segment.info.block_bytes


def test_the_older_interface_is_refused_before_the_server_runs(disk):
    configuration = storage_config({"tiers": {"disk": disk}})
    del configuration.extra_config["interface_v1"]
    with pytest.raises(EnvironmentProblem) as caught:
        storage.KvbmHiCacheStorage(configuration, {})
    assert "interface_v1" in caught.value.hint


def test_a_missing_page_ends_the_prefix_and_changes_nothing(disk):
    pool, keys = SGLangHostPool("page_first_direct"), keys_of("a", 4)
    filled(pool, range(4))
    with opened(pool, {"disk": disk}) as backend:
        backend.batch_set_v1(keys[:2], pool.indices(0, 1))
        backend.batch_set_v1(keys[3:], pool.indices(3))
        on_disk(backend, 3)
        assert backend.batch_exists(keys) == 2
        assert backend.batch_get_v1(keys, pool.indices(20, 21, 22, 23))[:3] == [True, True, False]
        assert not pool.content(22).any()


def test_a_flipped_byte_is_false_and_the_page_is_recomputed(disk, tmp_path):
    pool, keys = SGLangHostPool("page_first"), keys_of("a", 3)
    expected = filled(pool, range(3))
    with opened(pool, {"disk": disk}) as backend:
        backend.batch_set_v1(keys, pool.indices(0, 1, 2))
        on_disk(backend, 3)
    (arena,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= 4096 * DISK_PAGES)
    data = bytearray(arena.read_bytes())
    at = data.index(pool_bytes(pool, 1))
    data[at + 7] ^= 0x10
    arena.write_bytes(data)
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_exists(keys) == 3
        assert backend.batch_get_v1(keys, pool.indices(10, 11, 12))[:2] == [True, False]
        assert not pool.content(11).any()
        assert leader_of(backend).counters.disk.checksum_failures == 1
        assert backend.batch_exists(keys) == 1
        assert backend.batch_set_v1(keys, pool.indices(0, 1, 2)) == [True] * 3
        on_disk(backend, 1)
        assert_come_back(backend, pool, keys, [10, 11, 12], expected)


def test_a_page_is_stored_only_when_all_of_it_is_copied(disk, monkeypatch):
    pool, keys = SGLangHostPool("page_first"), keys_of("a", 1)
    (expected,) = filled(pool, [0])
    copy_in = storage.copy_in

    def slow(slot, pieces):
        time.sleep(0.1)
        copy_in(slot, pieces)

    monkeypatch.setattr(storage, "copy_in", slow)
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_set_v1(keys, pool.indices(0)) == [True]
        on_disk(backend, 1)
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_get_v1(keys, pool.indices(10)) == [True]
        assert_pages(pool, [10], [expected])


def pool_bytes(pool, page):
    """The first piece of a page, as it is on disk."""
    import ctypes

    addresses, lengths = pool.get_page_buffer_meta(pool.indices(page))
    return ctypes.string_at(addresses[0], lengths[0])


def disk_process(backend):
    return leader_of(backend).lower_tiers[0].disk.process.pid


def test_a_killed_disk_process_costs_misses_and_comes_back(disk):
    pool, keys = SGLangHostPool("page_first"), keys_of("a", 3)
    expected = filled(pool, range(3))
    with opened(pool, {"disk": disk}) as backend:
        backend.batch_set_v1(keys, pool.indices(0, 1, 2))
        on_disk(backend, 3)
        os.kill(disk_process(backend), signal.SIGKILL)
        wait_until(lambda: not leader_of(backend).is_on)
        assert backend.batch_exists(keys) in (0, 3)
        assert backend.batch_set_v1(keys_of("b", 1), pool.indices(0)) in ([False], [True])
        wait_until(lambda: leader_of(backend).is_on)
        assert backend.batch_exists(keys) == 3
        assert_come_back(backend, pool, keys, [10, 11, 12], expected)


def test_a_stopped_disk_process_costs_one_deadline_and_writes_no_page_later(disk):
    pool, keys = SGLangHostPool("page_first"), keys_of("a", 3)
    filled(pool, range(3))
    with opened(pool, {"disk": disk}) as backend:
        backend.batch_set_v1(keys, pool.indices(0, 1, 2))
        on_disk(backend, 3)
        leader_of(backend).host.store.reset()  # what is left is on disk
        pid = disk_process(backend)
        os.kill(pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            assert backend.batch_get_v1(keys, pool.indices(10, 11, 12)) == [False] * 3
            assert time.monotonic() - began_s < leader_thread.LIMIT_S + 1.5
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: leader_of(backend).is_on and not leader_of(backend).lower_tiers[0].reads._open)
        assert not any(pool.content(page).any() for page in (10, 11, 12))
        assert backend.batch_get_v1(keys, pool.indices(10, 11, 12)) == [True] * 3


STOPS_ITSELF = """
import os, signal, sys
from pathlib import Path

if "kvbm.tiers.disk.service.server" in sys.orig_argv and not Path({pid!r}).exists():
    Path({pid!r} + ".new").write_text(str(os.getpid()))
    os.rename({pid!r} + ".new", {pid!r})
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_disk_process_that_is_stopped_while_the_storage_is_attached_is_used_when_it_goes_on(
    disk, tmp_path, monkeypatch
):
    """The first process stops before it says anything, so the start does not wait for it any longer."""
    pid = tmp_path / "pid"
    (home := tmp_path / "hook").mkdir()
    (home / "sitecustomize.py").write_text(STOPS_ITSELF.format(pid=str(pid)))
    monkeypatch.setenv("PYTHONPATH", str(home))
    monkeypatch.setattr(deadlines, "START_LIMIT_S", 0.5)
    pool, keys = SGLangHostPool("page_first"), keys_of("a", 3)
    expected = filled(pool, range(3))
    with opened(pool, {"disk": disk}) as backend:
        wait_until(lambda: pid.exists() and is_stopped(int(pid.read_text())))
        assert backend.batch_exists(keys) == 0
        assert backend.batch_set_v1(keys, pool.indices(0, 1, 2)) == [False] * 3
        assert backend.batch_get_v1(keys, pool.indices(10, 11, 12)) == [False] * 3
        os.kill(int(pid.read_text()), signal.SIGCONT)
        wait_until(lambda: leader_of(backend).is_on)
        assert backend.batch_set_v1(keys, pool.indices(0, 1, 2)) == [True] * 3
        on_disk(backend, 3)
        leader_of(backend).host.store.reset()
        assert_come_back(backend, pool, keys, [10, 11, 12], expected)
        assert leader_of(backend).counters.faults == 0


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_write_does_not_wait_for_the_shared_store(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_leader, "SHARED_WAIT_S", 600.0)
    pool, keys = SGLangHostPool("page_first"), keys_of("a", 32)
    filled(pool, range(32))
    tiers = {"host": {"blocks": 8}, "shared": {"url": f"file://{tmp_path}/shared"}}
    with opened(pool, tiers, offload={"to_shared": "always"}) as backend:
        wait_until(lambda: leader_of(backend).is_on)
        monkeypatch.setattr(leader_of(backend).lower_tiers[0], "_begin_writes", lambda: None)
        assert backend.batch_set_v1(keys, pool.indices(*range(32))) == [True] * 32


def test_two_engines_share_a_directory(tmp_path):
    keys = keys_of("a", 3)
    pools = [SGLangHostPool("page_first"), SGLangHostPool("page_first")]
    expected = filled(pools[0], range(3))
    tiers = {"host": {"blocks": 32}, "shared": {"url": f"file://{tmp_path}/shared"}}
    first, second = (opened(pool, tiers, offload={"to_shared": "always"}) for pool in pools)
    with first as writer, second as reader:
        assert writer.batch_set_v1(keys, pools[0].indices(0, 1, 2)) == [True] * 3
        wait_until(lambda: leader_of(writer).counters.shared.offload_blocks == 3)
        wait_until(lambda: reader.batch_exists(keys) == 3)
        assert_come_back(reader, pools[1], keys, [5, 6, 7], expected)


def test_ranks_with_mla_share_one_copy_that_one_of_them_writes(tmp_path, disk):
    keys = keys_of("a", 3)
    pools = [SGLangHostPool("page_first", is_mla=True) for _ in range(2)]
    expected = filled(pools[0], range(3))
    tiers = {"host": {"blocks": 32}, "disk": disk, "shared": {"url": f"file://{tmp_path}/shared"}}
    ranks = [{"is_mla_model": True, "tp_size": 2, "tp_rank": rank} for rank in range(2)]
    with opened(pools[0], tiers, **ranks[0]) as writer:
        assert writer.batch_set_v1(keys, pools[0].indices(0, 1, 2)) == [True] * 3
        wait_until(lambda: leader_of(writer).counters.shared.offload_blocks == 3)
        with opened(pools[1], tiers, **ranks[1]) as reader:
            assert [tier.kind for tier in leader_of(reader).lower_tiers] == [Tier.SHARED]
            wait_until(lambda: reader.batch_exists(keys) == 3)
            assert_come_back(reader, pools[1], keys, [5, 6, 7], expected)


@pytest.mark.parametrize(
    ("pool", "changes"),
    [
        (SGLangHostPool("page_head"), {}),
        (SGLangHostPool("page_first", dtype=__import__("torch").bfloat16), {}),
        (SGLangHostPool("page_first"), {"tp_size": 2}),
        (SGLangHostPool("page_first"), {"tp_size": 2, "tp_rank": 1}),
        (SGLangHostPool("page_first"), {"pp_size": 2, "pp_rank": 1}),
    ],
    ids=["layout", "dtype", "ranks", "another rank", "layers"],
)
def test_engines_that_differ_find_nothing_of_each_other(pool, changes, disk):
    keys, mine = keys_of("a", 1), SGLangHostPool("page_first")
    with opened(mine, {"disk": disk}) as backend:
        backend.batch_set_v1(keys, mine.indices(0))
        on_disk(backend, 1)
    with opened(pool, {"disk": disk}, **changes) as backend:
        assert backend.batch_exists(keys) == 0
    with opened(mine, {"disk": disk}) as backend:
        assert backend.batch_exists(keys) == 1


def test_other_weights_find_nothing(disk, identity):
    keys, pool = keys_of("a", 1), SGLangHostPool("page_first")
    with opened(pool, {"disk": disk}) as backend:
        backend.batch_set_v1(keys, pool.indices(0))
        on_disk(backend, 1)
    identity["weights"] = "b"
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_exists(keys) == 0


def test_after_a_change_of_the_weights_nothing_is_read_or_written(disk):
    keys, pool = keys_of("a", 2), SGLangHostPool("page_first")
    with opened(pool, {"disk": disk}) as backend:
        backend.batch_set_v1(keys[:1], pool.indices(0))
        on_disk(backend, 1)
        backend.weights_may_change("update_weights_from_disk")
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, pool.indices(10, 11)) == [False, False]
        assert backend.batch_set_v1(keys[1:], pool.indices(1)) == [False]
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_exists(keys) == 1
        backend.weights_may_change("update_weights_from_disk")
        backend.clear()
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_exists(keys) == 0, "pages are cleared also then"


def test_clear_forgets_every_page(disk):
    keys, pool = keys_of("a", 2), SGLangHostPool("page_first")
    with opened(pool, {"disk": disk}) as backend:
        backend.batch_set_v1(keys, pool.indices(0, 1))
        on_disk(backend, 2)
        backend.clear()
        assert backend.batch_exists(keys) == 0
        assert backend.batch_set_v1(keys[:1], pool.indices(0)) == [True]
        on_disk(backend, 3)
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_exists(keys) == 1


@pytest.mark.parametrize("keys", [["zz"], ["ab"], [7]], ids=["not hexadecimal", "short", "no text"])
def test_a_key_that_is_no_hash_of_sglang_is_absent(keys, disk):
    pool = SGLangHostPool("page_first")
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, pool.indices(0)) == [False]
        assert backend.batch_set_v1(keys, pool.indices(0)) == [False]
        assert backend.batch_exists(keys_of("a", 1)) == 0
        assert not backend.boundary.is_off


def test_pages_outside_the_pool_are_refused(disk):
    keys, pool = keys_of("a", 1), SGLangHostPool("page_first")
    with opened(pool, {"disk": disk}) as backend:
        assert backend.batch_set_v1(keys, pool.indices(pool.page_num)) == [False]
        assert backend.batch_set_v1(keys, pool.indices(0, 1)) == [False]
        assert backend.batch_exists(keys) == 0


def test_an_exception_of_the_leader_turns_the_cache_off_and_reaches_nobody(disk, monkeypatch):
    keys, pool = keys_of("a", 1), SGLangHostPool("page_first")
    with opened(pool, {"disk": disk}) as backend:
        monkeypatch.setattr(leader_of(backend), "step", lambda: 1 / 0)
        assert backend.batch_set_v1(keys, pool.indices(0)) in ([False], [True])
        wait_until(lambda: backend.boundary.is_off)
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, pool.indices(0)) == [False]


def test_what_cannot_be_stored_stops_the_start(disk):
    unknown = SGLangHostPool("page_first")
    unknown.layout = "page_first_kv_split"
    with pytest.raises(EnvironmentProblem, match="page_first_kv_split"), opened(unknown, {"disk": disk}):
        pass
    with pytest.raises(EnvironmentProblem, match="only a shared tier"):
        storage.KvbmHiCacheStorage(storage_config({"tiers": {"disk": disk}}, is_mla_model=True, tp_size=2), {})
    with pytest.raises(EnvironmentProblem, match="another number of ranks"):
        storage.KvbmHiCacheStorage(storage_config({"tiers": {"disk": disk}}, should_split_heads=True), {})
    pool = SGLangHostPool("page_first")
    with opened(pool, {"disk": disk}) as backend, pytest.raises(EnvironmentProblem, match="`mamba`"):
        backend.register_mem_host_pool_v2(unknown, "mamba")


def test_an_unknown_identity_keeps_nothing_for_the_next_start(disk, monkeypatch):
    keys, pool = keys_of("a", 1), SGLangHostPool("page_first")
    monkeypatch.setattr(storage, "describe", lambda facts, doubt: known(facts, "in doubt"))
    for _ in range(2):
        with opened(pool, {"disk": disk}) as backend:
            assert backend.batch_exists(keys) == 0
            backend.batch_set_v1(keys, pool.indices(0))
            on_disk(backend, 1)
            assert backend.batch_exists(keys) == 1
