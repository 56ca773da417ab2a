"""A process for disk I/O that is killed, and the one that takes its place."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_rig import HASH_BYTES, LIMIT_S, NAMESPACE, found_blocks, settings_for
from disk_rig import opened as opened_here
from test_client import ProcessRig, has_ended, host_memory, left_in, opened, stopped
from waiting import slept_s

from kvbm.child import deadlines
from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.tiers.disk.directory import reclaim_oldest
from kvbm.tiers.disk.orders import FoundBlocks
from kvbm.tiers.disk.service.client import DiskClient, DiskSupervisor
from kvbm_cli.store.caches import list_caches

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(deadlines, "FIRST_PAUSE_S", 0.05)


def named(directory: Path, **keys) -> Future:
    name: Future = Future()
    name.set_result((settings_for(directory, **keys), NAMESPACE))
    return name


@contextmanager
def lasting(directory: Path, **keys):
    with host_memory() as (infos, region):
        disk = DiskSupervisor(named(directory, **keys), infos, hash_bytes=HASH_BYTES)
        disk.await_opening()
        try:
            yield ProcessRig(disk, region)
        finally:
            disk.close(LIMIT_S)


def kill(rig) -> int:
    pid = rig.tier.process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def lose(rig) -> int:
    pid = kill(rig)
    rig.wait_until(lambda: rig.tier.losses)
    return pid


def next_one(rig, seen=()) -> DiskClient:
    """The process that is ready before the leader asks."""
    deadline = time.monotonic() + LIMIT_S
    # the next poll would take it
    while (found := rig.tier._next) is None or found in seen or has_ended(found.pid):
        assert time.monotonic() < deadline, "no next process"
        time.sleep(0.01)
    return found


def children() -> set[int]:
    """Of this process, whichever thread has started them."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in lists for pid in each.read_text().split()}


def come_back(rig, restarts=1):
    """What the next process has found, by number."""
    rig.wait_until(lambda: rig.tier.restarts == restarts)
    return {int.from_bytes(name[8:], "little"): slot for slot, name in zip(*found_blocks(rig.tier), strict=True)}


