"""Damages and faults below KvbmTier, with vLLM's own manager above it: no row is wrong, and vLLM's assertions hold.

`pytest -n 0 -m "" tests/vllm/test_tier_damages.py` runs all in a quarter of an hour, and with KVBM_WRITE_RESULTS=1
writes their counts to bench/results/<machine>-vllm-tier-damages.json. The damages are those of tests/chaos.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

import pytest
from kept_results import KeptResults
from offloading_rig import Offloading, bytes_of, key_of
from vllm_server import disk_process, stopped_disk

from kvbm.engines.vllm import secondary_tier
from kvbm.errors import EnvironmentProblem

sys.path.append(str(Path(__file__).parents[1] / "chaos"))
from chaos_damages import BELOW_ENGINES, Caches, cases, instance_of, spoiled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
AT_REST, LIVE, STOPS = 300, 30, 50
BLOCKS = 72
OLD, WRITTEN = [key_of(number) for number in range(30)], [key_of(number) for number in range(100, 160)]
NEW = [key_of(number) for number in range(200, 208)]
RESULTS = KeptResults("vllm-tier-damages", 'pytest -n 0 -m "" tests/vllm/test_tier_damages.py', key="what")


def opened(directory):
    return Offloading(directory, rows=64, disk_blocks=BLOCKS, host_blocks=16)


def write(rig, keys):
    for begin in range(0, len(keys), 8):
        rig.store_on_disk(keys[begin : begin + 8])


@pytest.fixture(scope="module", autouse=True)
def patient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secondary_tier, "STORE_LIMIT_S", 60.0)
        yield


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The blocks of `OLD` are evicted by those of `WRITTEN`; `older` has half of these. Blocks of another model have
    the same keys and other contents."""
    home = tmp_path_factory.mktemp("caches")
    with opened(home / "ended") as rig:
        write(rig, OLD)
        write(rig, WRITTEN[:30])
        shutil.copytree(home / "ended", home / "older")
        write(rig, WRITTEN[30:])
        shutil.copytree(home / "ended", home / "killed")
    with pytest.MonkeyPatch.context() as patch:
        described = secondary_tier.identity
        patch.setattr(secondary_tier, "identity", lambda config: ({**described(config)[0], "weights": "b"}, ""))
        with opened(home / "other") as rig:
            rig.contents = lambda key: ~bytes_of(key)
            write(rig, WRITTEN)
    slot_bytes = (instance_of(home / "ended") / "arena").stat().st_size // BLOCKS // 4096 * 4096
    return Caches(home / "ended", home / "killed", home / "older", home / "other", slot_bytes)


@pytest.fixture(scope="module")
def counted():
    """Counts by the kind of a case, and the numbers of the cases that have passed; those of long runs are kept."""
    found, numbers = defaultdict(lambda: Counter(cases=0, wrong=0, exceptions=0)), defaultdict(list)
    yield found, numbers
    for what, counts in found.items():
        counts["cases"] = len(numbers[what])
        if counts["cases"] >= LIVE:
            RESULTS.add({"what": f"{what} {min(numbers[what])} to {max(numbers[what])}", **counts})


def look(rig, keys, counts):
    """Load blocks from the disk; return how many came, up to the first that did not."""
    rig.forget_host()
    counts["asked"] += len(keys)
    try:
        came = rig.load(keys)
    except AssertionError as error:
        counts["wrong"] += "wrong bytes" in str(error)
        raise
    counts["came"] += came
    return came


def are_stored_again(rig, counts):
    write(rig, NEW)
    return any(look(rig, NEW, counts) == len(NEW) for _ in range(10))  # a busy machine may be late for one


@pytest.mark.parametrize("number", list(cases(BELOW_ENGINES, AT_REST)))
def test_damage_at_rest_makes_no_block_wrong(number, tmp_path, caches, counted):
    damage, chosen = BELOW_ENGINES[number % len(BELOW_ENGINES)], Random(f"1/{number}")
    counts = counted[0]["damages at rest"]
    with spoiled(damage, caches, tmp_path / "disk", chosen) as site:
        try:
            with opened(site.directory) as rig:
                counts["refused"] += rig.cannot_open()
                look(rig, WRITTEN, counts)
                for _ in range(4):
                    look(rig, chosen.sample([*WRITTEN, *OLD, *NEW], 8), counts)
                end_s = time.monotonic() + 60
                while damage.keeps and not look(rig, chosen.sample(WRITTEN, 8), counts):
                    assert time.monotonic() < end_s, "nothing is found although the damage keeps most blocks"
                assert damage.area == "names" or are_stored_again(rig, counts)
                counts["exceptions"] += rig.tier.boundary.faults
                assert not rig.tier.boundary.faults
            if number % 3 == 0:
                with opened(site.directory) as rig:
                    look(rig, [*WRITTEN, *NEW][:64], counts)
                    assert not rig.tier.boundary.faults
        except EnvironmentProblem as problem:
            if not site.may_refuse or str(site.directory) not in str(problem):
                raise
            counts["refused"] += 1
    counted[1]["damages at rest"].append(number)


