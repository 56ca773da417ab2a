"""A store of which a part does not work: what works is still used."""

import os
import socket
import threading
import time

import pytest
from storage_rig import make_run
from waiting import eventually

from kvbm.child import channel as channel_module
from kvbm.child.channel import Channel
from kvbm.tiers.shared import breaker, storage
from kvbm.tiers.shared.breaker import WritePause
from kvbm.tiers.shared.object_store import StoreAnswer
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.stores import directory

RUNS = [make_run(number) for number in range(8)]


def test_reads_go_on_while_writes_fail_and_writes_go_on_when_they_succeed(rig, monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.2)
    rig.storage._write_pause = WritePause()
    assert rig.put(RUNS[0]).outcome is Outcome.GOOD
    with monkeypatch.context() as full:
        full.setattr(rig.store, "_put", lambda one: StoreAnswer(Outcome.FAILED, "No space left on device"))
        errors = [rig.put(run).error for run in RUNS[1:6]]
        assert errors[:3] == ["No space left on device"] * 3
        assert "paused" in errors[3]
        assert rig.get(RUNS[0]).outcome is Outcome.GOOD
        assert rig.storage.off_because is None
    time.sleep(0.25)
    assert rig.put(RUNS[6]).outcome is Outcome.GOOD


def test_a_pause_of_writes_grows_until_one_succeeds():
    now = [0.0]
    pause = WritePause(clock=lambda: now[0])
    assert [pause.failed() for _ in range(3)] == [0.0, 0.0, 1.0]
    assert pause.failed() == 0.0, "of writes that were on their way"
    assert not pause.is_over
    lengths = []
    for _ in range(7):
        now[0] += 100.0
        assert pause.is_over
        lengths.append(pause.failed())
    assert lengths == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    now[0] += 100.0
    pause.succeeded()
    assert [pause.failed() for _ in range(3)] == [0.0, 0.0, 1.0]


def replace_by_directory(path):
    path.unlink()
    path.mkdir()


def replace_by_loop(path):
    path.unlink()
    path.symlink_to(path)


def replace_by_file_as_parent(path):
    for one in path.parent.iterdir():
        one.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"")


@pytest.mark.parametrize("damage", [replace_by_directory, replace_by_loop, replace_by_file_as_parent])
def test_a_file_that_cannot_be_read_is_a_bad_object_and_the_others_are_read(rig, root, damage):
    for run in RUNS:
        rig.put(run)
    for run in RUNS[:6]:
        damage(root / rig.key(run)) if (root / rig.key(run)).exists() else None
        assert rig.get(run).outcome is Outcome.BAD
    assert rig.get(RUNS[7]).outcome in (Outcome.GOOD, Outcome.BAD if damage is replace_by_file_as_parent else None)
    assert rig.storage.off_because is None
    assert rig.storage.counters.failed_requests == 0


def test_a_link_to_itself_and_a_directory_without_permission_leave_the_rest_of_the_listing(rig, root):
    rig.put(RUNS[0])
    namespace = root / rig.keys.prefix
    (namespace / "loop").symlink_to(namespace)
    (namespace / "ff").mkdir(mode=0)
    (namespace / "aa").mkdir()
    (namespace / "aa" / "link").symlink_to(root / rig.key(RUNS[0]))
    (found,) = [page for page in rig.store.keys(rig.keys.prefix) if page]
    assert found == [rig.key(RUNS[0])]


def test_what_a_killed_engine_has_left_of_a_write_is_deleted_after_an_hour(rig, root):
    rig.put(RUNS[0])
    path = root / rig.key(RUNS[0])
    old, young, other = (path.with_name(f"{path.name}{end}") for end in ("#1", "#2", "-mine"))
    for one in (old, young, other):
        one.write_bytes(b"half")
    for one in (old, other):
        os.utime(one, (0, 0))
    (found,) = rig.store.keys(rig.keys.prefix)
    assert rig.key(RUNS[0]) in found
    assert [one.exists() for one in (path, old, young, other)] == [True, False, True, True]


def test_a_listing_that_fails_is_logged(rig, caplog, monkeypatch):
    def fail(prefix):
        raise OSError("no permission")

    monkeypatch.setattr(rig.store, "keys", fail)
    rig.storage._list_once(time.monotonic())
    assert "cannot list the objects of the shared tier: no permission" in caplog.text


def test_one_call_that_never_returns_turns_the_tier_off_once(rig, monkeypatch):
    monkeypatch.setattr(storage, "STALL", 0.2)
    rig.put(RUNS[0])
    hangs, get = threading.Event(), rig.store._get
    blocked = rig.key(RUNS[1])
    monkeypatch.setattr(rig.store, "_get", lambda one: hangs.wait(60) if one.key == blocked else get(one))
    try:
        rig.submit(storage.Get, RUNS[1], tuple(range(4)))
        eventually(lambda: rig.storage.poll() or rig.storage.off_because)
        eventually(lambda: rig.storage.poll() or rig.storage.off_because is None)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            rig.storage.poll()
            assert rig.storage.off_because is None
            time.sleep(0.01)
        assert rig.get(RUNS[0]).outcome is Outcome.GOOD
        assert rig.storage.counters.times_off == 1
    finally:
        hangs.set()


def test_a_store_whose_reads_hang_stays_off_although_its_directory_can_be_listed(rig, monkeypatch):
    monkeypatch.setattr(storage, "STALL", 0.2)
    rig.put(RUNS[0])
    hangs, tried, read_all = threading.Event(), threading.Event(), directory._read_all

    def hang(descriptor):
        tried.set()
        hangs.wait(60)
        read_all(descriptor)

    monkeypatch.setattr(rig.store, "_get", lambda one: hangs.wait(60) and StoreAnswer(Outcome.FAILED, "late"))
    monkeypatch.setattr(directory, "_read_all", hang)
    try:
        rig.submit(storage.Get, RUNS[0], tuple(range(4)))
        eventually(lambda: rig.storage.poll() or rig.storage.off_because)
        eventually(tried.is_set)
        time.sleep(0.5)
        rig.storage.poll()
        assert rig.storage.off_because is not None
    finally:
        hangs.set()
    eventually(lambda: rig.storage.poll() or rig.storage.off_because is None)


def test_a_bare_mount_point_is_not_taken_for_a_store_that_answers(rig, root):
    rig.put(RUNS[0])
    assert rig.store.check(rig.key(RUNS[0])) is None
    assert rig.store.check("no/such/object") is None, "that says nothing about the others"
    rig.store._device = -1  # of the file system that was mounted there
    assert rig.store.check(None) is None, "mounted again, with the description of the namespace"
    rig.store._facts.unlink()
    assert "is not mounted" in rig.store.check(None)


def test_one_call_takes_a_limited_part_of_what_a_process_sends(monkeypatch):
    monkeypatch.setattr(channel_module, "RECEIVED_AT_ONCE", 1 << 16)
    monkeypatch.setattr(channel_module, "RECEIVE_BYTES", 1 << 14)
    ours, theirs = map(Channel, socket.socketpair())
    message = bytes(10_000)
    for _ in range(100):
        theirs.send(message)
    counts = []
    while sum(counts) < 100:
        theirs.flush()
        counts.append(len(ours.receive()))
    assert max(counts) <= 8
    ours.close()
    theirs.close()
