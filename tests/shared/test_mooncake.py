"""The shared tier on a real Mooncake Store: what is written comes back, and every fault of a master or an owner ends as
a miss in time."""

import time

import numpy as np
import pytest
from mooncake_pool import mooncake_pool, wait_until
from storage_rig import SHARDS, make_run, opened, pattern

# The part of the contract for which no object is changed from outside, with the rig of this module.
from test_shared_contract import (  # noqa: F401
    test_a_probe_finds_the_end_of_the_runs_that_are_present,
    test_a_run_comes_back_byte_for_byte_into_other_slots,
    test_a_second_write_of_a_run_finds_the_first,
    test_only_the_wanted_blocks_are_written_to_host_memory,
    test_what_was_never_written_is_absent,
)

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.object_store import Incoming, Outgoing
from kvbm.tiers.shared.orders import Get, Outcome, Put
from kvbm.tiers.shared.protection import AesProtection, HmacProtection
from kvbm.tiers.shared.storage import STALL

pytest.importorskip("mooncake.store", exc_type=ImportError)
pytestmark = pytest.mark.servers

DEADLINE_S = 6.0  # of an order, whatever the store does; the library's own limits are 30 s
SECRET = b"sixteen bytes or more"


@pytest.fixture(scope="module")
def lasting_pool(tmp_path_factory):
    with mooncake_pool(tmp_path_factory.mktemp("mooncake")) as pool:
        yield pool


@pytest.fixture
def pool(tmp_path):
    with mooncake_pool(tmp_path) as pool:
        yield pool


def accepts_writes(rig):
    """Whether an owner is there: the master learns of it some time after its start."""
    return rig.store.put([Outgoing("first", [b"x"])])[0].outcome is Outcome.GOOD


def ready(pool, rig):
    wait_until(lambda: accepts_writes(rig), "the store accepts writes")
    return rig


@pytest.fixture
def rig(lasting_pool, request):
    namespace = abs(hash(request.node.name)).to_bytes(16, "little")
    with opened(lasting_pool.url, namespace=namespace) as rig:
        yield ready(lasting_pool, rig)


def ended_in_time(rig, kind, hashes, *arguments):
    began_s = time.monotonic()
    result = rig.run(kind, hashes, *arguments)
    assert time.monotonic() - began_s < DEADLINE_S
    return result


def assert_a_miss_in_time(rig, run):
    result = ended_in_time(rig, Get, run, range(32, 32 + len(run)))
    assert result.outcome in (Outcome.ABSENT, Outcome.BAD, Outcome.FAILED), result
    assert result.outcome is not Outcome.GOOD


def comes_back(rig, run):
    rig.put(run)
    return rig.get(run).outcome is Outcome.GOOD and rig.holds(32, run[0])


def test_many_runs_move_in_one_call(rig):
    runs = [make_run(number) for number in range(8)]
    tickets = []
    for number, run in enumerate(runs):
        slots = range(4 * number, 4 * number + 4)
        for slot, name in zip(slots, run, strict=True):
            rig.fill(slot, name)
        tickets.append(rig.submit(Put, run, tuple(slots), (1,) * 4))
    assert all(rig.wait(ticket).outcome is Outcome.GOOD for ticket in tickets)
    tickets = [
        rig.submit(Get, run, range(32 + 4 * (number % 8), 36 + 4 * (number % 8))) for number, run in enumerate(runs)
    ]
    assert all(rig.wait(ticket).outcome is Outcome.GOOD for ticket in tickets)
    assert all(rig.holds(32 + 4 * number, run[0]) for number, run in enumerate(runs))


def test_an_object_of_this_name_is_kept_unless_it_is_replaced(rig):
    first, second = (np.full(64, value, np.uint8).tobytes() for value in (1, 2))

    def found():
        content = bytearray(64)
        assert rig.store.get([Incoming("k", [memoryview(content)], 64)])[0].outcome is Outcome.GOOD
        return content

    rig.store.put([Outgoing("k", [first], replaces=True)])
    rig.store.put([Outgoing("k", [second])])
    assert found() == first
    rig.store.put([Outgoing("k", [second], replaces=True)])
    assert found() == second