def test_killed_process_is_followed_by_one_that_has_its_blocks(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        assert all(rig.write(range(4), range(4)).is_good)
        pid = lose(rig)
        assert not rig.tier.is_on
        assert rig.tier.recovered() is None
        assert come_back(rig) == {0: 0, 1: 1, 2: 2, 3: 3}
        assert rig.tier.is_on
        assert not Path(f"/proc/{pid}").exists(), "it is no zombie"
        assert all(rig.read(range(4), range(4)).is_good)
        assert all(rig.write([7], [9]).is_good)
        assert rig.tier.counters.blocks_written == 5, "those of the first are counted too"
        assert rig.tier.counters.times_off == 1
    assert left_in(tmp_path) == {0: 0, 1: 1, 2: 2, 3: 3, 7: 9}


def test_tickets_in_flight_have_failed_when_the_loss_is_told(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        os.kill(rig.tier.process.pid, signal.SIGSTOP)
        in_flight = [rig.start_write([2], [1], [1]), rig.start_read([1], [0], [2])]
        lose(rig)
        assert [rig.ended[ticket].is_good for ticket in in_flight] == [(False,), (False,)]
        while_lost = rig.start_read([1], [0], [2])
        assert rig.wait(while_lost).is_good == (False,)
        assert come_back(rig)[1] == 0
        assert rig.read([1], [0]).is_good == (True,)


def test_end_is_noticed_and_made_up_for_while_nobody_asks(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        pid = kill(rig)
        next_one(rig)
        assert not rig.tier.is_on
        assert not Path(f"/proc/{pid}").exists()
        assert (rig.tier.poll(), rig.tier.losses, rig.tier.restarts) == ([], 1, 0)
        assert (rig.tier.poll(), rig.tier.losses, rig.tier.restarts) == ([], 1, 1)
        assert rig.tier.is_on


def test_several_that_end_unseen_do_no_harm(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        kill(rig)
        seen = []
        for _ in range(3):
            seen.append(next_one(rig, seen))
            os.kill(seen[-1].pid, signal.SIGKILL)
        rig.wait_until(lambda: rig.tier.is_on and rig.tier.process not in seen and rig.tier.restarts)
        assert rig.recovered() == {1: 0}
        assert rig.read([1], [0]).is_good == (True,)


def test_repeated_kills_make_the_pauses_longer_and_a_long_life_short_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lasting(tmp_path) as rig:
        for restarts in (1, 2, 3):
            kill(rig)
            come_back(rig, restarts)
        monkeypatch.setattr(deadlines, "LONGEST_PAUSE_S", 0.0)
        kill(rig)
        come_back(rig, 4)
    pauses = [message.rpartition(" in ")[2] for message in caplog.messages if "restarting in" in message]
    assert pauses == ["0.05 s", "0.1 s", "0.2 s", "0.05 s"]
    assert sum("was ended by signal 9" in message for message in caplog.messages) == 4


def test_next_process_takes_over_no_other_cache(tmp_path: Path) -> None:
    """It may hold what this engine has cleared in its own."""
    with opened(tmp_path) as mine, opened(tmp_path) as other:
        mine.write([1], [0])
        other.write([2], [0])
    with lasting(tmp_path) as rig:
        kill(rig)
        shutil.rmtree(rig.tier.process.path)
        assert come_back(rig) == {}
        assert len(list_caches(tmp_path)) == 2


def test_next_process_makes_a_cache_where_another_engine_has_taken_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "FIRST_PAUSE_S", 2.0)
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        own = rig.tier.process.path
        lose(rig)
        with opened(tmp_path) as other:
            assert other.tier.path == own
            assert come_back(rig) == {}
            assert rig.tier.process.path != own
            assert rig.write([2], [0]).is_good == (True,)


@pytest.mark.parametrize("persist", [True, False])
def test_clear_of_a_process_that_has_ended_is_kept(tmp_path: Path, persist: bool) -> None:
    with lasting(tmp_path, persist=persist) as rig:
        rig.write([1], [0])
        kill(rig)
        rig.tier.clear(timeout_s=60.0)
        rig.wait_until(lambda: rig.tier.losses)
        assert come_back(rig) == {}
        assert rig.write([2], [0]).is_good == (True,)


def test_clear_does_not_wait_for_a_process_that_does_not_answer(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1, 2], [0, 1])
        with stopped(rig.tier.process.pid):
            started = time.monotonic()
            with pytest.raises(EnvironmentProblem, match=r"not cleared durably yet: no answer in 2 s"):
                rig.tier.clear()
            assert time.monotonic() - started < 5 * deadlines.ANSWER_LIMIT_S
            for _ in range(3):
                started = time.monotonic()
                with pytest.raises(EnvironmentProblem, match="not cleared durably yet"):
                    rig.tier.clear()
                assert time.monotonic() - started < deadlines.ANSWER_LIMIT_S, "it is known not to answer"
            assert not rig.tier.is_on
        rig.wait_until(lambda: rig.tier.is_on)
        assert rig.tier.recovered() == FoundBlocks([], [], True)
        assert rig.write([3], [2]).is_good == (True,)
    assert left_in(tmp_path) == {3: 2}


def test_write_in_flight_at_a_clear_that_comes_late_is_cleared(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        with stopped(rig.tier.process.pid):
            in_flight = rig.start_write([2], [1], [1])
            with pytest.raises(EnvironmentProblem):
                rig.tier.clear(0.1)
        assert rig.wait(in_flight).is_good == (False,)
        rig.wait_until(lambda: rig.tier.is_on)
    assert left_in(tmp_path) == {}


def test_clear_that_was_not_durable_is_repeated_by_the_next_process(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        with stopped(rig.tier.process.pid):
            with pytest.raises(EnvironmentProblem, match="not cleared durably yet"):
                rig.tier.clear(0.1)
            kill(rig)
        assert come_back(rig) == {}
        rig.wait_until(lambda: rig.tier.is_on)
        assert rig.write([2], [0]).is_good == (True,)
        kill(rig)
        assert come_back(rig, 2) == {2: 0}, "it is repeated once"


def test_clear_that_was_not_durable_is_done_when_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "FIRST_PAUSE_S", LIMIT_S)
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        kill(rig)
        with pytest.raises(EnvironmentProblem, match="the disk process has exited"):
            rig.tier.clear(0.1)
    assert left_in(tmp_path) == {}


def test_a_killed_engine_whose_weights_have_changed_leaves_nothing_that_was_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "FIRST_PAUSE_S", LIMIT_S)
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        superblock = rig.tier.process.path / "superblock"
        with stopped(rig.tier.process.pid):
            with pytest.raises(EnvironmentProblem):
                rig.tier.clear(0.1, ends_persistence=True)
            rig.wait_until(lambda: not superblock.exists())
            kill(rig)
        rig.wait_until(lambda: rig.tier.losses)
        with opened(tmp_path) as following:
            assert following.tier.path == superblock.parent
            assert following.recovered() == {}


def test_clear_of_a_stopped_process_is_done_when_the_engine_ends(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        with stopped(rig.tier.process.pid):
            with pytest.raises(EnvironmentProblem):
                rig.tier.clear(0.1)
            started = time.monotonic()
            rig.tier.close(0.1)
            assert time.monotonic() - started < LIMIT_S
    assert left_in(tmp_path) == {}


def test_clear_that_another_engine_prevents_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "FIRST_PAUSE_S", 1.0)
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        lose(rig)
        with opened(tmp_path), pytest.raises(EnvironmentProblem, match="another process uses it"):
            rig.tier.clear(LIMIT_S)


def test_process_that_does_not_answer_is_used_again_and_has_all_its_blocks(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write(range(8), range(8))
        pid = rig.tier.process.pid
        with stopped(rig.tier.process.pid):
            ticket = rig.start_read([1, 2], [1, 2], [1, 2])
            rig.wait_until(lambda: not rig.tier.is_on)
        assert rig.wait(ticket).is_good == (True, True)
        assert rig.tier.is_on
        assert (rig.tier.process.pid, rig.tier.losses, rig.tier.restarts) == (pid, 0, 0)
    assert left_in(tmp_path) == {number: number for number in range(8)}


@pytest.mark.parametrize("is_killed_first", [True, False])
def test_clear_that_ends_persistence_holds_for_every_further_process(tmp_path: Path, is_killed_first: bool) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        if is_killed_first:
            kill(rig)
        rig.tier.clear(ends_persistence=True)
        rig.wait_until(lambda: is_killed_first <= rig.tier.losses)
        if is_killed_first:
            assert come_back(rig) == {}
        assert rig.write([2], [0]).is_good == (True,)
        kill(rig)
        assert come_back(rig, 1 + is_killed_first) == {}
        assert rig.write([3], [0]).is_good == (True,)
    assert left_in(tmp_path) == {}


def test_clear_reaches_a_process_that_nobody_has_seen(tmp_path: Path) -> None:
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        kill(rig)
        next_one(rig)
        rig.tier.clear()
        assert come_back(rig) == {}
    assert left_in(tmp_path) == {}


def test_leader_does_not_wait_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is opened, however long that takes, and not when opening fails."""
    goes_on = threading.Event()
    outcomes = iter([EnvironmentProblem("no room"), EnvironmentProblem("no room"), None])
    with lasting(tmp_path) as rig:
        open_next = rig.tier._open_next

        def slowly() -> DiskClient:
            assert goes_on.wait(LIMIT_S)
            if (error := next(outcomes, None)) is not None:
                raise error
            return open_next()

        rig.tier._open_next = slowly
        rig.write([1], [0])
        lose(rig)
        time.sleep(0.2)
        started_s = slept_s()
        for _ in range(100):
            assert rig.tier.poll() == []
            rig.tier.process.forget([1])
        assert slept_s() - started_s < LIMIT_S / 6
        goes_on.set()
        assert come_back(rig) == {1: 0}


def test_failure_to_open_is_told_once_and_its_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with lasting(tmp_path / "disk") as rig:
        rig.write([1], [0])
        (tmp_path / "disk").rename(tmp_path / "aside")
        (tmp_path / "disk").write_text("a file now")
        kill(rig)
        rig.wait_until(lambda: any("is off until it can be opened" in message for message in caplog.messages))
        time.sleep(1.0)  # more attempts
        assert rig.tier.poll() == []
        assert rig.tier.poll() == []
        assert not rig.tier.is_on
        (tmp_path / "disk").unlink()
        (tmp_path / "aside").rename(tmp_path / "disk")
        assert come_back(rig) == {1: 0}
    assert len([message for message in caplog.messages if "is off until it can be opened" in message]) == 1
    assert caplog.messages[-1] == "kvbm: the disk tier is open again"


def test_removed_directory_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with lasting(tmp_path / "disk") as rig:
        rig.write([1], [0])
        shutil.rmtree(tmp_path / "disk")
        rig.wait_until(lambda: rig.tier.losses)
        assert come_back(rig) == {}
        assert rig.write([2], [0]).is_good == (True,)
    assert any("arena was deleted" in message for message in caplog.messages)
    assert left_in(tmp_path / "disk") == {2: 0}


def test_directory_is_not_made_again_on_another_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where it was a mount that has gone: what lies below has no room for it, and would be filled."""
    caplog.set_level(logging.WARNING)
    point = tmp_path / "mount"
    point.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], capture_output=True).returncode:
        pytest.skip("needs to mount")
    with lasting(point / "disk", o_direct=False) as rig:
        subprocess.run(["umount", "--lazy", point], check=True)
        rig.wait_until(lambda: rig.tier.losses)
        time.sleep(0.5)
        rig.wait_until(lambda: any("different file system" in message for message in caplog.messages))
        assert not rig.tier.is_on
        assert not list(point.iterdir())


def test_close_while_the_next_one_is_waited_for_or_opened_leaves_none(tmp_path: Path) -> None:
    before = children()
    for pause_s in (0.0, 0.02, 0.08, 0.3):
        with lasting(tmp_path) as rig:
            rig.write([1], [0])
            kill(rig)
            time.sleep(pause_s)
        require_no_process_is_left(rig, tmp_path, before)


def test_close_leaves_no_process_that_was_opened_and_never_used(tmp_path: Path) -> None:
    before = children()
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        kill(rig)
        next_one(rig)
    require_no_process_is_left(rig, tmp_path, before)


def require_no_process_is_left(rig: ProcessRig, directory: Path, before: set[int]) -> None:
    assert not rig.tier._thread.is_alive()
    deadline = time.monotonic() + LIMIT_S
    while not all(has_ended(pid) for pid in children() - before):
        assert time.monotonic() < deadline, "a process outlives its disk"
        time.sleep(0.01)
    (cache,) = list_caches(directory)
    assert not cache.is_locked


def test_process_with_io_whose_end_is_unknown_is_replaced_by_one_with_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tickets end when it has ended, and with it all its I/O."""
    orders = tmp_path / "orders"
    orders.write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "embedded" / "disk_faults"))
    monkeypatch.setenv("KVBM_TEST_DISK_FAULTS", str(orders))
    with lasting(tmp_path / "disk") as rig:
        rig.write([1, 2], [0, 1])
        pid, chosen, open_next = rig.tier.process.pid, [], rig.tier._open_next

        def note() -> DiskClient:
            chosen.append(rig.tier._uses_threads)
            return open_next()

        rig.tier._open_next = note
        orders.write_text('{"error": "lost", "for": "read"}')
        result = rig.wait(rig.start_read([1], [0], [0]))
        assert (result.is_good, result.damaged) == ((False,), ())
        assert has_ended(pid)
        orders.write_text("{}")
        assert come_back(rig) == {1: 0, 2: 1}
        assert chosen == [True]
        assert rig.read([1, 2], [0, 1]).is_good == (True, True)


def hold_a_segment(pipe) -> None:
    layout = BlockLayout.block_contiguous(block_count=2, block_bytes=8192)
    segment = Segment.create(rank=1, layout=layout, slot_count=16)
    pipe.send(segment.info)
    pipe.recv()


def test_a_process_for_host_memory_that_is_gone_does_not_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of a rank that has ended: the process that maps it goes on, and a next one could not map it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rank = context.Process(target=hold_a_segment, args=(theirs,))
    rank.start()
    infos = [ours.recv()]
    region = Region.map(infos)
    disk = DiskSupervisor(named(tmp_path), infos, hash_bytes=HASH_BYTES)
    disk.await_opening()
    rig = ProcessRig(disk, region)
    rig.write([1, 2], [0, 1])
    rank.kill()
    rank.join()
    assert rig.read([1, 2], [0, 1]).is_good == (True, True)
    kill(rig)
    rig.wait_until(lambda: any("cannot map the segment of rank 1" in message for message in caplog.messages))
    time.sleep(0.5)  # more attempts
    rig.tier.poll()
    assert not rig.tier.is_on
    disk.close(LIMIT_S)
    region.close()
    assert len([message for message in caplog.messages if "cannot map the segment" in message]) == 1
    with opened_here(tmp_path, shard_bytes=(8192,)) as rig:
        assert rig.recovered() == {1: 0, 2: 1}


@contextmanager
def later(directory: Path):
    """A disk whose blocks have no name yet, and what names them."""
    name: Future = Future()
    with host_memory() as (infos, region):
        disk = DiskSupervisor(name, infos, hash_bytes=HASH_BYTES)
        try:
            yield ProcessRig(disk, region), lambda: name.set_result((settings_for(directory), NAMESPACE))
        finally:
            disk.close(LIMIT_S)


def test_a_disk_that_gets_its_name_later_has_the_blocks_of_that_name(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write([1, 2], [0, 1])
    before = children()
    with later(tmp_path) as (rig, name):
        assert (rig.tier.poll(), rig.tier.is_on, rig.tier.slot_count) == ([], False, 0)
        assert rig.tier.recovered() is None
        assert children() == before
        name()
        rig.wait_until(lambda: rig.tier.is_on)
        assert (rig.tier.losses, rig.tier.restarts, rig.tier.counters.times_off) == (0, 0, 0)
        assert come_back(rig, restarts=0) == {1: 0, 2: 1}
        assert rig.read([1, 2], [0, 1]).is_good == (True, True)
        assert all(rig.write([3], [2]).is_good)
        kill(rig)
        assert come_back(rig) == {1: 0, 2: 1, 3: 2}


def test_a_clear_before_the_name_is_known_is_done_before_any_block_is_served(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write([1], [0])
    with later(tmp_path) as (rig, name):
        with pytest.raises(EnvironmentProblem, match="has not started yet"):
            rig.tier.clear()
        name()
        rig.wait_until(lambda: rig.tier.is_on)
        assert come_back(rig, restarts=0) == {}
    assert left_in(tmp_path) == {}


def test_a_disk_that_never_gets_its_name_ends_at_once(tmp_path: Path) -> None:
    with later(tmp_path) as (rig, _):
        began_s = time.monotonic()
        rig.tier.close(LIMIT_S)
        assert time.monotonic() - began_s < LIMIT_S
    assert list(tmp_path.iterdir()) == []


def test_the_cache_of_a_living_engine_is_not_removed_while_it_has_no_disk_process(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(deadlines, "FIRST_PAUSE_S", LIMIT_S)
    with lasting(tmp_path) as rig:
        rig.write([1], [0])
        lose(rig)
        (cache,) = list_caches(tmp_path)
        assert not cache.is_locked
        assert not reclaim_oldest(tmp_path)
    with opened(tmp_path) as rig:  # of the next engine, which ends
        assert rig.recovered() == {1: 0}
    assert reclaim_oldest(tmp_path)
