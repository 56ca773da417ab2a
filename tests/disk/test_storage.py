"""DiskTier on real files, with O_DIRECT: written blocks are read and survive, forgotten ones are gone."""

import ctypes
import mmap
import os
import shutil
import threading
import time

import numpy as np
import pytest
from disk_rig import LIMIT_S, QUICK, assembled, instance_of, left_in, make_hash, opened

from kvbm.errors import InvariantError
from kvbm.tiers.disk import index_thread, storage
from kvbm.tiers.disk.directory import LOCK
from kvbm.tiers.disk.io.threads import ThreadsIO
from kvbm.tiers.disk.orders import Read
from kvbm_cli.store.caches import list_caches


def test_blocks_come_back_as_they_were(tmp_path):
    with opened(tmp_path) as rig:
        assert rig.write(range(8), range(8)).is_good == (True,) * 8
        assert rig.read(range(8), range(8)).is_good == (True,) * 8
        counters = rig.tier.counters
        assert counters.blocks_written == counters.blocks_read == 8
        assert counters.bytes_written == 8 * rig.block_bytes
        assert counters.flushes == 1


def test_blocks_survive_a_restart_the_oldest_first(tmp_path):
    with opened(tmp_path) as rig:
        rig.write([5, 6], [3, 9])
        rig.write([7, 8], [1, 0])
    with opened(tmp_path) as rig:
        found = rig.recovered()
        assert list(found.items()) == [(5, 3), (6, 9), (7, 1), (8, 0)]
        assert all(rig.read(found, found.values()).is_good)
        assert rig.recovered() == {}


def test_blocks_that_were_there_are_told_some_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FOUND_BATCH_BLOCKS", 3)
    with opened(tmp_path) as rig:
        rig.write(range(8), range(8))
    with opened(tmp_path) as rig:
        parts = [rig.tier.recovered() for _ in range(4)]
        assert [len(found.hashes) for found in parts] == [3, 3, 2, 0]
        assert [found.is_last for found in parts] == [False, False, True, True]


def test_slots_in_any_order_and_a_part_of_them(tmp_path):
    with opened(tmp_path) as rig:
        rig.write(range(12), [11, 3, 4, 5, 0, 9, 8, 7, 1, 2, 15, 14])
        assert rig.read([9, 0, 7, 3], [2, 11, 7, 5]).is_good == (True,) * 4


def test_overwritten_slot_gives_its_former_block_back_as_a_miss(tmp_path):
    with opened(tmp_path) as rig:
        rig.write([1], [0])
        rig.write([2], [0])
        assert rig.read([1], [0]).is_good == (False,)
        assert rig.tier.counters.checksum_misses == 1
        assert rig.read([2], [0]).is_good == (True,)


def test_cache_is_used_when_blocks_move_and_not_when_nothing_does(tmp_path, monkeypatch):
    monkeypatch.setattr(index_thread, "TOUCH_INTERVAL_S", 0.0)
    long_ago = 1_000_000_000

    def last_used():
        (cache,) = list_caches(tmp_path)
        return cache.last_used

    with assembled(tmp_path) as rig:
        rig.write([1], [0])
        rig.wait_until(lambda: rig.tier._index_thread._moved_blocks == 1)
        for move in (lambda: rig.read([1], [0]), lambda: rig.write([2], [1])):
            os.utime(instance_of(tmp_path) / LOCK, (long_ago, long_ago))
            time.sleep(3 * QUICK.probe_interval_s)
            assert last_used() == long_ago
            move()
            rig.wait_until(lambda: last_used() > long_ago)


def test_forgotten_blocks_are_not_recovered(tmp_path):
    with opened(tmp_path) as rig:
        rig.write(range(4), range(4))
        rig.tier.forget([1, 2])
    assert left_in(tmp_path) == {0: 0, 3: 3}


def test_clear_is_durable_when_it_returns(tmp_path):
    with opened(tmp_path) as rig:
        rig.write(range(4), range(4))
        rig.clear()
        rig.write([9], [2])
    assert left_in(tmp_path) == {9: 2}


def test_the_owner_hears_of_a_durable_clear_at_once(tmp_path):
    with opened(tmp_path) as rig:
        has_heard = threading.Event()
        rig.tier.on_result = has_heard.set
        clear = rig.tier.begin_clear()
        assert has_heard.wait(60)
        assert clear.is_durable


def test_clear_that_ends_persistence_leaves_nothing_for_the_next_start_however_this_one_ends(tmp_path):
    with opened(tmp_path) as rig:
        rig.write(range(4), range(4))
        rig.start_write([5], [5], [5])
        rig.clear(ends_persistence=True)
        assert rig.write([9], [2]).is_good == (True,)
        assert rig.read([9], [2]).is_good == (True,), "this engine still has its disk"
        shutil.copytree(tmp_path, tmp_path.with_name("killed"))
        rig.clear()
        rig.write([7], [3])
    for directory in (tmp_path.with_name("killed"), tmp_path):
        with opened(directory) as rig:
            assert rig.recovered() == {}
            rig.write([1], [0])
        assert left_in(directory) == {1: 0}, "the next start persists again"