@pytest.mark.parametrize("length", [100, 500_000])
def test_an_object_of_another_length_is_bad(rig, length):
    run = make_run(0)
    rig.store.put([Outgoing(rig.key(run), [bytes(length)])])
    assert rig.assert_a_miss(run).outcome is Outcome.BAD


def test_no_listing_makes_written_runs_unknown(lasting_pool):
    with opened(lasting_pool.url, list_interval_s=0.01) as rig:
        rig.put(make_run(0))
        time.sleep(0.1)
        assert rig.storage.take_listing() is None


@pytest.mark.parametrize("protection", [HmacProtection(SECRET), AesProtection(SECRET)])
def test_a_protected_run_comes_back(lasting_pool, protection):
    with opened(
        lasting_pool.url, protection=protection, namespace=type(protection).__name__[:16].ljust(16).encode()
    ) as rig:
        ready(lasting_pool, rig)
        rig.put(make_run(0), tenant=b"team a")
        assert rig.get(make_run(0)).outcome is Outcome.GOOD
        assert all(rig.holds(32 + position, name) for position, name in enumerate(make_run(0)))


def test_a_byte_that_changed_in_the_owners_memory_is_a_miss(lasting_pool, rig):
    run = make_run(3)
    rig.put(run)
    lasting_pool.change_in_owner(pattern(run[2], sum(SHARDS)).tobytes()[:2000])
    assert rig.assert_a_miss(run).outcome is Outcome.BAD
    assert rig.put(run, replaces=True).outcome is Outcome.GOOD
    assert rig.get(run).outcome is Outcome.GOOD


def test_a_master_that_does_not_exist_is_an_error_at_the_start():
    with pytest.raises(EnvironmentProblem, match="the master does not answer"), opened("mooncake://127.0.0.1:1"):
        pass


@pytest.fixture
def faulty(pool, monkeypatch):
    """A rig with one run in a store that the test breaks. The breaker tries the store every second."""
    monkeypatch.setattr("kvbm.tiers.shared.breaker.LONGEST_PAUSE_S", 1.0)
    with opened(pool.url) as rig:
        ready(pool, rig)
        assert comes_back(rig, make_run(0))
        yield pool, rig


@pytest.mark.parametrize("victim", ["owner", "master"])
@pytest.mark.parametrize("event", ["kill", "stop"])
def test_every_order_ends_in_time_without_its_owner_or_master_and_works_again_later(faulty, victim, event):
    pool, rig = faulty
    process = getattr(pool, victim)
    getattr(pool, event)(process)
    for number in range(4):
        assert_a_miss_in_time(rig, make_run(0))
        result = ended_in_time(rig, Put, make_run(10 + number), range(4), (1,) * 4)
        assert result.outcome in (Outcome.FAILED, Outcome.GOOD, Outcome.EXISTS)
        assert ended_in_time_probe(rig)
    if event == "stop":
        pool.resume(process)
    else:
        getattr(pool, f"start_{victim}")()
    numbers = iter(range(100, 10_000))
    wait_until(lambda: comes_back(rig, make_run(next(numbers))), "runs come back again", 60)


def ended_in_time_probe(rig):
    began_s = time.monotonic()
    rig.probe([make_run(0)[-1]])
    return time.monotonic() - began_s < DEADLINE_S


def test_nothing_is_written_to_host_memory_after_an_order_has_ended(faulty):
    pool, rig = faulty
    pool.stop(pool.owner)
    assert_a_miss_in_time(rig, make_run(0))
    for shard in rig.shards:
        shard[:] = 7
    pool.resume(pool.owner)
    wait_until(lambda: rig.store.check(None) is None, "the master answers")
    time.sleep(1.0)  # bytes on their way would arrive now
    assert all((shard == 7).all() for shard in rig.shards)


def test_the_time_limit_covers_what_a_call_takes(faulty):
    pool, rig = faulty
    pool.stop(pool.owner)
    began_s = time.monotonic()
    rig.store.get(
        [Incoming(rig.key(make_run(0)), [memoryview(bytearray(rig.form.object_bytes))], rig.form.object_bytes)]
    )
    assert time.monotonic() - began_s < STALL * rig.store.limit_s
