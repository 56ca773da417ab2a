"""Live control: what an operator sees and clears, in pieces, while the engine serves."""

from __future__ import annotations

import pytest
from fake_store import FakeStore
from rig import Rig, chain, disk_policy

from kvbm.leader import control
from kvbm.leader.control import Refused
from kvbm.tiers.settings import TierPolicy
from kvbm.types import Tier

ALICE, BOB = b"alice" * 3 + b"!", b"bob"


@pytest.fixture
def rig():
    return Rig(slots=16, blocks=32, fake_disk=32, **disk_policy("always"))


def asked(rig: Rig, verb: str, **arguments: str):
    """The answer of one message, in as many steps as it takes."""
    future = rig.leader.control.submit(verb, arguments)
    for _ in range(100):
        rig.leader.control.advance()
        if future.done():
            return future.result(timeout=0)
        rig.step()
        rig.now_s += 0.1
    raise AssertionError(f"{verb} has not ended")


def clear_alice(rig: Rig, steps: int = 0):
    """Begin to forget a tenant, and go on for so many steps; return what the answer will be."""
    future = rig.leader.control.submit("clear", {"tenant": b"alice".hex()})
    rig.leader.control.advance()
    for _ in range(steps):
        rig.step()
        rig.leader.control.advance()
    return future


def kept(rig: Rig, owner: str, length: int) -> list[bytes]:
    """Blocks of a tenant, in host memory and on disk."""
    hashes = chain(owner, length)
    blocks = rig.compute(f"r@{owner}", hashes)
    rig.step()
    rig.finish(f"r@{owner}", hashes, blocks)
    rig.step()
    return hashes


def tier_of(answer, name: str):
    return next(tier for tier in answer["tiers"] if tier["tier"] == name)


def owners(answer, name: str) -> dict[str, list[int]]:
    return {bytes.fromhex(one["tenant"]).decode(): one["blocks_by_age"] for one in tier_of(answer, name)["tenants"]}


def present(rig: Rig, hashes: list[bytes]) -> dict[Tier, int]:
    return {store.tier: len(hashes) - len(store.missing(hashes)) for store in rig.leader._stores()}


def test_blocks_are_counted_by_tier_tenant_and_age(rig):
    kept(rig, "alice", 3)
    rig.now_s += 70
    kept(rig, "bob", 2)
    rig.now_s += 5
    kept(rig, "", 1)
    answer = asked(rig, "ls")
    expected = {"alice": [0, 3, 0, 0, 0], "bob": [2, 0, 0, 0, 0], "": [1, 0, 0, 0, 0]}
    assert owners(answer, "G2") == owners(answer, "G3") == expected
    assert tier_of(answer, "G2")["states"] == {"free": 10, "moving": 0, "pinned": 0, "evictable": 6}
    assert (tier_of(answer, "G3")["capacity_blocks"], tier_of(answer, "G3")["is_on"]) == (32, True)


def test_only_the_largest_tenants_are_named_and_the_others_counted(rig, monkeypatch):
    monkeypatch.setattr(control, "MOST_TENANTS", 1)
    kept(rig, "alice", 1)
    kept(rig, "bob", 3)
    answer = asked(rig, "ls")
    assert list(owners(answer, "G2")) == ["bob"]
    assert tier_of(answer, "G2")["left_out"] == {"tenants": 1, "blocks": 1}


def test_a_tenant_is_forgotten_in_every_tier_and_the_others_stay(rig):
    alices, bobs = kept(rig, "alice", 3), kept(rig, "bob", 2)
    answer = asked(rig, "clear", tenant=b"alice".hex())
    assert answer == {"forgotten": {"G2": 3, "G3": 3}, "not_durable": ""}
    assert present(rig, alices) == {Tier.HOST: 0, Tier.DISK: 0}
    assert present(rig, bobs) == {Tier.HOST: 2, Tier.DISK: 2}
    assert sorted(name for name, _ in rig.disk.kept.values()) == sorted(bobs)


def test_a_tier_is_cleared_and_the_other_one_stays(rig):
    hashes = kept(rig, "alice", 3)
    assert asked(rig, "clear", tier="G2")["forgotten"] == {"G2": 3}
    assert present(rig, hashes) == {Tier.HOST: 0, Tier.DISK: 3}
    more = kept(rig, "bob", 2)
    assert asked(rig, "clear", tier="G3")["forgotten"] == {"G3": 5}
    assert present(rig, more) == {Tier.HOST: 2, Tier.DISK: 0}
    assert rig.disk.kept == {}


def test_what_is_in_flight_for_a_tenant_is_not_registered_afterwards(rig):
    alices, bobs = chain("alice", 3), chain("bob", 2)
    rig.compute("r@alice", alices)
    rig.compute("s@bob", bobs)
    rig.order()
    future = clear_alice(rig)
    rig.end_copies()
    while not future.done():
        rig.step()
        rig.leader.control.advance()
    assert present(rig, alices)[Tier.HOST] == 0
    assert present(rig, bobs)[Tier.HOST] == 2


