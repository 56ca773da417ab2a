"""KvbmTier below vLLM's own TieringOffloadingManager: what vLLM may ask for, and what may go wrong below.

vLLM ends the engine at any exception of a tier and at a job that is reported twice, and lets requests hang at one that
is never reported. So each test drives vLLM's own manager, whose assertions are the judge. test_native_offloading.py has
the whole engine.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from offloading_rig import BLOCK_TOKENS, Offloading, bytes_of, key_of, vllm_config
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import LookupResult, Medium, TierFilter, TierMatcher
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm_server import stopped_disk

from kvbm.child import deadlines
from kvbm.config import schema
from kvbm.engines.vllm import secondary_tier, weight_updates
from kvbm.errors import EnvironmentProblem
from kvbm.leader import storage_leader

sys.path += [str(Path(__file__).parents[1] / name) for name in ("shared", "vllm_contract")]
import small_s3
import test_tier_contract as contract
from fault_proxy import FaultProxy

pytestmark = pytest.mark.timeout(300)
FIRST, SECOND = [key_of(number) for number in range(8)], [key_of(number) for number in range(8, 16)]
OTHERS = [key_of(number) for number in range(16, 24)]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may take long for a store."""
    monkeypatch.setattr(secondary_tier, "STORE_LIMIT_S", 60.0)


@pytest.fixture
def rig(tmp_path):
    with Offloading(tmp_path) as rig:
        yield rig


def test_the_interface_is_the_one_of_the_contract():
    assert SecondaryTierManager.__abstractmethods__ == set(contract.ABSTRACT)
    for name, arguments in (contract.ABSTRACT | contract.OPTIONAL).items():
        assert tuple(inspect.signature(getattr(SecondaryTierManager, name)).parameters)[1:] == arguments
    assert tuple(inspect.signature(SecondaryTierManager).parameters) == contract.CONSTRUCTOR
    assert {one.name for one in dataclasses.fields(JobResult)} == contract.RESULT
    assert {one.name for one in dataclasses.fields(TransferJob)} >= contract.JOB
    assert {one.name for one in LookupResult} >= {"HIT", "MISS", "RETRY"}


def reset(rig):
    rig.manager.reset_cache()


def reload(_rig):
    weight_updates._note_rpc(None, "reload_weights")


def test_blocks_that_vllm_has_evicted_come_back(rig):
    rig.store(FIRST)
    rig.store(SECOND)
    assert rig.ask(FIRST, rig.request(FIRST))[0] is LookupResult.HIT_PENDING
    rig.settle()
    assert rig.load(FIRST) == 8
    assert rig.load(SECOND) == 8
    assert rig.load(OTHERS) == 0


def test_blocks_outlive_the_engine(tmp_path):
    with Offloading(tmp_path) as rig:
        rig.store(FIRST)
    with Offloading(tmp_path) as rig:
        assert rig.load(FIRST) == 8


def copying_threads() -> int:
    return sum(one.name.startswith("kvbm-copy") for one in threading.enumerate())


def test_a_tier_whose_copying_threads_cannot_be_started_does_not_start(tmp_path, monkeypatch):
    before, start = copying_threads(), threading.Thread.start

    def start_one(thread):
        if thread.name.startswith("kvbm-copy") and copying_threads() > before:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_one)
        with pytest.raises(EnvironmentProblem, match="2 threads that copy blocks cannot be started: can't start new"):
            secondary_tier._copying_threads()
    assert copying_threads() == before
    with Offloading(tmp_path):
        assert copying_threads() == before + 2


def test_a_group_of_the_cache_is_part_of_the_key(rig):
    rig.store([key_of(1, group=0)])
    rig.store(SECOND)
    assert rig.load([key_of(1, group=1)]) == 0


def test_a_damaged_block_is_a_miss_and_its_row_is_free_again(tmp_path):
    with Offloading(tmp_path, host_blocks=4) as rig:
        rig.store_on_disk(FIRST)
        rig.store_on_disk(SECOND)
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
    with Offloading(tmp_path, host_blocks=4) as rig:
        read_late(rig)


