"""Engines of one machine read an object once: processes behind a proxy that counts, and what can happen to copies."""

import errno
import os
import shutil
import signal
import threading
import time
from contextlib import ExitStack

import pytest
from conftest import fresh_place, set_environment
from fault_proxy import FaultProxy
from storage_rig import NAMESPACE, Rig, make_hash, make_run, opened
from test_shared_service import LIMIT_S
from test_shared_service import opened as opened_process

from kvbm.host.tree import Tree
from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.object_store import Incoming, StoreAnswer
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.stores import node_copies as module
from kvbm.tiers.shared.stores.node_copies import COPIES, COPY_NAME, NodeCopies
from kvbm.tiers.shared.stores.open import open_store, with_copies

OBJECTS = 20
SLOW_BYTES_PER_S = 80_000  # an object takes 0.1 s


@pytest.fixture
def proxy(server_of, monkeypatch):
    server = server_of("moto")
    with FaultProxy(server.port) as proxy:
        set_environment(monkeypatch, server.through(proxy.port))
        yield proxy


@pytest.fixture
def processes(proxy, server_of, tmp_path):
    """Two engines, each with its process, after objects were written."""
    place = fresh_place(server_of("moto"))
    with ExitStack() as stack:
        with opened(place, extent_blocks=1) as writer:
            for number in range(OBJECTS):
                assert writer.put((make_hash(number),)).outcome is Outcome.GOOD
        yield [stack.enter_context(opened_process(place, node_directory=tmp_path)) for _ in range(2)]


def copies(directory):
    return sorted(path for path in (directory / COPIES).iterdir() if COPY_NAME.fullmatch(path.name))


def test_each_object_is_requested_once_although_two_engines_read_it_at_the_same_time(proxy, processes):
    """On a busy machine, a use of the directory may take longer than ANSWER_LIMIT_S: then others are read."""
    proxy.bytes_per_s = SLOW_BYTES_PER_S
    for first in range(0, 3 * OBJECTS, OBJECTS):
        if first:
            time.sleep(module.PAUSE_S)
            proxy.fault = None
            for number in range(first, first + OBJECTS):
                assert processes[0].put(number).outcome is Outcome.GOOD
        proxy.fault = "slow"
        if are_read_once(proxy, processes, range(first, first + OBJECTS)):
            return
    pytest.fail("each time, an object was requested twice")


def are_read_once(proxy, processes, numbers):
    """Let both engines read objects at the same time. Return whether each was requested once."""
    proxy.objects_asked.clear()
    before = copies_read(processes)
    tickets = [(rig, rig.start_get(number, number % OBJECTS), number) for number in numbers for rig in processes]
    for rig, ticket, number in tickets:
        assert rig.wait(ticket).outcome is Outcome.GOOD
        assert rig.holds(number, number % OBJECTS)
    assert len(proxy.objects_asked) == OBJECTS
    once = set(proxy.objects_asked.values()) == {1}
    assert not once or copies_read(processes) - before == OBJECTS
    return once


def copies_read(processes):
    return sum(rig.client.counters.copies_read for rig in processes)


@pytest.mark.servers
def test_what_a_killed_engine_was_reading_another_one_reads(proxy, processes):
    first, second = processes
    proxy.fault = "hang"
    mine = [first.start_get(number, number) for number in range(4)]
    second.await_that(lambda: len(proxy.objects_asked) == 4)
    others = [second.start_get(number, number) for number in range(4)]
    os.kill(first.client.process.pid, signal.SIGKILL)
    proxy.fault = None
    for number, ticket in enumerate(others):
        assert second.wait(ticket).outcome is Outcome.GOOD
        assert second.holds(number, number)
    assert {first.wait(ticket).outcome for ticket in mine} == {Outcome.FAILED}
    assert second.client.is_on


@pytest.mark.servers
def test_a_stopped_engine_delays_others_once(proxy, processes):
    first, second = processes
    for number, rig in enumerate(processes):
        rig.put(OBJECTS + number)  # from now on, a request may take 1 s
    proxy.fault = "hang"
    for number in range(8):
        first.start_get(number, number)
    second.await_that(lambda: len(proxy.objects_asked) == 8)
    os.kill(first.client.process.pid, signal.SIGSTOP)
    try:
        proxy.fault = None
        for numbers, limit_s in ((range(4), 1.5), (range(4, 8), 0.5)):
            began_s = time.monotonic()
            tickets = [second.start_get(number, number) for number in numbers]
            for number, ticket in zip(numbers, tickets, strict=True):
                assert second.wait(ticket).outcome is Outcome.GOOD
                assert second.holds(number, number)
            assert time.monotonic() - began_s < limit_s
        assert second.client.is_on
    finally:
        os.kill(first.client.process.pid, signal.SIGCONT)