@pytest.mark.parametrize("has_read", [False, True], ids=["not read", "read"])
def test_a_read_from_disk_in_flight_brings_back_nothing_of_a_cleared_tenant(rig, has_read):
    hashes = kept(rig, "alice", 3)
    rig.leader.host.store.forget(hashes)
    rig.load("again@alice", hashes)
    rig.order()
    if has_read:
        assert rig.disk.run("read"), "its bytes are in host memory"
    answer = clear_alice(rig, steps=20)
    assert answer.result(timeout=0)["forgotten"]["G3"] == 3
    assert present(rig, hashes) == {Tier.HOST: 0, Tier.DISK: 0}


@pytest.mark.parametrize(("owner", "failed"), [("alice", 0), ("bob", 3)])
def test_a_write_that_ends_without_the_blocks_of_a_cleared_tenant_has_not_failed(rig, owner, failed):
    hashes = chain(owner, 3)
    rig.compute(f"r@{owner}", hashes)
    rig.order()
    rig.end_copies()
    rig.order()
    assert rig.disk.waiting, "the write is in flight"
    clear_alice(rig)
    while rig.disk.run("write", "fail-all"):
        rig.settle()
    counters = rig.leader.counters
    assert (counters.disk.write_failed_blocks, counters.disk.failed_blocks) == (failed, failed)
    assert counters.disk.offload_blocks == 0


def test_a_write_that_ended_well_before_the_disk_heard_of_a_clear_registers_only_what_is_left(rig):
    alices, bobs = chain("alice", 3), chain("bob", 2)
    rig.compute("r@alice", alices)
    rig.compute("s@bob", bobs)
    rig.order()
    rig.end_copies()
    rig.order()
    while rig.disk.run("write"):
        pass
    clear_alice(rig, steps=20)
    assert [present(rig, hashes)[Tier.DISK] for hashes in (alices, bobs)] == [0, 2]
    assert rig.leader.counters.disk.write_failed_blocks == 0


def test_a_message_is_handled_in_pieces_with_steps_between(rig, monkeypatch):
    monkeypatch.setattr(control, "PIECE_SLOTS", 4)
    monkeypatch.setattr(control, "BUDGET_S", 0.0)
    kept(rig, "alice", 6)
    future = rig.leader.control.submit("ls", {})
    steps = 0
    while not future.done():
        assert rig.leader.control.has_work()
        rig.leader.control.advance()
        steps += 1
    assert steps == 16 / 4 + 32 / 4 + 1
    assert owners(future.result(timeout=0), "G2") == {"alice": [6, 0, 0, 0, 0]}


def test_a_disk_that_does_not_confirm_is_named_and_the_answer_comes_nevertheless(rig):
    hashes = kept(rig, "alice", 3)
    rig.disk.confirms_clears = False
    answer = asked(rig, "clear", tenant=b"alice".hex())
    assert answer["forgotten"] == {"G2": 3, "G3": 3}
    assert answer["not_durable"] == "it does not answer"
    assert present(rig, hashes) == {Tier.HOST: 0, Tier.DISK: 0}


def test_a_message_that_has_not_begun_can_be_cancelled_and_does_nothing(rig):
    hashes = kept(rig, "alice", 3)
    future = rig.leader.control.submit("clear", {})
    assert future.cancel()
    rig.leader.control.advance()
    assert present(rig, hashes) == {Tier.HOST: 3, Tier.DISK: 3}
    assert not rig.leader.control.has_work()


def test_too_many_messages_are_refused(rig):
    for _ in range(control.MOST_WAITING):
        rig.leader.control.submit("ls", {})
    with pytest.raises(Refused, match="wait already"):
        rig.leader.control.submit("ls", {})


def test_a_tier_that_is_not_there_is_refused():
    rig = Rig()
    with pytest.raises(Refused, match="no tier G3"):
        asked(rig, "clear", tier="G3")


def test_what_waits_is_refused_when_the_cache_is_off(rig):
    first, second = rig.leader.control.submit("ls", {}), rig.leader.control.submit("clear", {})
    rig.leader.control.refuse_all("it is off")
    for future in (first, second):
        with pytest.raises(Refused, match="it is off"):
            future.result(timeout=0)
    assert not rig.leader.control.has_work()


def test_labels_of_a_tenant_are_forgotten_with_its_last_slot(rig):
    labels = rig.leader.host.labels
    labels.own([1, 2], ALICE)
    labels.own([3], BOB)
    assert labels.tenants_of([1, 2, 3, 4]) == [ALICE, ALICE, BOB, b""]
    labels.own([1], BOB)
    assert labels.number_of(ALICE) is not None
    labels.own([2], b"")
    assert (labels.number_of(ALICE), labels.tenants_of([1, 2, 3])) == (None, [BOB, b"", BOB])