def read_late(rig):
    rig.store_on_disk(FIRST)
    rig.store_on_disk(SECOND)
    for _ in range(4):
        context = rig.request(FIRST)
        with stopped_disk(os.getpid()):
            rig.ask(FIRST, context)
            rig.settle_jobs()  # long before `onboard.disk_timeout_s`, because the disk does not answer
            found = rig.ask(FIRST, context)  # kvbm's own memory may have had the last ones
            assert found[-1] is LookupResult.MISS, "what has failed is not promised again"
            assert LookupResult.HIT_PENDING not in found
            rig.manager.on_request_finished(context)
            begun = rig.begin_store(OTHERS)  # in the same rows
            rows = rig.rows.copy()
        time.sleep(0.05)
        assert (rig.rows == rows).all()
        rig.settle()
        rig.manager.on_request_finished(begun)
        assert rig.load(SECOND) == 8


def test_a_store_that_was_given_up_is_never_found_with_other_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(secondary_tier, "STORE_LIMIT_S", 0.5)
    with Offloading(tmp_path, disk_blocks=400) as rig:
        for round_ in range(2):
            with stopped_disk(os.getpid()):  # 64 slots between vLLM and the disk are full soon
                for number in range(10):
                    begun = rig.begin_store([key_of(1000 + 100 * round_ + 8 * number + one) for one in range(8)])
                    rig.settle_jobs()
                    rig.rows[:] = 0xEE
                    rig.manager.on_request_finished(begun)
            rig.settle(60)
        found = sum(rig.load([key_of(1000 + number)]) for number in range(300))
        assert found > 0


def test_a_reset_waits_for_no_read_and_leaves_no_job(tmp_path):
    with Offloading(tmp_path, host_blocks=4) as rig:
        rig.store_on_disk(FIRST)
        rig.store_on_disk(SECOND)
        with stopped_disk(os.getpid()):
            context = rig.request(FIRST)
            rig.ask(FIRST, context)
            rig.step()
            began_s = time.monotonic()
            rig.manager.reset_cache()  # it asserts that no job is left
            assert time.monotonic() - began_s < deadlines.ANSWER_LIMIT_S + 5
        rig.settle()
        assert rig.load(FIRST) == rig.load(SECOND) == 0


@pytest.mark.parametrize("change", [reload, reset])
def test_nothing_is_found_or_stored_after_the_weights_may_have_changed(tmp_path, change):
    with Offloading(tmp_path) as rig:
        rig.store(FIRST)
        rig.store(SECOND)
        begun = rig.begin_store(OTHERS[:4])
        change(rig)
        rig.settle()
        rig.manager.on_request_finished(begun)
        rig.manager.reset_cache()
        rig.store(OTHERS)
        rig.store(FIRST)
        assert rig.load(OTHERS) == 0
        rig.manager.reset_cache()
        assert rig.load(FIRST) == 0
    with Offloading(tmp_path) as rig:
        assert rig.load(FIRST) == rig.load(SECOND) == rig.load(OTHERS) == 0


IDLE = SimpleNamespace(get_num_free_blocks=lambda: 9, num_gpu_blocks=10, cached_block_hash_to_block=())


@pytest.mark.parametrize(
    ("disk_blocks", "pools", "level", "words"),
    [
        (200, [IDLE], "INFO", "new ones are kept"),
        (200, [], "WARNING", "none is kept until vLLM resets its offloading while"),
        (0, [IDLE], "WARNING", "none is kept until vLLM is started again"),
    ],
    ids=["idle", "busy", "no disk"],
)
def test_the_log_says_once_what_a_reset_means(tmp_path, monkeypatch, disk_blocks, pools, level, words):
    host_blocks = None if disk_blocks else 16
    shared = "" if disk_blocks else f"file://{tmp_path}/objects"
    with Offloading(tmp_path, disk_blocks=disk_blocks, host_blocks=host_blocks, shared=shared) as rig:
        rig.tier.pools = pools
        lines = []
        monkeypatch.setattr(secondary_tier.log, "handle", lines.append)
        rig.manager.reset_cache()
        assert [(line.levelname, words in line.getMessage()) for line in lines] == [(level, True)]


