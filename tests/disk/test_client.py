"""The disk tier in a process of its own: the same blocks, and what happens when either process ends."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from disk_rig import HASH_BYTES, LIMIT_S, NAMESPACE, Rig, found_blocks, instance_of, make_hash, settings_for

from kvbm.child import deadlines, service
from kvbm.child.channel import Channel
from kvbm.child.child import Opening
from kvbm.child.service import UnresponsiveProcess
from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.host.threads import allowed_cores
from kvbm.tiers.disk.directory import InstanceLock, await_predecessor
from kvbm.tiers.disk.health import DiskStorageCounters
from kvbm.tiers.disk.index import BlockIndex, IndexRow
from kvbm.tiers.disk.orders import Cleared, FoundBlocks, Open, Opened
from kvbm.tiers.disk.service.client import DiskClient
from kvbm.tiers.disk.storage import FOUND_BATCH_BLOCKS
from kvbm.types import SlotState
from kvbm_cli.cache.disk_verification import holder
from kvbm_cli.store.caches import list_caches

HOST_SLOTS = 16
GENERATION = 7


class ProcessRig(Rig):
    """Host slots that carry GENERATION whenever they are written from."""

    def __init__(self, tier: DiskClient, region: Region) -> None:
        super().__init__(tier, region.shards)
        self.region = region

    def start_write(self, numbers, host_slots, disk_slots, tenants=None, *, generation=GENERATION):
        self.last_ticket += 1
        hashes = [make_hash(number) for number in numbers]
        for sequence_hash, slot in zip(hashes, host_slots, strict=True):
            self.fill(slot, sequence_hash)
        self.region.write_slots(list(host_slots), GENERATION, SlotState.READY)
        self.tier.submit(self.order_write(hashes, host_slots, disk_slots, tenants, generation))
        return self.last_ticket


@contextmanager
def host_memory():
    """The segments of two ranks, and the region that they make."""
    layout = BlockLayout.block_contiguous(block_count=2, block_bytes=8192)
    segments = [Segment.create(rank=rank, layout=layout, slot_count=HOST_SLOTS) for rank in range(2)]
    infos = [segment.info for segment in segments]
    region = Region.map(infos)
    try:
        yield infos, region
    finally:
        region.close()
        for segment in segments:
            segment.close()


@contextmanager
def opened(directory: Path, *, close_s: float = LIMIT_S, progress=None, **keys):
    with host_memory() as (infos, region):
        tier = DiskClient(progress)
        cores = frozenset(allowed_cores())
        order = Open(settings_for(directory, **keys), NAMESPACE, infos, HASH_BYTES, cores)
        tier.start(order, directory, None, lambda: False)
        try:
            yield ProcessRig(tier, region)
        finally:
            tier.close(close_s)


def left_in(directory: Path) -> dict[int, int]:
    """What the next engine finds there."""
    with opened(directory) as rig:
        return rig.recovered()


@contextmanager
def stopped(pid: int):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def has_ended(pid: int) -> bool:
    """All its threads: the last of them may still wait for its I/O when the first has become a zombie."""
    try:
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return is_zombie and os.listdir(f"/proc/{pid}/task") == [str(pid)]
    except FileNotFoundError:
        return True


def test_blocks_come_back_and_are_there_for_the_next_process(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        assert rig.tier.slot_count == 16
        assert rig.tier.io_name == "threads"
        assert rig.recovered() == {}
        assert all(rig.write(range(6), [3, 4, 5, 9, 1, 0]).is_good)
        assert all(rig.read([5, 0, 3], [0, 3, 9]).is_good)
        assert rig.tier.counters.blocks_read == 3
        assert rig.tier.counters.bytes_written == 6 * 2 * 8192
    with opened(tmp_path) as rig:
        assert rig.recovered() == dict(enumerate([3, 4, 5, 9, 1, 0]))
        assert all(rig.read(range(6), [3, 4, 5, 9, 1, 0]).is_good)


def test_process_with_more_than_1024_open_files_can_use_the_disk(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1200:
        pytest.skip("needs 1200 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with opened(tmp_path) as rig:
            assert rig.tier._channel.fileno() > 1023
            assert rig.write([1], [0]).is_good == (True,)
            rig.tier.clear()
    finally:
        for fd in others:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_damaged_block_is_not_good(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write([1, 2], [0, 1])
        assert rig.read([1, 3], [0, 1]).is_good == (True, False)
        assert rig.tier.counters.checksum_misses == 1


def test_host_slots_of_another_generation_are_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        assert rig.wait(rig.start_write([1], [0], [3], generation=GENERATION + 1)).is_good == (False,)
        assert rig.wait(rig.start_write([2], [0], [4])).is_good == (True,)
    assert left_in(tmp_path) == {2: 4}


def test_forgotten_blocks_are_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write([1, 2, 3], [0, 1, 2])
        rig.tier.forget([1])
    assert left_in(tmp_path) == {1: 0, 3: 2}


def test_clear_covers_what_is_in_flight_and_what_ended_unseen(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write([1], [0])
        seen_late = rig.start_write([2], [1], [1])
        rig.wait_until(lambda: rig.tier._receive() or rig.tier._results)
        in_flight = rig.start_write([3], [2], [2])
        rig.tier.clear()
        assert not rig.tier.is_on
        rig.wait(seen_late)
        rig.wait(in_flight)
        rig.wait_until(lambda: rig.tier.is_on)
        assert rig.write([4], [3]).is_good == (True,)
    assert left_in(tmp_path) == {4: 3}


def fill_index(directory: Path, count: int) -> None:
    """Let the cache have blocks of which only the rows are there."""
    rows = [IndexRow(slot, make_hash(slot), slot + 1, 2 * 8192, 0, b"", 0.0) for slot in range(count)]
    with closing(BlockIndex.open(instance_of(directory) / "index.sqlite")) as index:
        index.change(rows, ())


def test_blocks_that_were_there_are_told_some_at_a_time(tmp_path: Path) -> None:
    count = 2 * FOUND_BATCH_BLOCKS + 1
    with opened(tmp_path, block_count=count) as rig:
        assert rig.tier.recovered().is_last
    fill_index(tmp_path, count)
    with opened(tmp_path, block_count=count) as rig:
        while (first := rig.tier.recovered(waits=False)) is None:
            time.sleep(0.001)
        assert first.slots == list(range(FOUND_BATCH_BLOCKS))
        assert first.hashes == [make_hash(slot) for slot in first.slots]
        assert found_blocks(rig.tier)[0] == list(range(FOUND_BATCH_BLOCKS, count))
        assert rig.tier.recovered(waits=False) == FoundBlocks([], [], True)


def test_clear_covers_what_was_found_and_is_not_told_yet(tmp_path: Path) -> None:
    count = 2 * FOUND_BATCH_BLOCKS + 1
    with opened(tmp_path, block_count=count):
        pass
    fill_index(tmp_path, count)
    with opened(tmp_path, block_count=count) as rig:
        assert not rig.tier.recovered().is_last
        rig.tier.clear()
        assert rig.tier.recovered() == FoundBlocks([], [], True)


def test_blocks_of_a_process_that_does_not_answer_are_not_waited_for(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write(range(5), range(5))
    with opened(tmp_path) as rig:
        with stopped(rig.tier.pid):
            started = time.monotonic()
            assert rig.tier.recovered() is None
            assert time.monotonic() - started < 5 * deadlines.ANSWER_LIMIT_S
        assert rig.recovered() == {number: number for number in range(5)}


def test_blocks_of_a_process_that_has_ended_are_not_waited_for(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write(range(5), range(5))
    with opened(tmp_path) as rig:
        os.kill(rig.tier.pid, signal.SIGKILL)
        assert rig.tier.recovered() is None


def test_the_answer_to_one_clear_is_none_to_the_next_one(tmp_path: Path) -> None:
    with opened(tmp_path) as rig, stopped(rig.tier.pid):
        rig.tier.clear()
        rig.tier.clear()
        rig.tier._handle(Cleared(1))
        assert rig.tier.is_clearing
        rig.tier._handle(Cleared(1))
        assert not rig.tier.is_clearing


def test_clear_of_a_tenant_leaves_the_others(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        unseen = rig.start_write([1, 2], [0, 1], [0, 1], [b"a", b"b"])
        deadline_s = time.monotonic() + LIMIT_S
        while not (rig.tier._receive() or rig.tier._results):  # `rig.wait_until` would take the result
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        rig.tier.clear(b"a")
        assert rig.wait(unseen).is_good[1]
    assert left_in(tmp_path) == {2: 1}


def test_problem_of_opening_is_the_leaders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem) as raised, opened(tmp_path / "file"):
        pass
    assert "is not a directory" in raised.value.message
    assert "`tiers.disk.directory`" in (raised.value.hint or "")


def test_process_that_does_not_answer_while_it_opens_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "BEAT_LIMIT_S", 0.3)
    start, started = service.start_child, []

    def start_and_stop(module: str, what: str) -> tuple[subprocess.Popen[bytes], Channel]:
        child, channel = start(module, what)
        started.append(child)
        os.kill(child.pid, signal.SIGSTOP)
        return child, channel

    monkeypatch.setattr(service, "start_child", start_and_stop)
    with pytest.raises(UnresponsiveProcess, match=r"does not answer for 0\.3 s"), opened(tmp_path):
        pass
    assert has_ended(started[0].pid)


SLOW_TO_OPEN = """\
import sys