def test_tenants_and_ages_on_disk_survive_a_restart(rig):
    kept(rig, "alice", 2)
    again = Rig(slots=16, blocks=32, fake_disk=rig.disk, **disk_policy("always"))
    assert owners(asked(again, "ls"), "G3") == {"alice": [0, 0, 2, 0, 0]}


# Pins, reads ahead and limits of an operator


def tokens(count: int) -> str:
    """Of a prompt with so many blocks: in these tests, a token is a block."""
    return " ".join(map(str, range(count)))


def fill(rig: Rig, name: str, count: int) -> None:
    for number in range(count):
        kept(rig, f"{name}{number}", 4)


def test_a_pin_holds_a_prompt_within_its_quota_until_its_time_has_ended(rig):
    hashes = kept(rig, "alice", 6)
    answer = asked(rig, "pin", tokens=tokens(6), salt="alice", seconds="60")
    assert (answer["blocks"], answer["in_host"], answer["pinned"], answer["is_reading"]) == (6, 6, 4, False)
    (pin,) = asked(rig, "ls")["pins"]
    assert (pin["pin"], pin["blocks"]) == (answer["pin"], 4)
    fill(rig, "x", 5)
    assert rig.leader.host.store.match(hashes) == 4
    rig.now_s += 60
    fill(rig, "y", 5)
    assert rig.leader.host.store.match(hashes) == 0
    assert asked(rig, "ls")["pins"] == []


def test_a_pin_that_is_released_holds_nothing(rig):
    hashes = kept(rig, "alice", 3)
    pin = asked(rig, "pin", tokens=tokens(3), salt="alice")["pin"]
    asked(rig, "pin", tokens=tokens(3), salt="alice")  # in its own place
    assert asked(rig, "release", pin="00" * 8) == {"released": 0}
    assert asked(rig, "release", pin=pin) == {"released": 3}
    assert asked(rig, "release") == {"released": 0}
    fill(rig, "x", 5)
    assert rig.leader.host.store.match(hashes) == 0


def test_pins_leave_the_rest_of_host_memory_to_requests(rig):
    kept(rig, "alice", 4)
    asked(rig, "pin", tokens=tokens(4), salt="alice")
    with pytest.raises(Refused, match="as much of host memory as they may"):
        asked(rig, "pin", tokens=tokens(2), salt="bob")
    assert rig.leader.host.store.available == 12


@pytest.mark.parametrize("end", [clear_alice, lambda rig: rig.leader.reset()], ids=["clear", "reset"])
def test_a_cleared_tenant_and_a_reset_leave_no_pin(rig, end):
    kept(rig, "alice", 3)
    asked(rig, "pin", tokens=tokens(3), salt="alice")
    end(rig)
    rig.step()
    assert asked(rig, "ls")["pins"] == []
    assert rig.leader.host.store.available == 16


def test_a_pin_and_a_prefetch_bring_blocks_from_disk(rig):
    hashes = kept(rig, "alice", 3)
    rig.leader.host.store.forget(hashes)
    assert asked(rig, "prefetch", tokens=tokens(3), salt="alice") == {"blocks": 3, "in_host": 3, "is_reading": False}
    rig.leader.host.store.forget(hashes)
    assert asked(rig, "pin", tokens=tokens(3), salt="alice")["pinned"] == 3


def test_a_read_that_takes_long_continues_while_the_engine_is_idle(rig):
    hashes = kept(rig, "alice", 3)
    rig.leader.host.store.forget(hashes)
    rig.disk.is_hanging = True
    answer = asked(rig, "prefetch", tokens=tokens(3), salt="alice")
    assert (answer["in_host"], answer["is_reading"]) == (0, True)
    assert rig.leader.has_pending()
    assert rig.leader.needs_settle()
    rig.disk.is_hanging = False
    rig.step()
    rig.step()
    assert rig.leader.host.store.match(hashes) == 3
    assert not rig.leader.has_pending()


def test_blocks_that_are_nowhere_are_not_waited_for(rig):
    answer = asked(rig, "pin", tokens=tokens(3), salt="nobody")
    assert (answer["in_host"], answer["pinned"], answer["is_reading"]) == (0, 0, False)
    assert asked(rig, "ls")["pins"] == []


def test_an_operator_limits_the_hints_of_a_tenant(rig):
    assert asked(rig, "limit", percent="50") == {"blocks": 8}
    assert asked(rig, "limit", percent="0", tenant=b"alice".hex()) == {"blocks": 0}
    assert rig.leader.hints.quota(b"bob") == 8


def test_a_prefetch_brings_objects_of_the_shared_tier():
    rig = Rig(slots=16, blocks=32, store=FakeStore(4), shared=TierPolicy("always"), reads_always=True)
    hashes = kept(rig, "alice", 8)
    rig.settle_store()
    rig.leader.host.store.forget(hashes)
    answer = asked(rig, "prefetch", tokens=tokens(8), salt="alice")
    assert (answer["in_host"], answer["is_reading"]) == (8, False)