class Counting:
    """A store, and how many objects were read from it."""

    def __init__(self, store):
        self._store = store
        self.count = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, objects):
        self.count += len(objects)
        return self._store.get(objects)


@pytest.fixture
def pair(tmp_path):
    """Two storages in this process, over a directory as if it were a distant store; run 0 is written."""
    rigs = []
    for _ in range(2):
        store = Counting(open_store(f"file://{tmp_path}/objects", 4, KeySpace(NAMESPACE), {}, writes=True))
        rigs.append(Rig(NodeCopies(store, tmp_path, "s3://a")))
        rigs[-1].counting = store
    rigs[0].put(make_run(0))
    yield rigs
    for rig in rigs:
        rig.storage.close(0)


def assert_read(rig, number=0):
    assert rig.get(make_run(number)).outcome is Outcome.GOOD
    assert all(rig.holds(32 + position, name) for position, name in enumerate(make_run(number)))


def test_a_copy_has_also_what_its_reader_skipped(pair):
    first, second = pair
    assert first.get(make_run(0), wanted={1}).outcome is Outcome.GOOD
    assert first.holds(33, make_run(0)[1])
    assert_read(second)
    assert (first.counting.count, second.counting.count) == (1, 0)
    assert second.storage.counters.copies_read == 1


def flip(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, 1000),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a_directory": lambda path: (path.unlink(), path.mkdir()),
    "a_link_to_nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "gone": lambda path: path.unlink(),
    "a_part_of_a_killed_engine": lambda path: path.rename(f"{path}.part"),
    "all_gone": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_read_again_from_the_store(pair, tmp_path, damage):
    first, second = pair
    assert_read(first)
    DAMAGES[damage](copies(tmp_path)[0])
    assert_read(second)
    assert second.counting.count == 1
    assert second.storage.counters.bad_objects == second.storage.counters.copies_read == 0
    assert_read(first)


def test_a_full_directory_costs_nothing_but_the_copies(pair, tmp_path, monkeypatch, caplog):
    def writev(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "writev", writev)
    for _ in range(3):
        for rig in pair:
            assert_read(rig)
    assert copies(tmp_path) == []
    assert caplog.text.count("No space left") == 2  # one for each


def test_an_engine_that_is_alone_keeps_no_copies(pair, tmp_path):
    first, second = pair
    second.storage.close(0)
    assert_read(first)
    assert copies(tmp_path) == []


def test_stores_in_memory_or_on_this_machine_have_no_copies(tmp_path):
    for url in ("file:///objects", "memory:///", "mooncake://host:1"):
        store = Old()
        assert with_copies(store, url, tmp_path) is store
    assert with_copies(store, "s3://bucket", None) is store
    (tmp_path / COPIES).write_text("a file")
    assert with_copies(store, "s3://bucket", tmp_path) is store
    with opened("memory:///") as rig:
        assert not isinstance(rig.store, NodeCopies)


class Old:
    """A store whose objects are 1000 seconds old, of `length` bytes."""

    name, threads, write_threads, batch_objects = "old", 1, 1, 1
    can_list, limit_s = False, 1.0

    def __init__(self):
        self.count = 0

    def get(self, objects):
        self.count += 1
        for buffer in objects[0].buffers:
            buffer[:] = objects[0].key[0].encode() * len(buffer)
        return [StoreAnswer(Outcome.GOOD, age_s=1000.0)]

    def close(self):
        pass


def incoming(key, length=1000):
    return Incoming(key, [memoryview(bytearray(length))], length)


@pytest.fixture
def two(tmp_path):
    engines = [NodeCopies(Old(), tmp_path, url) for url in ("s3://a", "s3://a")]
    yield engines
    for engine in engines:
        engine.close()


def test_a_copy_is_as_old_as_its_object(two):
    first, second = two
    first.get([incoming("a")])
    one = incoming("a")
    answer = second.get([one])[0]
    assert answer.is_copy
    assert 1000 <= answer.age_s < 1000 + LIMIT_S
    assert bytes(one.buffers[0]) == b"a" * 1000


def test_a_copy_is_forgotten_after_a_while(two, tmp_path, monkeypatch):
    first, second = two
    first.get([incoming("a")])
    now_s = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now_s + module.COPY_S + 1)
    assert not second.get([incoming("a")])[0].is_copy
    monkeypatch.undo()
    first.get([incoming("b")])
    assert copies(tmp_path) != []
    monkeypatch.setattr(module, "COPY_S", -1.0)
    first.close()
    assert copies(tmp_path) == []