def test_clear_of_one_tenant_leaves_the_others(tmp_path):
    with opened(tmp_path) as rig:
        rig.write(range(4), range(4), [b"a", b"b", b"a", b""])
        rig.clear(b"a")
    assert left_in(tmp_path) == {1: 1, 3: 3}


def test_clear_forgets_what_is_in_flight(tmp_path):
    with opened(tmp_path, host_slots=64, block_count=64) as rig:
        tickets = [rig.start_write([number], [number], [number]) for number in range(64)]
        rig.clear()
        for ticket in tickets:
            rig.wait(ticket)
    assert left_in(tmp_path, host_slots=64, block_count=64) == {}


def test_second_engine_gets_a_cache_of_its_own_and_both_come_back(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.write([1], [0])
        second.write([2], [0])
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert {**first.recovered(), **second.recovered()} == {1: 0, 2: 0}


def test_without_persistence_nothing_is_left(tmp_path):
    with opened(tmp_path / "cache", persist=False) as rig:
        assert rig.write([1, 2], [0, 1]).is_good == (True, True)
        assert rig.read([1, 2], [0, 1]).is_good == (True, True)
        assert list((tmp_path / "cache").iterdir()) == []
        rig.clear()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("allocator", ["default", "open-direct"])
@pytest.mark.parametrize("persist", [True, False])
def test_both_allocators_write_past_the_page_cache(tmp_path, allocator, persist):
    with opened(tmp_path, allocator=allocator, persist=persist) as rig:
        assert all(rig.write(range(3), range(3)).is_good)
        assert all(rig.read(range(3), range(3)).is_good)


def cached_pages(path):
    """How many pages of a file are in the page cache."""
    length = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ) as mapping:
        pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapping, np.uint8)
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), length, ctypes.c_void_p(pages.ctypes.data))
            == 0
        )
        del view
    return int((pages & 1).sum())


def test_buffered_when_told_so_and_the_page_cache_stays_empty(tmp_path):
    with opened(tmp_path, o_direct=False) as rig:
        arena = instance_of(tmp_path) / "arena"
        assert all(rig.write(range(12), range(12)).is_good)
        assert cached_pages(arena) < 8
        assert all(rig.read(range(12), range(12)).is_good)
        assert cached_pages(arena) < 8


@pytest.mark.parametrize("persist", [True, False])
def test_other_io_is_opened_in_the_directory_of_the_arena(tmp_path, monkeypatch, persist):
    asked = []

    def open_io(wanted, fd, *, path, shards, is_direct):
        asked.append((wanted, path, is_direct, [shard.shape for shard in shards]))
        return ThreadsIO(fd)

    monkeypatch.setattr("kvbm.tiers.disk.io.select.open_io", open_io)
    with opened(tmp_path, io="auto", persist=persist) as rig:
        assert all(rig.write(range(3), range(3)).is_good)
        directory = instance_of(tmp_path) if persist else tmp_path
    assert asked == [("auto", directory / "arena", True, [(16, 8192), (16, 4096)])]


def test_closed_tier_ends_every_ticket(tmp_path):
    with opened(tmp_path, host_slots=64, block_count=64) as rig:
        tickets = [rig.start_write([number], [number], [number]) for number in range(32)]
        rig.tier.close(LIMIT_S)
        tickets.append(rig.start_read([1], [1], [40]))
        results = [rig.wait(ticket) for ticket in tickets]
        good = {number for number in range(32) if results[number].is_good == (True,)}
        assert results[-1].is_good == (False,)
    with opened(tmp_path, host_slots=64, block_count=64) as rig:
        assert set(rig.recovered()) == good


@pytest.mark.parametrize("disk_slots", [[16], [-1]])
def test_slot_that_is_none_is_a_bug_of_ours(tmp_path, disk_slots):
    with opened(tmp_path) as rig:
        with pytest.raises(InvariantError):
            rig.tier.submit(rig.order_write([make_hash(1)], [0], disk_slots))
        with pytest.raises(InvariantError):
            rig.tier.submit(Read(1, [make_hash(1)], disk_slots, [0]))
        with pytest.raises(InvariantError):
            rig.tier.forget(disk_slots)


def test_writing_a_slot_twice_at_a_time_is_a_bug_of_ours(tmp_path):
    with opened(tmp_path) as rig:
        rig.start_write([1], [0], [5])
        with pytest.raises(InvariantError):
            rig.start_write([2], [1], [5])