def media(*offsets):
    return {"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=offset)) for offset in offsets]}


UNNAMED = {
    "an adapter": {"lora_request": object()},
    "an image": media(0),
    "an image before all whole blocks end": media(BLOCK_TOKENS - 1),
    "streaming input": {"resumable": True},
    "tokens and embeddings": {"prompt_is_token_ids": [True]},
}


@pytest.mark.parametrize("facts", UNNAMED.values(), ids=UNNAMED)
def test_blocks_whose_names_do_not_say_what_they_hold_are_not_kept(rig, facts):
    rig.store(FIRST, **facts)
    rig.store(SECOND)
    rig.store(OTHERS)
    assert rig.load(FIRST) == 0
    assert rig.load(SECOND, **facts) == 0
    assert rig.load(SECOND) == 8


def test_text_in_front_of_the_first_image_is_kept_and_nothing_after_it(rig):
    rig.store(FIRST, **media(7 * BLOCK_TOKENS, 3 * BLOCK_TOKENS))
    rig.store(SECOND)
    rig.store(OTHERS)
    assert rig.load(FIRST) == 3
    assert rig.load(SECOND, **media(5 * BLOCK_TOKENS + 1)) == 5
    assert rig.load(SECOND) == 8


def test_an_image_makes_no_request_ask_for_it_in_the_shared_store(tmp_path, monkeypatch):
    with Offloading(tmp_path, shared=f"file://{tmp_path}/objects") as rig:
        asked, ask = [], rig.leader.ask
        monkeypatch.setattr(rig.leader, "ask", lambda chain: asked.append(chain) or ask(chain))
        assert rig.load(FIRST, **media(3 * BLOCK_TOKENS)) == 0
        assert asked == [FIRST[:3]]


@pytest.mark.parametrize("disk_blocks", [200, 0], ids=["disk", "no disk"])
def test_no_block_of_an_engine_with_adapters_outlives_it(tmp_path, disk_blocks):
    """vLLM's key of a block covers the name and the path of an adapter, not its weights."""
    tiers = {"disk_blocks": disk_blocks, "host_blocks": None if disk_blocks else 16}
    tiers["shared"] = f"file://{tmp_path}/objects"
    with Offloading(tmp_path / "a", **tiers, enable_lora=True) as rig:
        rig.store(FIRST)
        rig.store(SECOND)
        assert rig.load(FIRST) == (8 if disk_blocks else 0), "within the engine they can be found"
        rig.settle()
    assert not [path for path in tmp_path.joinpath("objects").rglob("*") if path.stat().st_size > 8192]
    with Offloading(tmp_path / "a", **tiers, enable_lora=True) as rig:
        assert rig.load(FIRST) == rig.load(SECOND) == 0


HINTS = {
    "low priority": {"kv_transfer_params": {"kvbm": {"priority": "low"}}},
    "demote": {"kv_transfer_params": {"kvbm": {"demote": True}}},
    "in kv_hints": {"kv_hints": KvHintsEnvelope("1", "1", [KvHintAction("1", "kvbm", "1", {"priority": "low"})])},
}


@pytest.mark.parametrize("hint", HINTS.values(), ids=HINTS)
def test_a_hint_that_demotes_keeps_new_blocks_out_of_the_tiers_and_finds_the_others(rig, hint):
    rig.store(FIRST)
    rig.store(SECOND, **hint)
    rig.store(OTHERS)
    assert rig.load(SECOND) == 0
    assert rig.load(FIRST, **hint) == 8
    assert rig.leader.counters.hinted_requests == 2


@pytest.mark.parametrize("params", [{"retain_s": 60}, {"priority": "high", "session": "a"}, {"priority": "least"}, 7])
def test_other_hints_change_nothing(rig, params):
    rig.store(FIRST, kv_transfer_params={"kvbm": params})
    rig.store(SECOND)
    assert rig.load(FIRST) == 8
    counters = rig.leader.counters
    is_valid = params not in ({"priority": "least"}, 7)
    assert (counters.hinted_requests, counters.invalid_hints) == (is_valid, not is_valid)
    assert not rig.tier.boundary.faults


@pytest.mark.parametrize(("medium", "found"), [(Medium.CPU, 0), (Medium.STORAGE, 8), (None, 8)])
def test_a_client_chooses_with_kv_load_tiers_whether_the_tier_is_asked(rig, medium, found):
    rig.store(FIRST)
    rig.store(SECOND)
    context = rig.request(FIRST)
    context.load_tier_filter = TierFilter((TierMatcher(medium),))
    assert rig.ask(FIRST, context).count(LookupResult.HIT_PENDING) == found
    rig.settle()
    rig.manager.on_request_finished(context)


def test_a_chain_is_stored_whole_however_slow_the_steps_are(tmp_path):
    keys = [key_of(number) for number in range(256)]
    with Offloading(tmp_path, rows=256, disk_blocks=400) as rig:
        begun = rig.begin_store(keys)
        while rig.jobs:
            rig.step()
            time.sleep(0.3)
        rig.settle()
        rig.manager.on_request_finished(begun)
        rig.store([key_of(1000 + number) for number in range(256)][:64])
    with Offloading(tmp_path, rows=256, disk_blocks=400) as rig:
        assert rig.load(keys) == 256


def test_a_job_that_cannot_be_read_is_reported_as_failed(rig):
    rig.tier.submit_load(SimpleNamespace(job_id=99, keys=None, chunk_ids=[1], req_context=rig.request()))
    rig.tier.submit_store(SimpleNamespace(job_id=100, keys=FIRST, chunk_ids=[99] * 8, req_context=rig.request()))
    results = list(rig.tier.get_finished_jobs())
    found = [(one.job_id, one.success, one.successful_keys) for one in results]
    assert found == [(99, False, None), (100, False, None)]


def test_a_request_that_has_ended_leaves_nothing_behind(tmp_path):
    with Offloading(tmp_path, host_blocks=4) as rig:
        rig.store_on_disk(FIRST)
        rig.store_on_disk(SECOND)
        with stopped_disk(os.getpid()):
            context = rig.request(FIRST)
            rig.ask(FIRST, context)
            rig.step()
            rig.manager.on_request_finished(context)
            rig.settle_jobs()
        assert not rig.tier._requests


def test_another_cache_beside_it_is_refused(monkeypatch, tmp_path):
    config = vllm_config()
    for name, extra in {
        "MultiConnector": {"connectors": []},
        "OffloadingConnector": {"secondary_tiers": [{"type": "fs"}, {"type": "KvbmTier"}]},
    }.items():
        transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config={"secondary_tiers": [], **extra})
        monkeypatch.setattr(config, "kv_transfer_config", transfer)
        with pytest.raises(EnvironmentProblem, match="the only connector, and no other tier"):
            Offloading(tmp_path)


