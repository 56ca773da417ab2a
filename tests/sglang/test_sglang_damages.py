"""Damages of the disk below SGLang's storage, done while no SGLang runs: no page is wrong, and no method raises.

The storage and its disk process are real, the host pool is a contract with bytes (host_pools.py). The damages are those
of tests/chaos. `pytest -n 0 -m "" tests/sglang/test_sglang_damages.py` runs all cases in six minutes, and with
KVBM_WRITE_RESULTS=1 writes their counts to bench/results/<machine>-sglang-damages.json.
"""

import hashlib
import random
import shutil
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from chaos_damages import BELOW_ENGINES, Caches, cases, instance_of, spoiled
from host_pools import SGLangHostPool, pretend_identity, storage_config
from kept_results import KeptResults
from test_sglang_storage import keys_of, leader_of, on_disk, wait_until

from kvbm.engines.sglang import storage
from kvbm.errors import EnvironmentProblem

CASES = 270
LAYOUTS = ("page_first_direct", "layer_first")
PAGE_TOKENS = 256  # 12 sectors of 4 KiB
DISK_PAGES = 72
OLD, WRITTEN, NEW = keys_of("old", 30), keys_of("written", 60), keys_of("new", 8)

pytestmark = pytest.mark.slow


def pool_of(layout, **changes):
    return SGLangHostPool(layout, page_size=PAGE_TOKENS, pages=len(WRITTEN) + 10, **changes)


def fill(pool, place, key):
    pool.fill(place, int(key[:8], 16))


@pytest.fixture(scope="module")
def contents():
    """The right bytes of each page."""
    found = {}
    for layout in LAYOUTS:
        pool = pool_of(layout)
        for key in (*OLD, *WRITTEN, *NEW):
            fill(pool, 0, key)
            found[layout, key] = pool.content(0)
    return found


@pytest.fixture(scope="module")
def identity():
    with pytest.MonkeyPatch.context() as patch:
        yield pretend_identity(patch)


@contextmanager
def opened(directory, pool):
    disk = {"directory": str(directory), "blocks": DISK_PAGES, "drain_s": 30.0}
    backend = storage.KvbmHiCacheStorage(storage_config({"tiers": {"disk": disk}, "metrics": {"serve": False}}), {})
    backend.register_mem_pool_host(pool)
    try:
        yield backend
    finally:
        backend.close()


def write(backend, pool, keys):
    for place, key in enumerate(keys):
        fill(pool, place, key)
    return backend.batch_set_v1(keys, pool.indices(*range(len(keys))))


def write_to_disk(backend, pool, keys):
    wait_until(lambda: all(write(backend, pool, keys)), 60.0)
    on_disk(backend, leader_of(backend).counters.offload_blocks)


@pytest.fixture(scope="module")
def caches(identity, tmp_path_factory):
    """By layout. The pages of `OLD` are evicted by those of `WRITTEN`; `older` has half of these. Pages of another
    model have the same keys."""
    found = {}
    for layout in LAYOUTS:
        home, pool = tmp_path_factory.mktemp(layout), pool_of(layout)
        with opened(home / "ended", pool) as backend:
            for keys in (OLD, WRITTEN[:30]):
                write_to_disk(backend, pool, keys)
            shutil.copytree(home / "ended", home / "older")
            write_to_disk(backend, pool, WRITTEN[30:])
            shutil.copytree(home / "ended", home / "killed")
        others = {"weights": ({"weights": "b"}, torch.float16), "dtype": ({}, torch.bfloat16)}
        for name, (facts, dtype) in others.items():
            identity.update({"weights": "a"} | facts)
            pool = pool_of(layout, dtype=dtype)
            with opened(home / name, pool) as backend:
                write_to_disk(backend, pool, WRITTEN)
        identity["weights"] = "a"
        slot_bytes = (instance_of(home / "ended") / "arena").stat().st_size // DISK_PAGES // 4096 * 4096
        found[layout] = {
            name: Caches(home / "ended", home / "killed", home / "older", home / name, slot_bytes) for name in others
        }
    return found


