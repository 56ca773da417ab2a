"""A large cache: ready soon after a restart, and small in memory."""

import errno
import gc
import os
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from disk_rig import HASH_BYTES, NAMESPACE, found_blocks, instance_of, make_hash, make_shards, opened, settings_for

from kvbm.host.machine_memory import LEAST_MARGIN_BYTES
from kvbm.tiers.disk import files, instance
from kvbm.tiers.disk.files import NoRoom
from kvbm.tiers.disk.index import ROWS_PER_STATEMENT, BlockIndex
from kvbm.tiers.disk.storage import DiskStorage

MILLION = 1_000_000
READY_S = 3.0
SMALLER = 200_000  # tracing memory is slow
BYTES_PER_BLOCK = 16


def make_cache(directory, count):
    """Rows as a tier would leave them, put there in bulk; the arena has no space and fits none of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "fallocate", lambda fd, mode, offset, length: os.ftruncate(fd, offset + length))
        open_cache(directory, count).close(10)
    index = BlockIndex.open(instance_of(directory) / "index.sqlite")
    connection = index._connection
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO blocks VALUES (?, ?, ?, 4096, ?, x'', 0.0)",
        ((slot, make_hash(slot), count - slot, slot) for slot in range(count)),
    )
    connection.execute("COMMIT")
    index.close()


def open_cache(directory, count):
    settings = settings_for(directory, block_count=count)
    return DiskStorage.open(settings, NAMESPACE, make_shards(4, 4096), hash_bytes=HASH_BYTES)


@pytest.mark.soak
def test_million_blocks_are_ready_within_three_seconds(tmp_path):
    make_cache(tmp_path, MILLION)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        tier = open_cache(tmp_path, MILLION)
        slots, hashes = found_blocks(tier)
        seconds.append(time.perf_counter() - started)
        tier.close(10)
    assert len(slots) == len(hashes) == MILLION
    assert slots[0] == MILLION - 1  # the one written longest ago
    assert slots[-1] == 0
    assert hashes[-1] == make_hash(0)
    assert min(seconds) < READY_S, seconds


@pytest.mark.soak
@pytest.mark.slow
def test_block_takes_few_bytes_and_no_object_in_memory(tmp_path):
    make_cache(tmp_path, SMALLER)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        tier = open_cache(tmp_path, SMALLER)
        found_blocks(tier)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] / SMALLER < BYTES_PER_BLOCK
        assert len(gc.get_objects()) - objects < 10_000
    finally:
        tracemalloc.stop()
    tier.close(10)


def test_one_statement_takes_many_rows(tmp_path):
    """Each statement costs the interpreter's lock once, and SQLite has a limit."""
    with opened(tmp_path, host_slots=2 * ROWS_PER_STATEMENT + 3, block_count=2 * ROWS_PER_STATEMENT + 3) as rig:
        count = rig.tier.slot_count
        assert all(rig.write(range(count), np.random.default_rng(1).permutation(count).tolist()).is_good)
        rig.tier.forget(range(1, count))
    with opened(tmp_path, block_count=2 * ROWS_PER_STATEMENT + 3) as rig:
        assert list(rig.recovered().values()) == [0]


def open_fitting(directory, capacity_bytes, **changes):
    settings = settings_for(directory, block_count=None, capacity_bytes=capacity_bytes, fit=True, **changes)
    tier = DiskStorage.open(settings, NAMESPACE, make_shards(4, 4096), hash_bytes=HASH_BYTES)
    slot_count = tier.slot_count
    tier.close(10)
    return slot_count


@pytest.fixture
def free(monkeypatch):
    """Bytes that the file system of an arena has free."""
    space = SimpleNamespace(f_blocks=1, f_frsize=4096, f_bavail=0, f_bfree=1 << 30)
    monkeypatch.setattr(files.os, "fstatvfs", lambda fd: space)
    return space


def test_a_cache_that_fits_itself_to_the_disk_keeps_its_size_after_a_restart(tmp_path, free):
    free.f_bavail = 4 << 20
    assert open_fitting(tmp_path, 100 * 4096) == 100
    free.f_bavail = 0  # it took the space
    assert open_fitting(tmp_path, 7 * 4096) == 100
    free.f_bavail = 4 << 20
    assert open_fitting(tmp_path, 1000 * 4096) == 100


def test_a_new_cache_that_fits_itself_takes_no_more_than_is_free(tmp_path, free):
    margin_pages = LEAST_MARGIN_BYTES // 4096
    free.f_bavail = margin_pages + 50
    assert open_fitting(tmp_path / "one", 100 * 4096) == 50
    free.f_bavail = margin_pages
    with pytest.raises(NoRoom, match="has no space to spare"):
        open_fitting(tmp_path / "two", 100 * 4096)


@pytest.mark.parametrize("reclaim", [False, True])
def test_a_new_cache_that_fits_itself_removes_unused_caches_only_if_it_may(tmp_path, free, monkeypatch, reclaim):
    """Such as those of an older version of the engine, or of another model."""
    margin_pages, unused = LEAST_MARGIN_BYTES // 4096, ["older", "old"]
    free.f_bavail = margin_pages + 50

    def remove(directory):
        free.f_bavail += 40
        return bool(unused) and bool(unused.pop())

    monkeypatch.setattr(instance, "reclaim_oldest", remove)
    assert open_fitting(tmp_path / "one", 60 * 4096, reclaim=reclaim) == (60 if reclaim else 50)
    assert unused == (["older"] if reclaim else ["older", "old"])


def test_a_new_cache_that_fits_itself_tries_again_if_another_engine_takes_the_space(tmp_path, free, monkeypatch):
    free.f_bavail, taken = 4 << 20, []

    def take(fd, start, end, **others):
        taken.append(end - start)
        if len(taken) == 1:
            free.f_bavail = LEAST_MARGIN_BYTES // 4096 + 50
            raise OSError(errno.ENOSPC, "no space")
        os.truncate(fd, end)

    monkeypatch.setattr(files, "_take_space", take)
    assert open_fitting(tmp_path, 100 * 4096) == 50
    assert taken[-1] < 100 * 4096