def test_an_exception_below_is_a_miss_and_each_job_is_reported(rig, monkeypatch):
    rig.store(FIRST)
    rig.store(SECOND)
    context = rig.request(FIRST)
    rig.ask(FIRST[:4], context)
    begun = rig.begin_store(OTHERS[:2])
    monkeypatch.setattr(rig.leader, "step", lambda: 1 / 0)
    monkeypatch.setattr(rig.leader, "is_busy", lambda: True)
    rig.settle()
    rig.manager.on_request_finished(begun)
    assert rig.ask(FIRST, context) == [LookupResult.MISS]
    begun = rig.begin_store(OTHERS)
    rig.settle()
    rig.manager.on_request_finished(begun)
    rig.manager.reset_cache()
    assert rig.tier.boundary.faults == 1
    assert rig.load(OTHERS) == 0


@pytest.fixture
def s3(monkeypatch):
    with small_s3.running() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(params=["directory", "S3"])
def url(request, tmp_path):
    return f"file://{tmp_path}/objects" if request.param == "directory" else request.getfixturevalue("s3").url


def store_in_shared(rig, keys):
    """Store blocks; return when each is an object."""
    for key in keys:  # G2 is small here, and drops the blocks that a busy store is late for
        before = rig.leader.counters.shared.offload_blocks
        rig.store([key])
        until(rig, lambda before=before: rig.leader.counters.shared.offload_blocks > before)


