"""Ranks with equal KV: one copy for all of them, proven by all of them, and no answer from it if they differ."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
from bookkeeping import check_leader
from rig import G1, FakeDisk, Rank, Rig, chain, disk_policy

from kvbm.config.schema import ConnectorConfig
from kvbm.device.pool import TransferPool
from kvbm.engines.opening import EngineAtStart, known, open_tiers
from kvbm.host.region import Region
from kvbm.leader.leader import Leader
from kvbm.tiers.disk.service import client
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks, LeaderSettings
from kvbm.types import SegmentInfo, SlotState

RANKS = 8
HASHES = chain("conversation", 12)


@pytest.fixture
def rig():
    """Eight ranks with latent attention."""
    return Rig(ranks=RANKS, replicas=RANKS, slots=24, blocks=32, overdue_steps=3)


def cached_blocks(rig):
    return rig.leader.match("probe", HASHES, 0)


def corrupt(rig, rank, block):
    """Give one rank other KV."""
    rig.g1.storages[rank][0][block * 512] += 1


def test_all_ranks_load_from_one_copy(rig):
    blocks = rig.compute("a", HASHES)
    rig.step()
    rig.finish("a", HASHES, blocks)
    loaded = rig.load("b", HASHES)
    assert [result.failed_block_ids for result in rig.step()] == [()]
    assert all(rig.g1.holds(block, name) for block, name in zip(loaded, HASHES, strict=True))
    assert (len(loaded), len(rig.region.shards)) == (12, 1)


def test_memory_is_that_of_one_copy(rig):
    info = rig.ranks[0].segment.info
    payload = (24 + RANKS) * info.slot_stride  # slots, and one for the samples of each rank
    assert info.length < payload + RANKS * 100_000
    assert {os.fstat(rank.segment.info.fd).st_ino for rank in rig.ranks} == {os.fstat(info.fd).st_ino}


@pytest.mark.parametrize("count", [1, 3, 8, 12])
def test_every_rank_copies_its_share_and_a_sample(rig, count):
    copied = Counter()
    for rank in rig.ranks:
        rank.copier._copier = Counting(rank.copier._copier, copied)
    rig.compute("a", HASHES[:count])
    rig.step()
    slots = {slot: number for slot, number in copied.items() if slot < 24}
    assert (len(slots), set(slots.values())) == (count, {1})
    assert len(copied) - len(slots) == RANKS - 1, "all but one rank copy the sample beside the slots"
    assert cached_blocks(rig) == count


class Counting:
    """A copier that counts the copies to each slot."""

    def __init__(self, copier, copied):
        self._copier, self._copied = copier, copied

    def fence(self):
        return self._copier.fence()

    def offload(self, block_ids, slots, fence):
        self._copied.update(slots)
        self._copier.offload(block_ids, slots, fence)

    def onboard(self, slots, block_ids, fence):
        self._copier.onboard(slots, block_ids, fence)


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("late", range(0, RANKS, 3))
def test_nothing_is_registered_before_every_rank_has_reported(rig, late, count):
    blocks = rig.compute("a", HASHES[:count])
    rig.order()
    for rank in rig.ranks:
        if rank is not rig.ranks[late]:
            rank.run_all()
    rig.settle()
    assert cached_blocks(rig) == 0
    assert [rig.g1.references[block] for block in blocks] == [2] * count, "released while a rank may still read"
    rig.ranks[late].run_all()
    rig.settle()
    assert cached_blocks(rig) == count
    assert [rig.g1.references[block] for block in blocks] == [1] * count


@pytest.mark.parametrize("fault", ["fail", "short", "odd", "die"])
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("call", [0, 1])
def test_a_failed_copy_of_one_rank_is_a_miss(rig, rank, call, fault):
    """The first call copies the share, the second one the sample."""
    rig.ranks[rank].copier.at(call, fault)
    blocks = rig.compute("a", HASHES)
    rig.step()
    rig.settle()
    assert cached_blocks(rig) == 0
    assert rig.leader.counters.offload_failed_blocks == 12
    assert [rig.g1.references[block] for block in blocks] == [1] * 12
    for one in rig.ranks:
        one.copier.heal()
    rig.finish("a", HASHES, blocks)
    rig.compute("b", HASHES)
    rig.step()
    assert cached_blocks(rig) == 12
    assert rig.leader.counters.disabled == 0


@pytest.mark.parametrize("rank", range(RANKS))
def test_different_kv_turns_the_cache_off(rank, caplog):
    rig = Rig(ranks=RANKS, replicas=RANKS, slots=24, blocks=32, fake_disk=24)
    blocks = rig.compute("a", HASHES)
    corrupt(rig, rank, blocks[0])
    rig.step()
    assert cached_blocks(rig) == 0
    rig.settle()
    assert rig.leader.counters.disabled == 1
    assert "`transfer.share_equal_kv: false`" in caplog.text
    assert rig.disk.cleared, "blocks on disk may be wrong too"
    assert rig.disk.has_ended_persistence
    rig.compute("b", chain("other", 3))
    assert rig.leader.step().is_empty()


@pytest.mark.parametrize("give_up", ["discard_offloads", "abandon_offloads"])
def test_ranks_that_copy_a_block_before_and_after_the_engine_reuses_it_do_not_turn_the_cache_off(rig, give_up):
    blocks = rig.compute("a", HASHES)
    rig.order()
    rig.ranks[0].run_all()
    getattr(rig.leader, give_up)(*[blocks][: give_up == "discard_offloads"])
    for block in blocks:
        rig.g1.compute(block, bytes(16))
    for rank in rig.ranks[1:]:
        rank.run_all()
    rig.settle()
    rig.settle()
    assert cached_blocks(rig) == 0
    assert rig.leader.counters.disabled == 0


def test_different_kv_of_one_of_two_pairs_of_ranks_turns_the_cache_off():
    """Two KV heads on four ranks."""
    rig = Rig(ranks=4, replicas=2, slots=24, blocks=32)
    rig.fill("fine", 4)
    assert (len(rig.region.shards), rig.leader.counters.disabled) == (2, 0)
    blocks = rig.compute("a", HASHES)
    corrupt(rig, 3, blocks[0])
    rig.step()
    rig.settle()
    assert (cached_blocks(rig), rig.leader.counters.disabled) == (0, 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slot_that_another_rank_fills_anew_fails_the_load_of_every_rank(rig, when):
    """The word of the writer counts, and each rank reads it before and after its copy."""
    blocks = rig.compute("a", HASHES)
    plan = rig.order()
    rig.end_copies()
    rig.finish("a", HASHES, blocks)
    rig.load("b", HASHES)
    rig.order()
    if when == "after":
        rig.ranks[7].copier.next("lost")
    (order,) = plan.offloads
    rig.ranks[2].segment.write_slots(order.slots[:1], order.generation + 100, SlotState.READY)
    for rank in rig.ranks:
        if when == "before":
            rank.run_all()
    if when == "after":
        rig.ranks[7].copier.heal()
        for rank in rig.ranks:
            rank.run_all()
    (result,) = rig.settle()
    assert len(result.failed_block_ids) == 12
    assert not any(rank.segment.lane_carries(0, order.generation) for rank in rig.ranks)


def test_an_overdue_share_is_denied_by_its_rank_alone(rig):
    """The orders of one rank were lost."""
    rig.compute("a", HASHES)
    plan = rig.leader.step()
    for rank in rig.ranks[:5] + rig.ranks[6:]:
        rank.worker.start(plan)
        rank.worker.finish(plan)
        rank.run_all()
    for _ in range(4):
        assert cached_blocks(rig) == 0
        rig.step()
    assert rig.leader.counters.offload_failed_blocks == 12
    assert cached_blocks(rig) == 0
    assert not rig.leader.has_pending()


def test_samples_of_two_offloads_do_not_overwrite_each_other():
    """Two threads copy at a time, and a rank has one sample slot."""
    rig = Rig(ranks=2, replicas=2, slots=24, blocks=32)
    first, copier = rig.ranks[0].worker, rig.ranks[0].copier
    first._offload_pool = pool = TransferPool(2, name="test")
    copier.at(1, "lost")  # the sample of the first offload: copied, and not yet read
    for number, name in enumerate(("a", "b", "c")):
        rig.compute(name, chain(name, 4))
        rig.order()
        if number == 0:
            copier.wait_until_held()
    deadline_s = time.monotonic() + 60
    while copier._calls < 4 and time.monotonic() < deadline_s:  # the shares of the other two
        time.sleep(0.001)
    time.sleep(0.05)
    copier.heal()
    while first.is_busy() and time.monotonic() < deadline_s:
        first.poll()
    rig.ranks[1].run_all()
    rig.settle()
    rig.settle()
    assert rig.leader.counters.disabled == 0
    assert [rig.leader.match(f"probe {name}", chain(name, 4), 0) for name in "abc"] == [4, 4, 4]
    pool.close(1)


def test_blocks_come_back_from_disk_into_the_one_copy():
    policy = disk_policy(writes="always", reads_always=True)
    rig = Rig(ranks=4, replicas=2, slots=12, blocks=32, fake_disk=48, **policy)
    for name in ("conversation", "another", "a third one"):
        rig.fill(name, 6)
        rig.step()
    assert {len(parts) for _, parts in rig.disk.kept.values()} == {2}, "one part of a block per KV head"
    loaded = rig.load("b", HASHES[:6])
    rig.steps(8)
    assert all(rig.g1.holds(block, name) for block, name in zip(loaded, HASHES[:6], strict=True))
    assert rig.leader.counters.disk.onboard_blocks > 0


def test_a_directory_of_another_number_of_copies_has_another_name(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(
        client, "DiskSupervisor", lambda named, *_, **__: names.append(named.result()[1].digest) or FakeDisk(8)
    )
    config = ConnectorConfig.model_validate(
        {"tiers": {"host": {"blocks": 8}, "disk": {"blocks": 8, "directory": str(tmp_path)}}}
    )
    monkeypatch.setattr(FakeDisk, "io_name", "fake", raising=False)
    monkeypatch.setattr(FakeDisk, "await_opening", lambda self: None, raising=False)
    for replicas in (1, 2, 4):
        rig = Rig(ranks=4, replicas=replicas)
        infos = [rank.worker.info for rank in rig.ranks]
        settings = LeaderSettings.of(config, infos, EngineTraits(16), g1_blocks=8)
        for _ in range(2):
            engine = EngineAtStart(infos, settings.traits, 8, lambda: known({"model": "m", "ranks": 4}))
            open_tiers(config, engine, settings)
        rig.close()
    assert (len(names), len(set(names))) == (6, 3)
    assert names[::2] == names[1::2]


# -- a rank is lost ----------------------------------------------------------------------------------------------------


RANK = """
import dataclasses, json, sys
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.segment import Segment
from kvbm.types import SegmentInfo

