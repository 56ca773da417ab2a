"""KvbmTier below vLLM's own TieringOffloadingManager: what vLLM may ask for, and what may go wrong below.

vLLM ends the engine at any exception of a tier and at a job that is reported twice, and lets requests hang at one that
is never reported. So each test drives vLLM's own manager, whose assertions are the judge. test_native_offloading.py has
the whole engine.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager

import pytest
from offloading_rig import Offloading, bytes_of, key_of
from vllm.v1.kv_offload.base import LookupResult
from vllm_server import disk_process

from kvbm.engines.vllm import secondary_tier, weight_updates

pytestmark = pytest.mark.timeout(300)
FIRST, SECOND = [key_of(number) for number in range(8)], [key_of(number) for number in range(8, 16)]
OTHERS = [key_of(number) for number in range(16, 24)]


@pytest.fixture
def rig(tmp_path):
    with Offloading(tmp_path) as rig:
        yield rig


@contextmanager
def stopped_disk():
    """The process that does the disk's I/O does not run."""
    process = disk_process(os.getpid())
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_blocks_that_vllm_has_evicted_come_back(rig):
    rig.store(FIRST)
    rig.store(SECOND)
    assert rig.ask(FIRST, rig.request())[0] is LookupResult.HIT_PENDING
    rig.settle()
    assert rig.load(FIRST) == 8
    assert rig.load(SECOND) == 8
    assert rig.load(OTHERS) == 0


def test_blocks_outlive_the_engine(tmp_path):
    with Offloading(tmp_path) as rig:
        rig.store(FIRST)
    with Offloading(tmp_path) as rig:
        assert rig.load(FIRST) == 8


def test_a_group_of_the_cache_is_part_of_the_key(rig):
    rig.store([key_of(1, group=0)])
    rig.store(SECOND)
    assert rig.load([key_of(1, group=1)]) == 0


def test_a_damaged_block_is_a_miss_and_its_row_is_free_again(tmp_path):
    with Offloading(tmp_path, host_blocks=8) as rig:
        rig.store(FIRST)
        rig.store(SECOND)
        (arena,) = tmp_path.rglob("arena*")
        contents = bytearray(arena.read_bytes())
        place = contents.index(bytes(bytes_of(FIRST[3])))
        contents[place] ^= 1
        with arena.open("r+b") as file:
            file.seek(place)
            file.write(contents[place : place + 1])
        assert rig.load(FIRST) == 3
        rig.store(OTHERS)
        assert rig.load(OTHERS) == 8


def test_a_late_read_never_reaches_a_row_that_vllm_uses_again(tmp_path):
    with Offloading(tmp_path, host_blocks=8) as rig:
        read_late(rig)


def read_late(rig):
    rig.store(FIRST)
    rig.store(SECOND)
    for _ in range(4):
        context = rig.request()
        with stopped_disk():
            rig.ask(FIRST, context)
            began_s = time.monotonic()
            rig.settle_jobs()
            assert time.monotonic() - began_s < 10
            assert rig.ask(FIRST, context) == [LookupResult.MISS], "what has failed is not promised again"
            rig.manager.on_request_finished(context)
            begun = rig.begin_store(OTHERS)  # in the same rows
            rows = rig.rows.copy()
        time.sleep(0.05)
        assert (rig.rows == rows).all()
        rig.settle()
        rig.manager.on_request_finished(begun)
        assert rig.load(SECOND) == 8


def test_a_store_that_was_given_up_is_never_found_with_other_bytes(tmp_path):
    with Offloading(tmp_path, disk_blocks=400) as rig:
        for round_ in range(2):
            with stopped_disk():  # 64 slots between vLLM and the disk are full soon
                for number in range(10):
                    begun = rig.begin_store([key_of(1000 + 100 * round_ + 8 * number + one) for one in range(8)])
                    rig.settle_jobs()
                    rig.rows[:] = 0xEE
                    rig.manager.on_request_finished(begun)
            rig.settle(60)
        found = sum(rig.load([key_of(1000 + number)]) for number in range(300))
        assert found > 0


def test_a_reset_waits_one_deadline_and_leaves_no_job(rig):
    rig.store(FIRST)
    rig.store(SECOND)
    with stopped_disk():
        context = rig.request()
        rig.ask(FIRST, context)
        rig.step()
        began_s = time.monotonic()
        rig.manager.reset_cache()  # it asserts that no job is left
        assert time.monotonic() - began_s < secondary_tier.STORE_LIMIT_S + 5
    rig.settle()
    assert rig.load(FIRST) == rig.load(SECOND) == 0
    rig.store(OTHERS)
    rig.store(FIRST)
    assert rig.load(OTHERS) == 8, "the cache goes on for this engine"


def test_no_block_is_found_after_the_weights_may_have_changed(rig, tmp_path):
    rig.store(FIRST)
    rig.store(SECOND)
    weight_updates._note_rpc(None, "reload_weights")
    assert rig.load(FIRST) == rig.load(OTHERS) == 0
    begun = rig.begin_store(OTHERS)  # as long as vLLM's host memory was not reset
    rig.settle()
    rig.manager.on_request_finished(begun)
    rig.manager.reset_cache()
    assert rig.load(OTHERS) == 0
    rig.store(OTHERS)
    rig.store(FIRST)
    assert rig.load(OTHERS) == 8


def test_nothing_outlives_the_engine_after_a_change(tmp_path):
    with Offloading(tmp_path) as rig:
        rig.store(FIRST)
        weight_updates._note_rpc(None, "reload_weights")
        rig.manager.reset_cache()
        rig.store(SECOND)
    with Offloading(tmp_path) as rig:
        assert rig.load(FIRST) == rig.load(SECOND) == 0


def test_an_exception_below_is_a_miss_and_each_job_is_reported(rig, monkeypatch):
    rig.store(FIRST)
    rig.store(SECOND)
    context = rig.request()
    rig.ask(FIRST, context)
    monkeypatch.setattr(rig.tier._leader, "step", lambda: 1 / 0)
    rig.settle()
    assert rig.ask(FIRST, context) == [LookupResult.MISS]
    begun = rig.begin_store(OTHERS)
    rig.settle()
    rig.manager.on_request_finished(begun)
    rig.manager.reset_cache()
    assert rig.tier.boundary.faults == 1
    assert rig.load(OTHERS) == 0