def test_the_oldest_copies_make_room(two, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 8000)
    for number in range(30):
        two[0].get([incoming(f"{number}")])
        assert len(copies(tmp_path)) <= 9
    assert two[1].get([incoming("29")])[0].is_copy
    assert not two[1].get([incoming("0")])[0].is_copy
    two[0].get([incoming("large", 1001)])
    assert not two[1].get([incoming("large", 1001)])[0].is_copy


def test_objects_of_different_stores_are_not_confused(tmp_path, two):
    elsewhere = NodeCopies(Old(), tmp_path, "s3://b")
    two[0].get([incoming("a")])
    assert not elsewhere.get([incoming("a")])[0].is_copy
    elsewhere.close()


def test_a_copy_that_is_made_during_a_look_at_the_copies_stays(two, tmp_path, monkeypatch):
    first, second = two
    scan = first._copies.scan

    def making_one():
        second.get([incoming("late")])
        return scan()

    monkeypatch.setattr(first._copies, "scan", making_one)
    first._purge()
    assert len(copies(tmp_path)) == 1


class HangingDirectory:
    """Lets calls in the directory of the copies wait, as those of a file system that hangs."""

    CALLS = ("open_file", "scan", "unlink_file", "about")

    def __init__(self, monkeypatch, call=None):
        self._call, self._may_go = call, threading.Event()
        self._may_go.set()
        for name in self.CALLS if call is None else (call,):
            patch_of = Tree if hasattr(Tree, name) else module
            monkeypatch.setattr(patch_of, name, self._waiting(getattr(patch_of, name)))

    def _waiting(self, call):
        def wait(*arguments, **named):
            self._may_go.wait()
            return call(*arguments, **named)

        return wait

    def hang(self):
        self._may_go.clear()

    def answer(self):
        self._may_go.set()


@pytest.fixture
def hanging(monkeypatch):
    found = HangingDirectory(monkeypatch)
    yield found
    found.answer()


def read(engine, key):
    """The answer for an object, which must be right, and the time until then."""
    one = incoming(key)
    began_s = time.monotonic()
    answer = engine.get([one])[0]
    assert answer.outcome is Outcome.GOOD
    assert bytes(one.buffers[0]) == key[0].encode() * 1000
    return answer, time.monotonic() - began_s


def until_a_copy_is_read(engine, key):
    deadline_s = time.monotonic() + LIMIT_S
    while not read(engine, key)[0].is_copy:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_directory_that_hangs_costs_nothing_but_the_copies(hanging, two, monkeypatch, caplog):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    first, second = two
    read(first, "a")
    assert read(second, "a")[0].is_copy
    hanging.hang()
    assert read(second, "b")[1] < module.ANSWER_LIMIT_S + 1.0
    began_s = time.monotonic()
    for number in range(50):
        assert not read(second, f"c{number}")[0].is_copy
    assert time.monotonic() - began_s < module.ANSWER_LIMIT_S, "they do not wait again"
    assert caplog.text.count("cannot keep copies") == 1
    hanging.answer()
    until_a_copy_is_read(second, "d")


def test_an_engine_starts_and_ends_although_the_directory_of_copies_hangs(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    hanging.hang()
    began_s = time.monotonic()
    engine = NodeCopies(Old(), tmp_path, "s3://a")
    assert not read(engine, "a")[0].is_copy
    engine.close()
    assert time.monotonic() - began_s < 2 * module.ANSWER_LIMIT_S + 1.0
    late = NodeCopies(Old(), tmp_path, "s3://a")
    hanging.answer()
    other = NodeCopies(Old(), tmp_path, "s3://a")
    until_a_copy_is_read(late, "b")
    late.close()
    other.close()


@pytest.mark.parametrize("call", ["write_all", "read_file", "_locked"])
def test_a_call_that_ends_late_changes_no_object(two, tmp_path, monkeypatch, call):
    """Neither what was read meanwhile, nor a copy: its buffers have other content by then."""
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    first, second = two
    read(first, "a")
    hanging = HangingDirectory(monkeypatch, call)
    hanging.hang()
    one = incoming("a" if call == "read_file" else "b")
    assert second.get([one])[0].outcome is Outcome.GOOD
    one.buffers[0][:] = b"z" * 1000
    hanging.answer()
    until_a_copy_is_read(second, "c")
    assert bytes(one.buffers[0]) == b"z" * 1000
    read(first, "b")
    assert not list((tmp_path / COPIES).glob("*.part"))