layout = BlockLayout((Piece(0, 0, 512, 512), Piece(1, 0, 512, 512)), 16)
if sys.argv[1:]:
    segment = Segment.attach(SegmentInfo(**json.loads(sys.argv[1])), rank=1, replica=1, layout=layout)
else:
    segment = Segment.create(rank=1, layout=layout, slot_count=8)
print(json.dumps(dataclasses.asdict(segment.info)), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("replicas", [1, 2])
def test_kill_of_a_rank_fails_what_is_in_flight_when_the_others_have_stopped(caplog, replicas):
    """And memory under living copiers stays held."""
    g1 = G1(16, 1, replicas)
    local = Rank(0, g1, 8)
    owner = [json.dumps(dataclasses.asdict(local.worker.info))] if replicas == 2 else []
    command = [sys.executable, "-c", RANK, *owner]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        region = Region.map([local.worker.info, SegmentInfo(**json.loads(process.stdout.readline()))])
        settings = LeaderSettings(EngineTraits(block_tokens=16), block_bytes=2048 // replicas, max_in_flight_blocks=16)
        leader = Leader(region, settings, LeaderCallbacks(g1.hold, g1.release))
        hashes, blocks = chain("a", 3), g1.allocate(3)
        leader.offload("r", hashes, blocks, computed_blocks=3, prompt_blocks=3)
        local.worker.finish(leader.step())
        process.kill()
        process.wait()
        leader.settle()
    assert leader.counters.disabled == 1
    assert "continues without the cache" in caplog.text
    assert [g1.references[block] for block in blocks] == [2, 2, 2], "released while rank 0 may still read"
    local.run_all()
    local.worker.poll()
    leader.settle()
    assert [g1.references[block] for block in blocks] == [1, 1, 1]
    assert leader.match("x", hashes, 0) == 0
    leader.offload("s", hashes, blocks, computed_blocks=3, prompt_blocks=3)
    assert leader.step().is_empty()
    assert not leader.has_pending()
    check_leader(leader)
    region.close()
    local.worker.close(0.1)
