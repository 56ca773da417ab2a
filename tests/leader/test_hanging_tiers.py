"""Lower tiers that hang: no request waits longer than one deadline, whatever hangs and how often. With a manual clock.

`onboard.policy: always` in all of them, because `auto` gives up earlier.
"""

from __future__ import annotations

import itertools
import time

import pytest
from bookkeeping import check_leader
from fake_store import FakeStore
from rig import Rig, chain, disk_policy

from kvbm.tiers.disk import tier as disk_tier
from kvbm.tiers.open_reads import HUNG_S
from kvbm.tiers.settings import TierPolicy
from kvbm.types import Tier

STEP_S = 0.1
LIMIT_S = 1.9  # of the 2.5 s; the rest is for computing. Five steps are 0.5 s of it
RUN = 2


@pytest.fixture(autouse=True)
def _reads_of_two_blocks(monkeypatch):
    monkeypatch.setattr(disk_tier, "PARTS", 1)


def make(*, disk=None, store=None, slots=16, **options):
    return Rig(
        slots=slots,
        blocks=64,
        fake_disk=disk,
        store=store,
        **disk_policy(writes="always", reads_always=True, batch_blocks=2),
        shared=TierPolicy(writes="always"),
        **options,
    )


def full(tiers, *, names="ab", length=8, **options):
    """A rig with an empty host memory whose lower tiers hold these chains, and the chains."""
    first = make(disk=64 if "disk" in tiers else None, store=FakeStore(RUN) if "shared" in tiers else None, slots=64)
    chains = [first.fill(name, length) for name in names]
    first.settle_store()
    first.close()
    if first.disk is not None:
        first.disk.waiting.clear()
    rig = make(disk=first.disk, store=first.store, **options)
    if rig.store is not None:
        rig.store.list_all()
        rig.step()
    return rig, chains


@pytest.mark.parametrize("why", ["is_silent", "is_clearing", "errors"])
def test_an_idle_engine_looks_each_second_whether_a_disk_that_is_off_is_on_again(why):
    rig, wakes = Rig(slots=16, blocks=64, fake_disk=64), []
    rig.leader.control.wake_after = wakes.append
    rig.step()
    assert wakes == []
    rig.disk.is_on, rig.disk.confirms_clears = False, False
    if why != "errors":
        setattr(rig.disk, why, True)
    rig.steps(3)
    assert (wakes, rig.leader.has_pending(), rig.leader.counters.disk.off) == ([1.0], False, 1)
    rig.now_s += 1.0
    assert rig.leader.has_pending()
    assert rig.leader.needs_settle()
    rig.step()
    assert (wakes, rig.leader.has_pending()) == ([1.0, 1.0], False)
    rig.disk.is_on, rig.disk.is_silent, rig.disk.is_clearing = True, False, False
    rig.now_s += 1.0
    assert rig.leader.has_pending()
    rig.step()
    assert (wakes, rig.leader.has_pending(), rig.leader.counters.disk.off) == ([1.0, 1.0], False, 0)


def step(rig):
    """A step of the engine, and some time in which no tier does anything."""
    rig.order()
    rig.now_s += STEP_S
    return rig.end_copies()


def waits(rig, asked, limit_s=20.0, between=lambda: None):
    """How long each of these requests waits. `asked`: a chain by name of the request."""
    begun, ended = {}, {}
    for name, hashes in asked.items():
        begun[name] = rig.now_s
        if not load(rig, name, hashes):
            ended[name] = rig.now_s
    while len(ended) < len(asked) and rig.now_s < limit_s:
        between()
        for result in step(rig):
            ended[result.request_id] = rig.now_s
    return {name: ended.get(name, float("inf")) - begun[name] for name in asked}


def reads_each(rig, seconds):
    """Lets the disk end one read after each of these times."""
    last_s = [rig.now_s]

    def between():
        if rig.now_s - last_s[0] > seconds:
            last_s[0] = rig.now_s
            rig.disk.run("read")

    return between


def load(rig, name, hashes):
    matched = rig.leader.match(name, hashes, 0)
    if matched:
        rig.leader.onboard(name, hashes, 0, rig.g1.allocate(matched))
    return matched


@pytest.mark.parametrize("tiers", ["disk", "shared"])
def test_no_request_waits_longer_than_one_deadline_for_reads_that_hang(tiers):
    rig, (a, b) = full(tiers)
    assert max(waits(rig, {"r1": a, "r2": b}).values()) < LIMIT_S
    side = rig.disk_tier if tiers == "disk" else rig.shared_tier
    assert not side.is_on
    assert rig.leader.counters.of(side.kind).silent == 1
    for number in range(5):
        assert rig.leader.match(f"later-{number}", a if number % 2 else b, 0) == 0, "nothing is promised of it"
        step(rig)
    rig.run_tiers()
    step(rig)
    assert side.is_on
    assert rig.leader.counters.of(side.kind).silent == 0
    assert load(rig, "last", a) == 8
    rig.steps(10)
    check_leader(rig.leader)


def test_a_wall_clock_that_is_set_makes_no_read_late(monkeypatch):
    years, now_s = itertools.count(), time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 365 * 86400 * next(years))
    rig, (a, _) = full("disk", has_manual_clock=False)
    assert load(rig, "r", a) == 8
    results = []
    while not results:
        results += step(rig)
        rig.run_tiers()
    assert [result.failed_block_ids for result in results] == [()]