def until(rig, condition):
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        rig.step()
        time.sleep(0.001)


def load_sometime(rig, keys):
    """Ask again and again: a store that is late for one request is known to the next one."""
    until(rig, lambda: rig.load(keys) == len(keys))


@pytest.mark.parametrize("disk_blocks", [200, 0], ids=["disk", "no disk"])
def test_two_engines_share_blocks(tmp_path, url, disk_blocks):
    tiers = {"disk_blocks": disk_blocks, "host_blocks": None if disk_blocks else 16, "shared": url}
    with Offloading(tmp_path / "b", **tiers) as second:
        assert second.load(FIRST) == 0
        with Offloading(tmp_path / "a", **tiers) as first:
            store_in_shared(first, FIRST)
            load_sometime(second, FIRST)
            assert second.load(SECOND) == 0
        assert second.leader.counters.shared.onboard_blocks >= 8
        second.manager.reset_cache()
        assert second.load(FIRST) == 0, "objects are of the weights before the reset"
        second.store(OTHERS)
    with Offloading(tmp_path / "c", **tiers) as third:
        load_sometime(third, FIRST)
        assert third.load(OTHERS) == 0


@pytest.mark.parametrize("disk_blocks", [400, 0], ids=["disk", "no disk"])
def test_a_job_that_is_larger_than_the_memory_between_reaches_the_shared_store(tmp_path, monkeypatch, disk_blocks):
    monkeypatch.setattr(schema, "SHARED_BUFFER_BYTES", 0)
    monkeypatch.setattr(storage_leader, "SHARED_WAIT_S", 60.0)
    keys = [key_of(number) for number in range(128)]
    host_blocks = None if disk_blocks else 16
    tiers = {
        "rows": 128,
        "disk_blocks": disk_blocks,
        "host_blocks": host_blocks,
        "shared": f"file://{tmp_path}/objects",
    }
    with Offloading(tmp_path, **tiers) as rig:
        until(rig, lambda: rig.shared.is_on)
        rig.store(keys)
        assert rig.leader.counters.shared.offload_blocks == 128
        assert not rig.leader.counters.shared.dropped_blocks


@pytest.mark.parametrize(
    ("disk_blocks", "host", "slots"),
    [
        (200, None, 2048),
        (0, {"blocks": 64, "managed_by": "engine"}, 2048),
        (200, {"blocks": 16}, 16),
        (0, {"capacity": "1MiB"}, 128),
    ],
)
def test_the_memory_above_a_shared_store_has_a_number_of_bytes_unless_it_is_set(
    tmp_path, monkeypatch, disk_blocks, host, slots
):
    monkeypatch.setattr(schema, "SHARED_BUFFER_BYTES", 16 << 20)
    with Offloading(tmp_path, disk_blocks=disk_blocks, host=host, shared=f"file://{tmp_path}/objects") as rig:
        assert len(rig.tier._segment.payload) == slots


def test_a_write_that_finds_no_room_is_not_tried_again_in_the_same_step(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_leader, "SHARED_WAIT_S", 60.0)
    with Offloading(tmp_path, disk_blocks=0, host_blocks=16, shared=f"file://{tmp_path}/objects") as rig:
        leader, walks = rig.leader, []
        shared = rig.shared
        until(rig, lambda: shared.is_on)
        keys = [key_of(number) for number in range(1000)]
        leader.host.store.allocate(16).register(keys[:16]).release()
        monkeypatch.setattr(shared, "due_blocks", lambda: walks.append(1) or iter([keys]))
        leader.step()
        questions = [
            leader.write(keys[16 + one : 20 + one], lambda loan: None, waits_for_shared=True) for one in range(9)
        ]
        for question in questions:
            next(question)
        assert len(walks) == 1
        leader.step()
        for question in questions:
            next(question)
            question.close()
        assert len(walks) == 2