@pytest.fixture(scope="module")
def counted():
    """Counts of all cases; those of a whole run are kept."""
    command = 'pytest -n 0 -m "" tests/sglang/test_sglang_damages.py'
    results = KeptResults("sglang-damages", command, engine="xxhash")  # of SGLang, nothing is installed
    found = Counter()
    yield found
    if found["damages"] == CASES:
        results.add({"what": "damages at rest", **found})


def read(backend, pool, keys, right, counted, chosen):
    """Read pages into random places; return how many came, up to the first that did not."""
    places = chosen.sample(range(pool.page_num), len(keys))
    pool.kv_buffer.zero_()
    backend.batch_exists(keys)
    are_there = backend.batch_get_v1(keys, pool.indices(*places))
    touched = 0
    for key, place, is_there in zip(keys, places, are_there, strict=True):
        content = pool.content(place)
        touched += content.count_nonzero()
        is_right = bool((content == right[key]).all()) if is_there else not content.any()
        counted["wrong"] += not is_right
        assert is_right, f"{key}: {'wrong bytes' if is_there else 'bytes although it is missing'}"
    assert pool.kv_buffer.count_nonzero() == touched, "bytes in pages of others"
    counted["pages_asked"] += len(keys)
    counted["pages_read"] += sum(are_there)
    return (*are_there, False).index(False)


def are_stored_again(backend, pool, right, counted, chosen):
    """Whether new pages come back from disk. A busy machine may need several reads, whose deadline is 2 s."""
    wait_until(lambda: all(write(backend, pool, NEW)), 60.0)  # the disk may be off until its index is repaired
    leader = leader_of(backend)
    wait_until(lambda: all(leader.lower_tiers[0].contains(bytes.fromhex(key)) for key in NEW), 60.0)
    leader.host.store.reset()
    return any(read(backend, pool, NEW, right, counted, chosen) == len(NEW) for _ in range(10))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", list(cases(BELOW_ENGINES, CASES)))
def test_damage_at_rest_makes_no_page_wrong(number, tmp_path, caches, contents, counted):
    damage, layout = BELOW_ENGINES[number % len(BELOW_ENGINES)], LAYOUTS[number // len(BELOW_ENGINES) % len(LAYOUTS)]
    chosen = random.Random(f"1/{number}")
    right = {key: content for (of, key), content in contents.items() if of == layout}
    other = chosen.choice(("weights", "dtype"))
    counted.update(damages=1, wrong=0, exceptions=0)
    with spoiled(damage, caches[layout][other], tmp_path / "disk", chosen) as site:
        try:
            with opened(site.directory, pool := pool_of(layout)) as backend:
                read(backend, pool, WRITTEN, right, counted, chosen)
                for _ in range(4):
                    read(backend, pool, chosen.sample([*WRITTEN, *OLD, *NEW], 8), right, counted, chosen)
                if damage.keeps:
                    wait_until(lambda: read(backend, pool, chosen.sample(WRITTEN, 8), right, counted, chosen), 60.0)
                is_used = damage.area == "names" or are_stored_again(backend, pool, right, counted, chosen)
                counted["exceptions"] += backend.boundary.faults
                assert not backend.boundary.faults
            assert is_used, "the disk is not used again"
            with opened(site.directory, pool) as backend:
                read(backend, pool, [*WRITTEN, *NEW], right, counted, chosen)
                counted["exceptions"] += backend.boundary.faults
                assert not backend.boundary.faults
        except EnvironmentProblem as problem:
            if not site.may_refuse or str(site.directory) not in str(problem):
                raise
            counted["refused_to_start"] += 1


def test_a_page_of_another_key_is_not_right(contents):
    """So that a swapped page is noticed."""
    pages = {hashlib.sha256(content.numpy().tobytes()).digest() for content in contents.values()}
    assert len(pages) == len(OLD) + len(WRITTEN) + len(NEW)