def is_killed(_directory, _chosen):
    disk_process(os.getpid()).kill()


def is_stopped(_directory, chosen):
    with stopped_disk(os.getpid()):
        time.sleep(chosen.random() * 3)


def arena_is_cut(directory, chosen):
    (arena,) = directory.rglob("arena")
    os.truncate(arena, chosen.randrange(arena.stat().st_size))


def arena_is_overwritten(directory, chosen):
    (arena,) = directory.rglob("arena")
    with arena.open("r+b") as file:
        for _ in range(200):
            file.seek(chosen.randrange(arena.stat().st_size))
            file.write(bytes([chosen.randrange(256)]))


def blocks_are_exchanged(directory, chosen):
    (arena,) = directory.rglob("arena")
    with arena.open("r+b") as file:
        for _ in range(30):
            ends = [8192 * one for one in chosen.sample(range(arena.stat().st_size // 8192), 2)]
            contents = [os.pread(file.fileno(), 8192, end) for end in ends]
            for end, content in zip(ends, reversed(contents), strict=True):
                os.pwrite(file.fileno(), content, end)


def directory_is_deleted(directory, _chosen):
    shutil.rmtree(directory)


FAULTS = (
    is_killed,
    is_stopped,
    arena_is_cut,
    arena_is_overwritten,
    blocks_are_exchanged,
    directory_is_deleted,
)


@pytest.mark.parametrize(
    "number", [pytest.param(one, marks=() if one < len(FAULTS) else pytest.mark.soak) for one in range(LIVE)]
)
def test_a_fault_below_a_living_engine_makes_no_block_wrong(number, tmp_path, counted):
    fault, chosen = FAULTS[number % len(FAULTS)], Random(f"2/{number}")
    counts = counted[0]["live faults"]
    with opened(tmp_path / "disk") as rig:
        write(rig, WRITTEN)
        rig.forget_host()
        context = rig.request(WRITTEN)
        rig.ask(WRITTEN[:32], context)
        begun = rig.begin_store(NEW)
        for _ in range(chosen.randrange(3)):
            rig.step()
        fault(tmp_path / "disk", chosen)
        rig.settle_jobs()
        for one in (begun, context):
            rig.manager.on_request_finished(one)
        for _ in range(6):
            counts["asked"] += 8
            counts["came"] += rig.load(chosen.sample([*WRITTEN, *NEW], 8))
            rig.settle_jobs()
            rig.primary.reset_cache()
        counts["exceptions"] += rig.tier.boundary.faults
        assert not rig.tier.boundary.faults
    counted[1]["live faults"].append(number)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_load_that_was_stopped_never_reaches_a_row_that_is_used_again(tmp_path):
    counts, others = Counter(stops=0, changed_rows=0, wrong=0), [key_of(number) for number in range(300, 308)]
    with Offloading(tmp_path, host_blocks=4) as rig:
        rig.store_on_disk(WRITTEN[:8])
        for number in range(STOPS):
            rig.forget_host()
            context = rig.request(WRITTEN[:8])
            with stopped_disk(os.getpid()):
                rig.ask(WRITTEN[:8], context)
                rig.settle_jobs()  # given up: the rows are vLLM's again
                rig.manager.on_request_finished(context)
                begun = rig.begin_store([key_of(1000 + 8 * number + one) for one in range(8)])
                rows = rig.rows.copy()
            time.sleep(0.05)
            rig.settle()
            counts["stops"] += 1
            counts["changed_rows"] += int((rig.rows != rows).any(axis=1).sum())
            rig.manager.on_request_finished(begun)
            look(rig, others, counts)
            counts["came_back"] += look(rig, WRITTEN[:8], counts) > 0
    assert not counts["changed_rows"]
    assert counts["came_back"] == STOPS
    RESULTS.add({"what": "SIGSTOP during a load, rows used again, SIGCONT", **counts})


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_store_that_was_stopped_never_has_the_bytes_of_a_row_that_is_used_again(tmp_path, monkeypatch):
    counts = Counter(stops=0, wrong=0)
    monkeypatch.setattr(secondary_tier, "STORE_LIMIT_S", 0.5)
    with Offloading(tmp_path, disk_blocks=1200) as rig:
        for number in range(STOPS):
            keys = [key_of(2000 + 96 * number + one) for one in range(96)]
            with stopped_disk(os.getpid()):  # the 64 slots between vLLM and the disk are full soon
                for begin in range(0, len(keys), 8):
                    begun = rig.begin_store(keys[begin : begin + 8])
                    rig.settle_jobs()
                    rig.rows[:] = 0xEE
                    rig.manager.on_request_finished(begun)
            rig.settle()
            counts["stops"] += 1
            counts["given_up"] += sum(not rig.leader.readable([key]) for key in keys)
            for begin in range(0, len(keys), 8):
                for key in keys[begin : begin + 8]:
                    look(rig, [key], counts)
    assert counts["given_up"] > STOPS
    assert counts["came"] > STOPS
    RESULTS.add({"what": "SIGSTOP during stores, rows used again, SIGCONT", **counts})