def test_a_write_that_finds_room_looks_for_the_due_blocks_once_in_a_step_and_counts_what_was_written_since(
    tmp_path, monkeypatch
):
    with Offloading(tmp_path, disk_blocks=0, host_blocks=16, shared=f"file://{tmp_path}/objects") as rig:
        leader, walks = rig.leader, []
        shared = rig.shared
        until(rig, lambda: shared.is_on)
        keys = [key_of(number) for number in range(20)]
        due_blocks = shared.due_blocks
        monkeypatch.setattr(shared, "_begin_writes", lambda: None)
        monkeypatch.setattr(shared, "due_blocks", lambda: walks.append(1) or due_blocks())
        leader.step()
        loans = []
        for one in range(0, 20, 4):
            question = leader.write(keys[one : one + 4], loans.append, waits_for_shared=True)
            next(question)
            if len(loans) * 4 > one:
                loans[-1].is_over = True
                assert list(question) == []
            else:
                question.close()
        assert (len(loans), len(walks)) == (4, 1)
        assert leader.readable(keys) == 16


def test_a_block_that_disk_and_shared_store_have_still_to_take_needs_one_slot(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "SHARED_BUFFER_BYTES", 0)
    with Offloading(tmp_path, shared=f"file://{tmp_path}/objects") as rig:
        leader, loans = rig.leader, []
        disk, shared = leader.lower_tiers
        until(rig, lambda: disk.is_on and shared.is_on)
        for tier in (disk, shared):
            monkeypatch.setattr(tier, "_begin_writes", lambda: None)
        leader.step()
        for begin in range(0, 64, 16):
            keys = [key_of(number) for number in range(begin, begin + 16)]
            question = leader.write(keys, loans.append, waits_for_shared=True)
            next(question)
            assert len(loans) == begin // 16 + 1
            loans[-1].is_over = True
            assert list(question) == []
        assert leader.host.store.free == 0
        question = leader.write([key_of(64)], loans.append, waits_for_shared=True)
        next(question)
        question.close()
        assert len(loans) == 4
        monkeypatch.undo()


def test_a_shared_store_that_takes_nothing_holds_up_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "SHARED_BUFFER_BYTES", 0)
    monkeypatch.setattr(storage_leader, "SHARED_WAIT_S", 0.01)
    keys = [key_of(number) for number in range(128)]
    with Offloading(tmp_path, rows=128, disk_blocks=400, shared=f"file://{tmp_path}/objects") as rig:
        shared = rig.shared
        until(rig, lambda: shared.is_on)
        monkeypatch.setattr(shared, "_begin_writes", lambda: None)
        begun = rig.begin_store(keys)
        rig.settle_jobs()
        rig.manager.on_request_finished(begun)
        until(rig, lambda: rig.leader.counters.disk.offload_blocks == 128)


def test_a_damaged_object_is_a_miss(tmp_path):
    tiers = {"disk_blocks": 0, "host_blocks": 16, "shared": f"file://{tmp_path}/objects"}
    with Offloading(tmp_path, **tiers) as rig:
        store_in_shared(rig, FIRST)
    holders = [path for path in (tmp_path / "objects").rglob("*") if path.is_file() and path.stat().st_size > 8192]
    assert len(holders) == 8
    for number, path in enumerate(holders):
        content = bytearray(path.read_bytes())
        content[number * 900] ^= 1
        path.write_bytes(content[: len(content) - number % 2])
    with Offloading(tmp_path, **tiers) as rig:
        until(rig, lambda: rig.load(FIRST) == 0 and rig.leader.counters.shared.bad_objects)