@pytest.mark.parametrize("tiers", ["disk", "shared"])
def test_an_idle_engine_finds_out_that_reads_have_ended_at_the_next_lookup(tiers):
    rig, (a, _) = full(tiers)
    assert waits(rig, {"r": a})["r"] < LIMIT_S
    rig.leader.finish("r", a)
    rig.run_tiers()
    assert rig.leader.match("next", a, 0) == 8


@pytest.mark.parametrize("tiers", ["disk", "shared", "disk and shared"])
def test_reads_that_hang_leave_a_part_of_host_memory(tiers):
    rig, (*chains,) = full(tiers, names="abcdef", slots=16)
    waits(rig, {f"r{number}": one for number, one in enumerate(chains)})
    share = 3 / 4 if "and" in tiers else 1 / 2
    assert 0 < rig.leader.blocks()[Tier.HOST]["moving"] <= share * 16
    hashes = rig.fill("new", 4)
    assert rig.leader.match("new-again", hashes, 0) == 4


def test_a_load_without_room_does_not_wait_for_the_reads_of_another_tier():
    """Its own tier works; what hangs is the disk, whose reads have the room."""
    rig, (a, b) = full("disk", slots=4)
    rig.leader.lower_tiers = rig.leader.host.listeners = (rig.disk_tier,)
    assert max(waits(rig, {"r1": a, "r2": b}).values()) < LIMIT_S


def test_a_load_that_waited_for_room_has_no_second_deadline_for_its_own_reads():
    rig, (a, b) = full("disk", slots=4)
    taken = rig.leader.host.reserve(4)
    is_released = []

    def between():
        if rig.now_s > HUNG_S and not is_released:
            is_released.append(taken.release())

    assert max(waits(rig, {"r1": a, "r2": b}, between=between).values()) < LIMIT_S
    assert is_released


def test_a_load_that_loses_time_piece_by_piece_is_cut_too():
    """Each read ends just before it would count as hung."""
    rig, (a, _) = full("disk", slots=4)
    between = reads_each(rig, HUNG_S - 2 * STEP_S)
    assert waits(rig, {"r": a}, between=between)["r"] < LIMIT_S + STEP_S


def test_reads_of_a_tier_that_is_known_to_be_slow_are_waited_for():
    rig, (a, _) = full("disk", slots=4)
    rig.disk_tier.reads.usual_s = 1.5
    between = reads_each(rig, 1.5)
    assert waits(rig, {"r": a}, between=between)["r"] > 4 * 1.5
    assert rig.leader.counters.disk.onboard_blocks == 8


def test_a_disk_that_is_slow_and_alive_is_read_after_some_loads():
    """Each of its reads takes a second; the usual time of a read is learned from those that end."""
    rig, (a, _) = full("disk", slots=4)
    between = reads_each(rig, 1.0)
    loaded = []
    for number in range(8):
        before = rig.leader.counters.onboard_blocks
        waits(rig, {f"r{number}": a}, between=between, limit_s=rig.now_s + 20.0)
        rig.leader.finish(f"r{number}", a)
        loaded.append(rig.leader.counters.onboard_blocks - before)
        for _ in range(15):
            between()
            step(rig)
    assert loaded[0] < 8, "the first one is cut"
    assert loaded[-1] == 8


def test_a_request_that_waited_for_a_load_that_was_cut_is_not_promised_the_disk_again():
    rig, (a, _) = full("disk", slots=8)
    assert load(rig, "first", a) == 8
    assert rig.leader.match("second", a, 0) is None, "the first one brings it"
    while not step(rig):
        pass
    assert rig.now_s < LIMIT_S + 2
    rig.run_tiers()
    rig.disk_tier.settle()
    assert rig.disk_tier.is_on
    assert rig.leader.match("second", chain("a", 16), 0) in (0, 4), "what has arrived in host memory, and not the disk"
    assert rig.leader.match("third", a, 0) == 8


def test_a_busy_disk_whose_reads_end_one_after_the_other_is_not_given_up():
    """The last of many reads waits for longer than the deadline, but those before it end."""
    rig, chains = full("disk", names="abcdef", slots=64)
    between = reads_each(rig, 0.35)
    found = waits(rig, {f"r{number}": one for number, one in enumerate(chains)}, between=between)
    assert HUNG_S < max(found.values()) < 20.0
    assert rig.leader.counters.disk.onboard_blocks == 48


def test_one_read_that_hangs_is_noticed_although_later_ones_end():
    rig, (a, b) = full("shared", slots=64)
    hung = []

    def between():
        if not hung:
            hung.append(rig.store.waiting.pop(0))
        rig.store.run()

    found = waits(rig, {"r1": a, "r2": b}, between=between)
    assert found["r1"] < LIMIT_S
    assert not rig.shared_tier.is_on
    rig.store.waiting.append(hung[0])
    rig.run_tiers()
    step(rig)
    assert rig.shared_tier.is_on


def test_long_steps_of_the_engine_are_no_time_in_which_a_tier_hangs():
    rig, (a, _) = full("disk", slots=4)
    load(rig, "r", a)
    results = []
    for _ in range(12):
        rig.order()
        rig.now_s += 3.0
        rig.disk.run_all()
        results += rig.end_copies()
    assert [result.failed_block_ids for result in results] == [()]
