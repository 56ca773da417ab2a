"""A rank whose process is killed: what is in flight fails, memory under living copiers stays held, no hit follows."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
from bookkeeping import check_leader
from rig import G1, Rank, chain

from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.leader.leader import Leader
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks, LeaderSettings

SLOTS = 8


def hold_a_segment(pipe) -> None:
    segment = Segment.create(rank=1, layout=G1(16, 1).layout, slot_count=SLOTS)
    pipe.send(segment.info)
    pipe.recv()


@pytest.fixture
def remote_rank():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold_a_segment, args=(theirs,))
    process.start()
    yield process, ours.recv()
    process.kill()
    process.join()


def test_kill_of_a_rank_fails_what_is_in_flight_when_the_others_have_stopped(remote_rank, caplog):
    process, info = remote_rank
    g1 = G1(16, 1)
    local = Rank(0, g1, SLOTS)
    region = Region.map([local.worker.info, info])
    settings = LeaderSettings(EngineTraits(block_tokens=16), block_bytes=2048, max_in_flight_blocks=16)
    leader = Leader(region, settings, LeaderCallbacks(g1.hold, g1.release))
    hashes, blocks = chain("a", 3), g1.allocate(3)
    leader.offload("r", hashes, blocks, computed_blocks=3, prompt_blocks=3)
    local.worker.finish(leader.step())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
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
