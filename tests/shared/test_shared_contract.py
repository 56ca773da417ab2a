"""The contract of the shared tier's storage, for every store: what is written comes back byte for byte, and everything
else is a miss."""

import time

import obstore
import pytest
from storage_rig import SHARDS, make_run, opened

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared import storage
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.protection import AesProtection, HmacProtection, NoProtection

SECRET = b"sixteen bytes or more"


@pytest.fixture
def rig(url):
    with opened(url) as rig:
        yield rig


def test_a_run_comes_back_byte_for_byte_into_other_slots(rig):
    run = make_run(0)
    assert rig.put(run).outcome is Outcome.GOOD
    result = rig.get(run, first_slot=40)
    assert result.outcome is Outcome.GOOD
    assert all(rig.holds(40 + position, name) for position, name in enumerate(run))
    assert not rig.shards[0][40:44, SHARDS[0] :].any(), "only the payload"


def test_only_the_wanted_blocks_are_written_to_host_memory(rig):
    run = make_run(0)
    rig.put(run)
    result = rig.get(run, first_slot=40, wanted={1, 3})
    assert result.outcome is Outcome.GOOD
    assert rig.holds(41, run[1])
    assert rig.holds(43, run[3])
    assert not rig.shards[0][[40, 42]].any()


def test_what_was_never_written_is_absent(rig):
    assert rig.assert_a_miss(make_run(5)).outcome is Outcome.ABSENT
    assert rig.storage.counters.absent_objects == 1


def test_a_second_write_of_a_run_finds_the_first(rig):
    rig.put(make_run(0))
    assert rig.put(make_run(0)).outcome is Outcome.EXISTS
    assert rig.storage.counters.writes_saved == 1


def test_a_rewrite_replaces_the_object(rig):
    rig.put(make_run(0))
    assert rig.put(make_run(0), replaces=True).outcome is Outcome.GOOD


def test_nothing_is_written_if_a_rank_ended_while_the_blocks_were_read(rig):
    rig.carries = False
    assert rig.put(make_run(0)).outcome is Outcome.FAILED
    assert rig.assert_a_miss(make_run(0)).outcome is Outcome.ABSENT


@pytest.mark.parametrize("present", [0, 1, 2, 7, 8, 30])
def test_a_probe_finds_the_end_of_the_runs_that_are_present(rig, present):
    runs = [make_run(number) for number in range(30)]
    for run in runs[:present]:
        rig.put(run)
    assert rig.probe([run[-1] for run in runs]).present == present


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "header", "payload", "tail"])
def test_a_damaged_object_is_a_miss(rig, change):
    run = make_run(0)
    rig.put(run)
    store, key = rig.raw, rig.key(run)
    content = bytearray(obstore.get(store, key).bytes())
    changed = {
        "cut": content[:-1],
        "longer": content + b"x",
        "empty": bytearray(),
        "header": content[:100] + bytes([content[100] ^ 1]) + content[101:],
        "payload": content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        "tail": content[:-1] + bytes([content[-1] ^ 1]),
    }[change]
    obstore.put(store, key, bytes(changed))
    assert rig.assert_a_miss(run).outcome is Outcome.BAD
    assert rig.storage.counters.bad_objects == 1


def test_the_object_of_another_run_under_this_name_is_a_miss(rig):
    rig.put(make_run(1))
    store = rig.raw
    obstore.put(store, rig.key(make_run(0)), bytes(obstore.get(store, rig.key(make_run(1))).bytes()))
    assert rig.assert_a_miss(make_run(0)).outcome is Outcome.BAD


def test_the_object_of_another_namespace_is_a_miss(tmp_path):
    url, other = f"file://{tmp_path}/objects", bytes(16)
    with opened(url) as rig, opened(url, namespace=other) as foreign:
        rig.put(make_run(0))
        assert foreign.assert_a_miss(make_run(0)).outcome is Outcome.ABSENT
        store = rig.raw
        obstore.put(store, foreign.key(make_run(0)), bytes(obstore.get(store, rig.key(make_run(0))).bytes()))
        assert foreign.assert_a_miss(make_run(0)).outcome is Outcome.BAD


@pytest.mark.parametrize("protection", [HmacProtection(SECRET), AesProtection(SECRET)])
def test_a_protected_run_comes_back_only_with_its_secret(tmp_path, protection):
    url = f"file://{tmp_path}/objects"
    with opened(url, protection=protection) as rig:
        rig.put(make_run(0), tenant=b"team a")
        assert rig.get(make_run(0)).outcome is Outcome.GOOD
        assert rig.holds(32, make_run(0)[0])
    for other in (NoProtection(), HmacProtection(b"another secret of them"), AesProtection(b"another secret of them")):
        with opened(url, protection=other) as rig:
            assert rig.assert_a_miss(make_run(0)).outcome is Outcome.BAD
            assert other.seal_bytes == 0 or not rig.shards[0].any()  # nothing unproven reaches host memory


def test_an_unprotected_object_is_a_miss_where_protection_is_demanded(tmp_path):
    url = f"file://{tmp_path}/objects"
    with opened(url) as rig:
        rig.put(make_run(0))
    with opened(url, protection=HmacProtection(SECRET)) as rig:
        assert rig.assert_a_miss(make_run(0)).outcome is Outcome.BAD


def test_a_missing_place_is_an_error_at_the_start(tmp_path):
    with pytest.raises(EnvironmentProblem, match="missing/objects"), opened(f"file://{tmp_path}/missing/objects"):
        pass


def test_a_listing_has_the_runs_of_this_namespace_only(tmp_path):
    url = f"file://{tmp_path}/objects"
    with opened(url) as rig, opened(url, namespace=bytes(16)) as other:
        rig.put(make_run(0))
        rig.put(make_run(1))
        other.put(make_run(2))
        keys = [rig.keys.name_of(key) for page in rig.store.keys(rig.keys.prefix) for key in page]
        assert sorted(name for name in keys if name) == sorted([make_run(0)[-1], make_run(1)[-1]])


def test_an_order_does_not_wait_for_a_thread_that_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "IDLE_S", 600.0)
    with opened(f"file://{tmp_path}/objects") as rig:
        for _ in range(2 * rig.store.threads + 2):
            time.sleep(0.05)  # every thread waits
            assert rig.probe([make_run(0)[-1]]).present == 0
