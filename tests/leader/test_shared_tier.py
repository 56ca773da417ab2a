"""What goes to the shared store, what comes back from it, and what happens when it fails: a store in memory, steps by
hand. Runs hold two blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_store import FakeStore
from rig import FakeDisk, Rig, chain, disk_policy

from kvbm.core.groups import Group
from kvbm.tiers.settings import TierPolicy
from kvbm.tiers.shared import tier as shared_tier
from kvbm.tiers.shared.orders import Get, Probe, Put
from kvbm.types import Tier


def make(store=None, *, to_shared="always", slots=8, extent_blocks=2, writes=True, **options):
    policy = TierPolicy(to_shared if writes else "never", drain_s=options.pop("drain_s", 0.0))
    options = {"reads_always": True, **options}
    return Rig(slots=slots, store=store or FakeStore(extent_blocks), shared=policy, **options)


@pytest.fixture
def rig():
    return make()


def written(name="a", length=4, **options):
    """A rig whose store holds the runs of a chain, all of which another engine has written; and the chain."""
    first = make(**{"slots": 8, **options})
    hashes = first.fill(name, length)
    first.settle_store()
    store = first.store
    assert store.writes == length // store.extent_blocks
    first.close()
    second = make(store, **options)
    second.store.list_all()
    second.step()
    return second, hashes


def rates(rig):
    return rig.leader._rates  # that of a real store is measured


def names(store):
    return set(store.kept)


def begin_writes(rig):
    """Let what is due become orders of the store, which do not run."""
    for _ in range(4):
        rig.now_s += 0.5
        rig.order()
        rig.settle()


def serve(rig, request_id, hashes, steps=6):
    """A request from its arrival to the end of its load. Returns the results of its load."""
    rig.load(request_id, hashes)
    return rig.steps(steps)


# -- writes ------------------------------------------------------------------------------------------------------------


def test_a_store_that_starts_later_gets_the_runs_that_were_used_before():
    """Its process starts when the name of the blocks is known."""
    rig = make(FakeStore(0))
    rig.store.is_on = False
    hashes = rig.fill("a", 4)
    rig.settle_store()
    assert rig.leader.match("waits", hashes, 0) == 4, "from host memory"
    assert not rig.store.waiting
    rig.store.extent_blocks, rig.store.is_on = 2, True
    rig.settle_store()
    assert names(rig.store) == {hashes[1], hashes[3]}


def test_whole_runs_of_a_request_are_written_when_it_ends(rig):
    hashes = chain("a", 5)
    blocks = rig.compute("r", hashes)
    rig.step()
    rig.settle_store()
    assert not rig.store.kept, "the request has not ended"
    rig.finish("r", hashes, blocks)
    rig.settle_store()
    assert names(rig.store) == {hashes[1], hashes[3]}, "the fifth block fills no run"
    assert rig.leader.counters.shared.offload_blocks == 4
    assert not rig.leader.has_pending()


def test_a_run_is_written_at_its_second_use_if_that_is_wanted():
    rig = make(to_shared="frequency")
    hashes = rig.fill("a", 4)
    rig.settle_store()
    assert not rig.store.kept
    serve(rig, "again", hashes)
    rig.leader.finish("again", hashes)
    rig.settle_store()
    assert names(rig.store) == {hashes[1], hashes[3]}


def test_an_engine_that_only_reads_writes_nothing():
    rig = make(writes=False)
    rig.fill("a", 4)
    rig.settle_store()
    assert not rig.store.kept
    assert not rig.leader.has_pending()


def test_the_head_of_a_chain_is_written_first():
    rig = make(slots=32)
    hashes = rig.fill("a", 6)
    begin_writes(rig)
    assert [order.hashes[-1] for order in rig.store.waiting if isinstance(order, Put)] == hashes[1::2]


def test_what_the_store_is_known_to_hold_is_not_written_again():
    rig, hashes = written()
    serve(rig, "r", hashes)
    rig.leader.finish("r", hashes)
    before = rig.store.writes
    rig.settle_store()
    assert rig.store.writes == before


def test_blocks_are_pinned_while_they_are_written_and_only_then(rig):
    rig.fill("a", 2)
    begin_writes(rig)
    assert rig.leader.blocks()[Tier.HOST]["pinned"] == 2
    rig.store.run_all()
    rig.settle()
    assert rig.leader.blocks()[Tier.HOST]["pinned"] == 0


def test_a_run_whose_last_block_is_still_on_its_way_to_host_memory_is_written_when_it_has_come(rig):
    hashes = chain("a", 2)
    blocks = rig.compute("r", hashes)
    rig.order()  # and no copy runs
    rig.finish("r", hashes, blocks)
    for _ in range(2):
        rig.now_s += 0.2
        rig.order()
        rig.settle()
    assert not rig.store.waiting
    rig.settle_store()
    assert names(rig.store) == {hashes[1]}


def test_no_more_blocks_are_due_than_host_memory_holds_the_newest_first(rig):
    shared = rig.shared_tier
    chains = [chain(name, 6) for name in "abcd"]
    for hashes in chains:
        shared.used(hashes, 6, b"")
    assert [list(piece) for piece in shared.due_blocks()] == [chains[3], chains[2][4:]]


def test_blocks_that_have_left_host_memory_are_not_written():
    rig = make(slots=4)
    rig.fill("a", 4)
    rig.fill("b", 4)
    rig.settle_store()
    assert not names(rig.store) & set(chain("a", 4))
    assert rig.leader.counters.shared.dropped_blocks >= 4


def test_a_write_that_failed_is_not_found(rig):
    rig.fill("a", 2)
    begin_writes(rig)
    assert rig.store.run("fail")
    rig.settle()
    assert rig.leader.counters.shared.write_failures == 1
    assert rig.shared_tier.match(chain("a", 4), 0, 4) == 0


def test_memory_that_a_rank_has_given_back_is_not_written_as_a_run(rig):
    rig.fill("a", 4)
    begin_writes(rig)
    assert rig.store.waiting
    rig.store.slots_carry = lambda slots, generations: False
    rig.store.run_all()
    rig.settle()
    assert not rig.store.kept


def test_what_is_due_is_written_at_the_end(monkeypatch):
    monkeypatch.setattr(shared_tier.time, "sleep", lambda seconds: None)
    rig = make(drain_s=5.0)
    client = rig.store
    poll = client.poll

    def now_it_is_later():
        rig.now_s += 0.05
        client.run_all()
        return poll()

    client.poll = now_it_is_later
    rig.fill("a", 4)
    rig.leader.close()
    assert len(client.kept) == 2


# -- reads -------------------------------------------------------------------------------------------------------------


def test_another_engine_loads_what_the_first_has_written():
    rig, hashes = written()
    (result,) = serve(rig, "r", hashes)
    assert not result.failed_block_ids
    assert all(rig.g1.holds(block, name) for block, name in zip(result.block_ids, hashes, strict=True))
    assert rig.leader.counters.shared.onboard_blocks == 4
    assert rig.leader.counters.shared.fetched_blocks == 4
    assert serve(rig, "again", hashes), "they are in host memory now"
    assert rig.leader.counters.shared.fetched_blocks == 4


def test_blocks_that_have_come_go_to_disk_too():
    rig, hashes = written()
    store = rig.store
    rig.close()
    rig = make(store, fake_disk=8, **disk_policy(writes="always", reads_always=True))
    store.list_all()
    rig.step()
    serve(rig, "r", hashes)
    assert {name for name, _ in rig.disk.kept.values()} == set(hashes)


def test_of_a_run_only_what_is_missing_is_read():
    rig, hashes = written()
    rig.fill("a", 1)
    serve(rig, "r", hashes)
    assert rig.leader.counters.shared.fetched_blocks == 3


def test_a_load_larger_than_host_memory_passes_through_it_from_the_store():
    first = make(slots=16, blocks=32)
    hashes = first.fill("a", 12)
    first.settle_store()
    rig = make(first.store, slots=4, blocks=32)
    rig.store.list_all()
    rig.step()
    (result,) = serve(rig, "r", hashes, steps=30)
    assert not result.failed_block_ids
    assert all(rig.g1.holds(block, name) for block, name in zip(result.block_ids, hashes, strict=True))


def test_nothing_is_loaded_from_a_store_that_is_off():
    rig, hashes = written()
    rig.store.is_on = False
    assert rig.leader.match("r", hashes, 0) == 0


@pytest.mark.parametrize("fault", ["fail", "bad"])
def test_a_run_that_cannot_be_read_cuts_the_load_and_is_forgotten(fault):
    rig, hashes = written()
    rig.load("r", hashes)
    rig.order()
    assert rig.store.run()  # the first run arrives
    assert rig.store.run(fault)
    results = rig.steps(4)
    (result,) = results
    assert result.failed_block_ids == result.block_ids[2:]
    assert all(rig.g1.holds(block, name) for block, name in zip(result.block_ids[:2], hashes, strict=False))
    rig.leader.finish("r", hashes)
    assert rig.shared_tier.match(hashes, 0, 4) == 2, "only the run that failed is forgotten"
    assert rig.leader.counters.shared.read_failures == 1


def test_an_object_that_another_engine_has_deleted_is_a_miss_and_forgotten():
    rig, hashes = written()
    rig.store.kept.clear()
    (result,) = serve(rig, "r", hashes)
    assert result.failed_block_ids == result.block_ids
    assert rig.shared_tier.match(hashes, 0, 4) == 0


def test_a_damaged_object_is_replaced_by_the_next_engine_that_computes_it():
    rig, hashes = written()
    rig.load("r", hashes)
    rig.order()
    while rig.store.run("bad"):
        pass
    rig.step()
    rig.leader.finish("r", hashes)
    before = rig.store.writes
    rig.fill("a", 4)
    rig.settle_store()
    assert rig.store.writes == before + 2


def test_a_process_that_ends_fails_the_load_and_its_runs_are_found_again():
    rig, hashes = written()
    rig.load("r", hashes)
    rig.order()
    rig.store.is_on = False
    rig.store.fail_all()
    (result,) = rig.settle()
    assert result.failed_block_ids == result.block_ids
    rig.leader.finish("r", hashes)
    rig.store.is_on = True
    assert rig.leader.match("next", hashes, 0) == 4


def test_a_request_that_ends_while_its_runs_are_read_holds_its_blocks_until_nothing_writes_there():
    rig, hashes = written()
    blocks = rig.load("r", hashes)
    rig.order()
    rig.finish("r", hashes, blocks)
    rig.steps(6)
    assert not +rig.g1.references
    assert rig.leader.blocks()[Tier.HOST]["pinned"] == 0
    assert rig.leader.blocks()[Tier.HOST]["moving"] == 0


def test_an_object_that_will_expire_soon_is_written_again():
    rig, hashes = written()
    get = rig.store._get  # of the fake

    def aging(order, fault):
        result = get(order, fault)
        return type(result)(result.ticket, result.outcome, is_aging=True)

    rig.store._get = aging  # of the fake
    serve(rig, "r", hashes)
    rig.leader.finish("r", hashes)
    before = rig.store.writes
    rig.settle_store()
    assert rig.store.writes == before + 2


def test_a_load_whose_blocks_have_left_host_memory_since_the_match_is_computed():
    rig, hashes = written()
    rig.fill("a", 2)
    assert rig.leader.match("r", hashes, 0) == 4
    rig.fill("b", 8)
    blocks = rig.g1.allocate(4)
    rig.leader.onboard("r", hashes, 0, blocks)
    (result,) = rig.steps(6)
    assert result.failed_block_ids == tuple(blocks)


def test_a_run_that_comes_after_one_before_it_has_failed_is_kept_in_host_memory():
    rig, hashes = written()
    rig.load("r", hashes)
    rig.order()
    assert rig.store.run("fail")
    assert [result.failed_block_ids == result.block_ids for result in rig.settle()] == [True]
    rig.step()
    assert [rig.leader.host.store.contains(name) for name in hashes] == [False, False, True, True]
    assert rig.leader.blocks()[Tier.HOST]["pinned"] == 0


# -- presence ----------------------------------------------------------------------------------------------------------


def test_a_request_waits_for_the_answer_of_the_store_and_then_loads():
    rig, hashes = written()
    store = rig.store
    rig.close()
    rig = make(store)  # it has not listed anything
    assert rig.leader.match("r", hashes, 0) is None
    assert [type(order) for order in rig.store.waiting] == [Probe]
    rig.store.run_all()
    rig.settle()
    assert rig.leader.match("r", hashes, 0) == 4


def test_a_request_waits_at_most_two_steps_that_compute(rig):
    hashes = chain("a", 4)
    waited = 0
    while rig.leader.match("r", hashes, 0) is None:
        waited += 1
        rig.leader.note_step(16, 0.001)
        rig.order()
        rig.settle()
        assert waited < 10
    assert 1 <= waited <= shared_tier.WAIT_STEPS + 1
    assert rig.leader.match("r", hashes, 0) == 0, "it asks once"


def test_a_request_does_not_wait_for_long_in_an_engine_that_computes_nothing(rig):
    hashes = chain("a", 4)
    assert rig.leader.match("r", hashes, 0) is None
    rig.now_s += shared_tier.WAIT_S + 0.01
    assert rig.leader.match("r", hashes, 0) == 0


def test_a_chain_that_a_probe_did_not_find_is_not_asked_for_again(rig):
    hashes = chain("a", 4)
    assert rig.leader.match("r", hashes, 0) is None
    rig.store.run_all()
    rig.settle()
    assert rig.leader.match("r", hashes, 0) == 0
    assert rig.leader.match("other", hashes, 0) == 0
    assert not rig.store.waiting


def test_requests_for_one_chain_ask_once(rig):
    hashes = chain("a", 4)
    assert rig.leader.match("r", hashes, 0) is None
    assert rig.leader.match("s", hashes, 0) is None
    assert len(rig.store.waiting) == 1


def test_a_failed_probe_leaves_the_request_without_a_hit(rig):
    hashes = chain("a", 4)
    assert rig.leader.match("r", hashes, 0) is None
    rig.store.run("fail")
    rig.settle()
    assert rig.leader.match("r", hashes, 0) == 0


# -- load or recompute -------------------------------------------------------------------------------------------------


def test_runs_are_computed_where_that_is_faster_than_reading_them():
    rig, hashes = written(reads_always=False)
    for _ in range(8):
        rig.leader.note_step(4096, 0.001)  # 4 million tokens per second
    rates(rig).note_read(4, 4.0, Tier.SHARED, first_s=1.0)
    assert rig.leader.match("r", hashes, 0) == 0
    assert rig.leader.counters.shared.declined_blocks == 4


@pytest.mark.parametrize("is_copy", [False, True])
def test_the_rate_of_the_store_comes_from_reads_of_the_store_and_not_of_copies(is_copy):
    rig, hashes = written(reads_always=False)
    get = rig.store._get  # of the fake
    rig.store._get = lambda order, fault: replace(get(order, fault), is_copy=is_copy)  # of the fake
    serve(rig, "r", hashes)
    assert rig.leader.counters.shared.fetched_blocks == 4
    assert rates(rig).reads[Tier.SHARED].blocks == (0 if is_copy else 4)


def test_a_store_that_is_slower_than_computing_is_not_asked():
    rig = make(reads_always=False)
    for _ in range(8):
        rig.leader.note_step(4096, 0.001)
    rates(rig).note_read(4, 4.0, Tier.SHARED, first_s=1.0)
    assert rig.leader.match("r", chain("a", 4), 0) == 0
    assert not rig.store.waiting


def test_a_run_that_was_written_while_the_store_was_listed_stays_known():
    rig = make()
    rig.store.list_all()  # it arrives after the write
    hashes = rig.fill("a", 4)
    rig.now_s += 1.0
    rig.settle_store()
    shared = rig.shared_tier
    runs = shared.extents_of(hashes, 0, 4)
    assert len(runs) == 4 // rig.store.extent_blocks
    assert all(shared.contains(run.name) for run in runs)


def test_a_longer_chain_does_not_wait_for_the_probe_of_a_shorter_one():
    rig, hashes = written(length=8, slots=16)
    rig.shared_tier.presence.clear()
    rig.leader.match("short", hashes[:2], 0)
    rig.leader.match("long", hashes, 0)
    rig.leader.match("again", hashes[:4], 0)
    assert [len(order.names) for order in rig.store.waiting if isinstance(order, Probe)] == [1, 4]


def test_an_engine_that_writes_nothing_keeps_no_list_of_what_to_replace():
    other, hashes = written()
    other.close()
    rig = make(other.store, writes=False)
    rig.store.list_all()
    rig.step()
    rig.load("r", hashes)
    while rig.store.waiting:
        rig.store.run("bad")
        rig.step()
    assert rig.leader.counters.shared.read_failures > 0
    assert not rig.shared_tier._to_replace


# -- reset, several groups, engines that accept no failed load ---------------------------------------------------------


def test_after_a_reset_nothing_of_the_store_is_found_or_written():
    rig, hashes = written()
    rig.leader.reset()
    rig.store.list_all()
    rig.step()
    assert rig.leader.match("r", hashes, 0) == 0
    rig.fill("b", 4)
    before = rig.store.writes
    rig.settle_store()
    assert rig.store.writes == before


def test_a_read_that_a_reset_overtook_is_dropped():
    rig, hashes = written()
    rig.load("r", hashes)
    rig.order()
    assert any(isinstance(order, Get) for order in rig.store.waiting)
    rig.leader.reset()
    results = rig.steps(4)
    assert all(result.failed_block_ids == result.block_ids for result in results)
    assert not any(rig.leader.host.store.contains(name) for name in hashes)


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_configured_tier_that_is_not_opened_is_reported_as_off(is_configured):
    rig = Rig(slots=8, shared=TierPolicy() if is_configured else None)
    rig.fill("a", 4)
    rig.step()
    assert rig.leader.counters.shared.off == int(is_configured)


def test_several_groups_find_blocks_by_the_index():
    first = make(extent_blocks=1, slots=16)
    full, window = first.fill("full", 3), first.fill("window", 3)
    first.settle_store()
    first.close()
    rig = make(first.store, groups=(Group(16), Group(16, window_tokens=16)), slots=16)
    assert rig.leader.match_groups("r", (full, window), 0, 48) == 0
    assert not rig.store.waiting, "a probe finds the end of one chain only"
    rig.store.list_all()
    rig.step()
    assert rig.leader.match_groups("s", (full, window), 0, 48) == 48
    blocks, wanted = rig.g1.allocate(4), [*full, window[-1]]
    rig.leader.onboard("s", wanted, 0, blocks, tokens=48)
    results = rig.steps(6)
    assert [result.failed_block_ids for result in results] == [()]
    assert all(rig.g1.holds(block, name) for block, name in zip(blocks, wanted, strict=True))


def test_an_engine_that_accepts_no_failed_load_gets_runs_ahead_of_their_promise():
    rig, hashes = written(accepts_failed_loads=False)
    assert rig.leader.match("r", hashes, 0) == 0
    rig.steps(4)
    assert rig.leader.match("s", hashes, 0) == 4


def test_a_disk_and_a_store_serve_one_chain():
    rig, hashes = written(length=6)
    store = rig.store
    rig.close()
    disk = FakeDisk(8)
    with_disk = {"fake_disk": disk, **disk_policy(writes="always", reads_always=True)}
    rig = make(FakeStore(2), **with_disk)
    rig.fill("a", 2)
    rig.steps(4)
    rig.close()
    rig = make(store, **with_disk)
    store.list_all()
    rig.step()
    (result,) = serve(rig, "r", hashes)
    assert not result.failed_block_ids
    counters = rig.leader.counters
    assert (counters.disk.onboard_blocks, counters.shared.onboard_blocks) == (2, 4)