if "kvbm.tiers.disk.service.server" in sys.orig_argv:
    import time
    from kvbm.tiers.disk.storage import DiskStorage

    open_at_once = DiskStorage.open

    def open_slowly(*arguments, **keys):
        time.sleep(2)
        return open_at_once(*arguments, **keys)

    DiskStorage.open = open_slowly
"""


def test_process_sends_heartbeats_while_it_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_OPEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    receive, received = Channel.receive, []

    def recording(channel):
        received.extend(found := receive(channel))
        return found

    monkeypatch.setattr(Channel, "receive", recording)
    with opened(tmp_path / "disk") as rig:
        assert received.count(Opening()) >= 2
        assert all(rig.write([1], [1]).is_good)


class Beats:
    """A channel with a clock: a heartbeat arrives every `interval_s`, `count` times, and then the answer."""

    def __init__(self, interval_s: float, count: int) -> None:
        self.now = 0.0
        self.left = iter([[Opening()]] * count + [[Opened(Path(), 1, "", DiskStorageCounters(), 0, None)]])
        self.interval_s = interval_s

    def wait(self, timeout_s: float) -> None:
        self.now += self.interval_s

    def flush(self) -> None: ...

    def receive(self) -> list[object]:
        return next(self.left)

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("count", "opens"), [(25, True), (32, False)])
def test_heartbeats_extend_the_time_to_open_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, count: int, opens: bool
) -> None:
    beats = Beats(interval_s=10, count=count)
    monkeypatch.setattr(service, "time", beats)
    opening = DiskClient()
    opening._adopt(SimpleNamespace(pid=1), beats)  # type: ignore[arg-type]
    wait = partial(opening._wait_until_open, "disk", None, lambda: False)
    if opens:
        wait()
        assert opening.slot_count == 1
    else:
        with pytest.raises(UnresponsiveProcess, match="no progress for 300 s"):
            wait()


def test_progress_of_taking_space_is_told(tmp_path: Path) -> None:
    told = []
    with opened(tmp_path, progress=lambda done, total: told.append((done, total))):
        pass
    assert told[-1] == (16 * 16384 + 4096,) * 2


def test_log_of_the_child_is_the_leaders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as rig:
        rig.write([1], [0])
    (superblock,) = tmp_path.glob("*/*/superblock")
    superblock.write_text("damaged")
    caplog.set_level(logging.WARNING)
    with opened(tmp_path) as rig:
        rig.write([1], [0])
    assert any("superblock" in message and "is damaged" in message for message in caplog.messages)


def test_child_that_ends_fails_what_is_in_flight_and_all_that_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, close_s=1) as rig:
        rig.write([1], [0])
        os.kill(rig.tier.pid, signal.SIGSTOP)
        in_flight = [rig.start_write([2], [1], [1]), rig.start_read([1], [0], [2])]
        os.kill(rig.tier.pid, signal.SIGKILL)
        assert [rig.wait(ticket).is_good for ticket in in_flight] == [(False,), (False,)]
        assert rig.wait(in_flight[1]).damaged == ()
        assert not rig.tier.is_on
        assert rig.tier.counters.times_off == 1
        assert rig.write([3], [3]).is_good == (False,)
        assert rig.wait(rig.start_read([1], [0], [0])).error == "off: the disk process has exited"
        rig.tier.forget([0])
    assert len([message for message in caplog.messages if "has exited" in message]) == 1
    assert left_in(tmp_path) == {1: 0}


def test_process_that_does_not_answer_is_off_until_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as rig:
        rig.write(range(4), range(4))
        with stopped(rig.tier.pid):
            started = time.monotonic()
            tickets = [rig.start_read([1], [1], [1]), rig.start_write([9], [9], [9])]
            assert rig.tier.is_on
            rig.wait_until(lambda: not rig.tier.is_on)
            assert deadlines.ANSWER_LIMIT_S <= time.monotonic() - started < 5 * deadlines.ANSWER_LIMIT_S
            assert not rig.ended.keys() & set(tickets), "their host slots are not free yet"
            assert rig.tier.counters.times_off == 1
        assert [rig.wait(ticket).is_good for ticket in tickets] == [(True,), (True,)]
        assert rig.tier.is_on
        assert all(rig.read(range(4), range(4)).is_good)
        assert rig.tier.counters.times_off == 1
    assert [message for message in caplog.messages if "answers" in message] == [
        f"kvbm: the disk tier is off until its process {rig.tier.pid} answers or makes progress",
        f"kvbm: disk process {rig.tier.pid} answers again",
    ]
    assert left_in(tmp_path) == {0: 0, 1: 1, 2: 2, 3: 3, 9: 9}


@pytest.mark.parametrize("is_noticed", [False, True])
def test_close_does_not_wait_for_a_process_that_does_not_answer(tmp_path: Path, is_noticed: bool) -> None:
    with opened(tmp_path) as rig:
        rig.write([1], [0])
        pid = rig.tier.pid
        with stopped(rig.tier.pid):
            rig.start_read([1], [0], [0])
            if is_noticed:
                rig.wait_until(lambda: not rig.tier.is_on)
            started = time.monotonic()
            rig.tier.close(0.1)
            assert time.monotonic() - started < deadlines.ANSWER_LIMIT_S * (1 if is_noticed else 5), (
                "0.1 s, or 2 s, if not busy"
            )
            assert has_ended(pid)
    assert left_in(tmp_path) == {1: 0}


def test_leader_never_waits_for_a_child_that_does_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, block_count=4096) as rig:
        os.kill(rig.tier.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            for _ in range(1500):  # far more than a socket takes
                rig.tier.forget(list(range(4096)))
                assert rig.tier.poll() == []
            assert time.monotonic() - started < LIMIT_S
            assert rig.tier._channel.has_more_to_send()
        finally:
            os.kill(rig.tier.pid, signal.SIGCONT)
        assert all(rig.write([1], [0]).is_good)


LEADER = """
import sys, os, time
sys.path[:0] = [{tests!r}]
from pathlib import Path
from test_client import opened
with opened(Path({directory!r})) as rig:
    rig.write([1], [0])
    child = os.fork()  # an engine's worker that outlives it
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(rig.tier.pid, child, flush=True)
    while True:
        rig.write([2, 3], [1, 2])