@pytest.mark.parametrize("fault", ["hang", "refuse", "unavailable"])
def test_a_store_that_does_not_answer_is_a_miss(tmp_path, s3, monkeypatch, fault):
    with FaultProxy(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        with Offloading(tmp_path, shared=s3.url) as rig:
            until(rig, lambda: rig.shared.is_on)
            proxy.fault = fault
            assert rig.load(FIRST) == 0
            rig.store(FIRST)
            assert rig.load(FIRST) == 8
            assert not rig.tier.boundary.faults


def test_a_question_without_an_answer_ends_and_vllm_does_not_wait_for_it(tmp_path, monkeypatch):
    with Offloading(tmp_path, shared=f"file://{tmp_path}/objects") as rig:
        asked = []
        monkeypatch.setattr(rig.shared, "must_wait", lambda name, *_: asked.append(name) or True)
        context = rig.request(FIRST)
        assert rig.ask(FIRST, context) == [LookupResult.RETRY, LookupResult.MISS], "vLLM's scan of the chain ends"
        rig.step()
        assert rig.ask(FIRST, context) == [LookupResult.RETRY, LookupResult.MISS]
        assert len(set(asked)) == 1, "one question for a chain"
        monkeypatch.setattr(secondary_tier, "FIND_LIMIT_S", 0.0)
        rig.tier._requests[context.req_id].end_s = time.monotonic()
        rig.step()
        assert rig.ask(FIRST, context) == [LookupResult.MISS]
        rig.manager.on_request_finished(context)
        assert rig.load(SECOND) == 0
        other = rig.request(FIRST)
        monkeypatch.setattr(secondary_tier, "FIND_LIMIT_S", 60.0)
        assert rig.ask(FIRST, other)[0] is LookupResult.RETRY
        rig.manager.reset_cache()
        assert rig.ask(FIRST, other) == [LookupResult.MISS]


def test_a_group_that_is_asked_from_its_end_waits_once(tmp_path, monkeypatch):
    """vLLM goes on at a MISS there, and waits for the request if any block is at RETRY."""
    with Offloading(tmp_path, shared=f"file://{tmp_path}/objects") as rig:
        asked, group = [], [key_of(number, group=1) for number in range(8)]
        tier = rig.shared
        monkeypatch.setattr(tier, "must_wait", lambda name, *_: asked.append(name) or len(asked) < 3)
        context = rig.request([*FIRST, *group])
        found = [rig.manager.lookup(key, context) for key in reversed(group)]
        assert found == [LookupResult.RETRY, *[LookupResult.MISS] * 7]
        while rig.tier._requests[context.req_id].question is not None:
            rig.step()
        assert {rig.manager.lookup(key, context) for key in reversed(group)} == {LookupResult.MISS}
        assert len(set(asked)) == 1
        assert rig.manager.lookup(FIRST[0], context) is LookupResult.MISS
        assert len(set(asked)) == 2, "another group is asked for by itself"


def test_a_step_visits_no_request_that_asks_nothing(rig):
    class Hidden(dict):
        values = items = __iter__ = None

    rig.request(FIRST)
    rig.tier._requests = Hidden(rig.tier._requests)
    rig.step()
    assert not rig.tier.boundary.faults


def test_a_question_ends_when_no_thread_copies_any_more(tmp_path, monkeypatch):
    with Offloading(tmp_path, shared=f"file://{tmp_path}/objects") as rig:
        shared = rig.shared
        monkeypatch.setattr(shared, "must_wait", lambda *_: True)
        ended, forget = [], shared.forget_request
        monkeypatch.setattr(shared, "forget_request", lambda name: ended.append("question") or forget(name))
        monkeypatch.setattr(secondary_tier, "wait", lambda _copies: ended.append("copies"))
        rig.ask(FIRST, rig.request(FIRST))
        rig.manager.reset_cache()
        assert ended == ["copies", "question"]


def test_a_question_does_not_outlive_the_cache(tmp_path, monkeypatch):
    with Offloading(tmp_path, shared=f"file://{tmp_path}/objects") as rig:
        monkeypatch.setattr(rig.shared, "must_wait", lambda *_: True)
        context = rig.request(FIRST)
        assert rig.ask(FIRST, context)[0] is LookupResult.RETRY
        monkeypatch.setattr(rig.leader, "step", lambda: 1 / 0)
        rig.step()
        assert rig.ask(FIRST, context) == [LookupResult.MISS]
        rig.manager.on_request_finished(context)


def test_what_could_not_be_forgotten_is_not_found(tmp_path, monkeypatch):
    with Offloading(tmp_path) as rig:
        rig.store(FIRST)
        rig.store(SECOND)
        rig.tier.pools = [IDLE]
        monkeypatch.setattr(rig.tier, "_give_up", lambda: 1 / 0)
        rig.tier.drain_jobs()
        assert rig.tier.boundary.is_off
        rig.primary.reset_cache()
        assert rig.load(FIRST) == 0
