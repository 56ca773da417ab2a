"""Reads ahead of a promise, for an engine that accepts no failed load: every step of them, with a disk in memory."""

from __future__ import annotations

import pytest
from rig import FakeDisk, Rig, chain, disk_policy

from kvbm.leader import prefetches


class EagerDisk(FakeDisk):
    """Its transfers have ended when somebody looks."""

    def poll(self):
        self.run_all()
        return super().poll()


def make(disk=32, *, slots=8):
    policy = disk_policy(writes="always", batch_blocks=2)
    return Rig(slots=slots, blocks=32, fake_disk=disk, **policy, accepts_failed_loads=False)


@pytest.fixture
def rig():
    return make()


def only_on_disk(rig, name="a", length=4):
    """Blocks that have left host memory."""
    hashes = rig.fill(name, length)
    rig.steps(8)
    for other in ("x", "y"):
        rig.fill(other, 4)
        rig.steps(8)
    assert len(rig.leader.host.store.missing(hashes)) == length
    return hashes


def queued(rig):
    return rig.leader._prefetches._queued  # the counters know reads that have begun


def looked_up(rig, hashes, request_id="r"):
    """How many blocks a request is promised that then ends."""
    found = rig.leader.match(request_id, hashes, 0)
    rig.leader.finish(request_id, hashes)
    return found


def test_a_lookup_queues_what_is_on_disk_only_and_a_later_one_finds_it(rig):
    hashes = only_on_disk(rig)
    assert looked_up(rig, hashes) == 0
    assert not rig.disk.waiting, "the lookup itself starts no read"
    rig.steps(8)
    assert looked_up(rig, hashes, "again") == 4
    assert rig.leader.blocks()["G2"]["pinned"] == 0


def test_blocks_that_were_read_are_loaded_like_any_other(rig):
    hashes = only_on_disk(rig)
    looked_up(rig, hashes)
    rig.steps(8)
    blocks = rig.load("again", hashes)
    (result,) = rig.step()
    assert (result.failed_block_ids, len(blocks)) == ((), 4)
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks, hashes, strict=True))


@pytest.mark.parametrize("fault", ["fail", "fail-all", "damage"])
def test_a_read_that_fails_is_no_promise(rig, fault):
    hashes = only_on_disk(rig)
    looked_up(rig, hashes)
    rig.order()
    while rig.disk.run("read", fault):
        pass
    rig.settle()
    assert looked_up(rig, hashes, "again") == (1 if fault == "fail" else 0)
    assert rig.leader.counters.disk.failed_blocks > 0


def test_each_block_is_queued_once_and_no_more_than_host_memory_holds(rig):
    hashes = only_on_disk(rig, length=4)
    for request in range(5):
        looked_up(rig, hashes, f"r{request}")
    rig.order()
    assert sorted(name for order in rig.disk.waiting for name in order.hashes) == sorted(hashes)
    rig.leader._prefetches.want(rig.disk_tier, chain("many", 30), b"")  # lookups of so many are cut before
    assert len(queued(rig)) == rig.leader.host.capacity_blocks == 8


def test_a_block_that_is_being_read_is_not_read_again():
    rig = make(slots=32)
    hashes = rig.fill("a", 4)
    rig.steps(8)
    rig.leader.host.store.forget(hashes)
    for request in range(5):
        looked_up(rig, hashes, f"r{request}")
        rig.order()
    assert sorted(name for order in rig.disk.waiting for name in order.hashes) == sorted(hashes)
    rig.disk.run_all()
    rig.settle()
    rig.order()
    assert not queued(rig)


def test_a_disk_that_is_off_is_not_read(rig):
    hashes = only_on_disk(rig)
    looked_up(rig, hashes)
    rig.disk.end()
    rig.steps(8)
    assert looked_up(rig, hashes, "again") == 0
    rig.disk.begin_again()
    rig.steps(8)
    assert looked_up(rig, hashes, "later") == 0
    rig.steps(8)
    assert looked_up(rig, hashes, "last") == 4


def test_a_reset_forgets_what_is_queued_and_what_is_being_read(rig):
    hashes = only_on_disk(rig)
    looked_up(rig, hashes)
    rig.order()
    rig.leader._prefetches.want(rig.disk_tier, chain("more", 4), b"")
    rig.leader.reset()
    rig.disk.run_all()
    rig.settle()
    rig.steps(8)
    assert looked_up(rig, hashes, "again") == 0
    assert not queued(rig)
    assert rig.leader.blocks()["G2"] == {"free": 8, "moving": 0, "pinned": 0, "evictable": 0}


def test_blocks_have_the_tenant_of_the_request_that_looked_for_them(rig):
    hashes = only_on_disk(rig)
    rig.leader.match("r@alice", hashes, 0)
    rig.steps(8)
    tier = rig.disk_tier
    slots = rig.leader.host.store.pin(hashes)
    assert set(tier._host.labels.tenants_of(slots.slots)) == {b"alice"}
    slots.release()


def restarted(rig, disk):
    disk.kept = rig.disk.kept
    rig.close()
    return make(disk)


def test_a_start_reads_ahead_what_host_memory_has_room_for():
    rig = make()
    for name in "abc":
        rig.fill(name, 4)
        rig.steps(8)
    again = restarted(rig, EagerDisk(32))
    assert again.leader.blocks()["G2"]["evictable"] == 8
    assert again.leader.counters.evicted_blocks == 0


def test_a_start_does_not_wait_for_a_slow_disk(monkeypatch):
    rig = make()
    hashes = rig.fill("a", 4)
    rig.steps(8)
    monkeypatch.setattr(prefetches, "WARM_S", 0.0)
    again = restarted(rig, FakeDisk(32))
    assert looked_up(again, hashes) == 0
    again.steps(8)
    assert looked_up(again, hashes, "again") == 4, "later steps continue"