"""


@pytest.mark.parametrize("has_worker", [True, False])
def test_child_ends_with_a_killed_leader_and_its_cache_is_free(tmp_path: Path, has_worker: bool) -> None:
    program = LEADER.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    leader = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child, worker = map(int, leader.stdout.readline().split())
    if not has_worker:
        os.kill(worker, signal.SIGKILL)
    time.sleep(0.05)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    try:
        deadline = time.monotonic() + 60
        while not has_ended(child):
            assert time.monotonic() < deadline, "the child outlives its leader"
            time.sleep(0.01)
        (cache,) = list_caches(tmp_path)
        lock = InstanceLock.take(cache.path)
        assert lock is not None
        lock.release()
    finally:
        if has_worker:
            os.kill(worker, signal.SIGKILL)
    with opened(tmp_path) as rig:
        assert rig.recovered().get(1) == 0


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """A disk process that has not exited yet, although its leader was killed."""
    program = LEADER.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as leader:
        child, worker = map(int, leader.stdout.readline().split())
        os.kill(worker, signal.SIGKILL)
        os.kill(child, signal.SIGSTOP)
        leader.kill()
    yield child
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def test_restarted_engine_waits_for_the_cache_of_its_predecessor(
    tmp_path: Path, orphan: int, caplog: pytest.LogCaptureFixture
) -> None:
    (cache,) = list_caches(tmp_path)
    assert cache.is_locked
    caplog.set_level(logging.INFO, "kvbm")

    def continue_when_awaited() -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while "waiting for the disk cache" not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.01)
        os.kill(orphan, signal.SIGCONT)

    waker = Thread(target=continue_when_awaited)
    waker.start()
    with opened(tmp_path) as rig:
        assert rig.tier.path == cache.path
        assert rig.recovered().get(1) == 0
    waker.join()
    assert f"waiting for the disk cache {cache.path}, whose engine has ended" in caplog.text
    assert f"the disk cache {cache.path} is free after " in caplog.text


def test_wait_for_a_predecessor_that_does_not_exit_is_bounded(
    tmp_path: Path, orphan: int, caplog: pytest.LogCaptureFixture
) -> None:
    (cache,) = list_caches(tmp_path)
    await_predecessor(tmp_path, cache.namespace, timeout_s=0.1, on_wait=lambda: None)
    assert f"the disk cache {cache.path} is still locked after 0.1 s: using another one" in caplog.text


def test_engine_does_not_wait_for_a_cache_that_another_engine_uses(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        await_predecessor(tmp_path, first.tier.path.parent.name, on_wait=pytest.fail)
        with opened(tmp_path) as second:
            assert second.tier.path != first.tier.path
            await_predecessor(tmp_path, first.tier.path.parent.name, on_wait=pytest.fail)


def test_cache_is_said_to_be_used_by_the_engine(tmp_path: Path) -> None:
    with opened(tmp_path):
        (cache,) = list_caches(tmp_path)
        assert cache.is_locked
        assert holder(cache.path) == os.getpid()


def test_signal_for_the_engines_group_does_not_reach_the_child(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        assert os.getpgid(rig.tier.pid) != os.getpgid(0)
        pid = rig.tier.pid
    assert has_ended(pid)
