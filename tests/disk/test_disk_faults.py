"""Faults in service: tickets end as failed, nothing is raised, and a disk that works again is used again."""

import ctypes
import errno
import os
import shutil
import sqlite3
import threading
import time

import numpy as np
import pytest
from disk_rig import HASTY, LIMIT_S, QUICK, assembled, left_in, make_hash, opened

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.io import threads
from kvbm.tiers.disk.io.threads import IoNotEnded, ThreadsIO
from kvbm.tiers.disk.orders import Read

ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]


class Faulty:
    """A method of a real part, which raises, or holds its caller until `release`, as long as it is told to."""

    def __init__(self, call):
        self.call = call
        self._released = threading.Event()
        self.error = None
        self.is_for = lambda *arguments: True
        self.is_holding = False
        self.held = threading.Semaphore(0)
        self.calls = 0

    def __call__(self, *arguments, **keys):
        self.calls += 1
        if self.is_holding and self.is_for(*arguments):
            self.held.release()
            assert self._released.wait(LIMIT_S)
        if self.error is not None and self.is_for(*arguments):
            raise self.error
        return self.call(*arguments, **keys)

    def hold(self):
        self._released.clear()
        self.is_holding = True

    def wait_until_held(self):
        assert self.held.acquire(timeout=LIMIT_S)

    def release(self):
        self.is_holding = False
        self.error = None
        self._released.set()


class FaultyIO:
    name = "faulty"
    piece_bytes = ThreadsIO.piece_bytes

    def __init__(self, io):
        self.read = Faulty(io.read)
        self.write = Faulty(io.write)
        self.close = io.close


class FaultyIndex:
    """The index, of which changes and clears may fail."""

    def __init__(self, index):
        self._index = index
        self.change = Faulty(index.change)
        self.clear = Faulty(index.clear)
        self.prove = Faulty(index.prove)

    def __getattr__(self, name):
        return getattr(self._index, name)


class Faults:
    """Where a tier can be made to fail."""

    def put_into(self, parts):
        self.io = FaultyIO(parts["io"])
        arena = parts["instance"].arena
        self.sync = arena.sync = Faulty(arena.sync)
        if parts["instance"].index is not None:
            self.index = parts["instance"].index = FaultyIndex(parts["instance"].index)
        return {**parts, "io": self.io}


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def rig(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into, host_slots=32) as rig:
        yield rig


@pytest.fixture
def hasty_rig(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into, host_slots=32, limits=HASTY) as rig:
        yield rig


def os_error(number):
    return OSError(number, os.strerror(number))


def sqlite_error(message, code):
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("number", ERRORS)
def test_failed_write_is_a_failed_ticket_and_no_row(tmp_path, faults, number):
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write([1], [1])
        faults.io.write.error = os_error(number)
        result = rig.write([2, 3], [1, 2])
        assert result.is_good == (False, False)
        assert os.strerror(number) in result.error
        assert rig.tier.counters.io_errors[errno.errorcode[number]] > 0
        faults.io.write.release()
    assert left_in(tmp_path) == {}


@pytest.mark.parametrize("number", ERRORS)
def test_failed_read_is_a_failed_ticket(rig, faults, number):
    rig.write(range(4), range(4))
    faults.io.read.error = os_error(number)
    result = rig.read(range(2), range(2))
    assert result.is_good == (False, False)
    assert os.strerror(number) in result.error
    faults.io.read.release()
    rig.wait_until(lambda: rig.tier.health.is_on)
    assert rig.read(range(4), range(4)).is_good == (True,) * 4


@pytest.mark.parametrize("number", ERRORS)
def test_failed_read_proves_nothing_about_its_blocks(tmp_path, faults, number):
    """However often it fails, as long as nothing else can be read."""
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write(range(4), range(4))
        faults.io.read.error = os_error(number)
        results = [rig.read([slot], [slot]) for slot in (0, 1, 0, 1, 0)]
        results.append(rig.read(range(4), range(4)))
        assert [result.damaged for result in results] == [()] * 6
        faults.io.read.release()
        rig.wait_until(lambda: rig.tier.health.is_on)
        assert rig.read(range(4), range(4)).is_good == (True,) * 4


def test_only_what_is_wrong_on_disk_is_damaged(rig, faults):
    rig.write(range(4), range(4))
    assert rig.read([0, 9, 2, 8], range(4)).damaged == (1, 3)
    assert rig.tier.counters.checksum_misses == 2
    os.truncate(rig.tier.path / "arena", 3 * rig.block_bytes)
    result = rig.read(range(4), range(4))
    assert (result.is_good, result.damaged) == ((True, True, True, False), (3,))


def test_block_that_cannot_be_read_while_others_can_is_damaged(rig, faults):
    rig.write(range(4), range(4))
    faults.io.read.is_for = lambda runs: runs[0].offset == 0
    faults.io.read.error = os_error(errno.EIO)
    assert rig.read([0], [0]).damaged == ()
    assert rig.read([0], [0]).damaged == (), "the disk may have failed as a whole"
    assert rig.read([1], [1]).is_good == (True,)
    assert rig.read([0], [0]).damaged == (0,)


def test_block_that_could_be_read_meanwhile_is_not_damaged(rig, faults):
    rig.write(range(4), range(4))
    faults.io.read.is_for = lambda runs: runs[0].offset == 0
    for _ in range(3):
        faults.io.read.error = os_error(errno.EIO)
        assert rig.read([0], [0]).damaged == ()
        faults.io.read.error = None
        assert rig.read([0, 1], [0, 1]).is_good == (True, True)


def test_block_whose_host_memory_is_lost_during_the_read_is_not_damaged(rig, faults):
    """As when the rank of that memory ends: it reads as zeros."""
    rig.write(range(4), range(4))
    real = faults.io.read.call

    def read_and_lose(runs):
        real(runs)
        rig.wipe([1])

    faults.io.read.call = read_and_lose
    result = rig.read(range(4), range(4))
    assert (result.is_good, result.damaged) == ((True, False, True, True), ())
    assert result.error == "the host memory was lost during the read"
    assert rig.tier.counters.checksum_misses == 0


def test_reads_that_make_no_progress_are_reported(rig, faults):
    rig.write(range(8), range(8))
    assert rig.tier.reads_stuck_since() is None
    faults.io.write.hold()
    rig.start_write([9], [9], [9])
    faults.io.write.wait_until_held()
    assert rig.tier.reads_stuck_since() is None, "no read waits for a write that hangs in one of two threads"
    faults.io.read.hold()
    started_s = time.monotonic()
    tickets = [rig.start_read([number], [number], [number]) for number in range(3)]
    since_s = rig.tier.reads_stuck_since()
    assert started_s <= since_s <= time.monotonic()
    assert rig.tier.reads_stuck_since() == since_s
    faults.io.write.release()
    faults.io.read.release()
    for ticket in tickets:
        rig.wait(ticket)
    assert rig.tier.reads_stuck_since() is None


def test_bad_place_costs_only_the_block_in_it(rig, faults):
    rig.write(range(16), range(16))
    bad = 9 * rig.block_bytes
    faults.io.read.is_for = lambda runs: any(
        run.offset <= bad < run.offset + sum(len(buffer) for buffer in run.buffers) for run in runs
    )
    faults.io.read.error = os_error(errno.EIO)
    assert rig.read(range(16), range(16)).is_good == tuple(number != 9 for number in range(16))


def test_failed_flush_is_a_failed_ticket_and_no_row(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        faults.sync.error = os_error(errno.EIO)
        assert rig.write([1, 2], [1, 2]).is_good == (False, False)
        faults.sync.release()
    assert left_in(tmp_path) == {}


def test_rows_that_cannot_be_deleted_keep_their_bytes(rig, faults):
    rig.write([1, 2], [1, 2])
    faults.index.change.error = sqlite_error("disk I/O error", sqlite3.SQLITE_IOERR)
    writes = faults.io.write.calls
    assert rig.write([3], [1]).is_good == (False,)
    assert faults.io.write.calls == writes
    assert rig.tier.counters.io_errors["index"] == 1
    assert rig.read([1, 2], [1, 2]).is_good == (True, True)


def test_what_could_not_be_forgotten_is_forgotten_later(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write(range(4), range(4))
        faults.index.change.error = sqlite_error("database or disk is full", sqlite3.SQLITE_FULL)
        rig.tier.forget([1, 2])
        rig.wait_until(lambda: rig.tier.counters.io_errors["index"] > 0)
        faults.index.change.release()
    assert left_in(tmp_path) == {0: 0, 3: 3}


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_counts_are_continued(tmp_path, monkeypatch, call):
    real = getattr(os, call)

    def short(fd, buffers, offset):
        return real(fd, [buffers[0][: max(4096, len(buffers[0]) // 2)]], offset)

    monkeypatch.setattr(ThreadsIO, "_take_aio", lambda self: None)  # which would move everything without `call`
    monkeypatch.setattr(threads.os, call, short)
    with opened(tmp_path) as rig:
        assert all(rig.write(range(8), range(8)).is_good)
        assert all(rig.read(range(8), range(8)).is_good)


def test_read_that_ends_early_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    fd = os.open(path, os.O_RDONLY)
    io = ThreadsIO(fd)
    with pytest.raises(threads.EndOfArena):
        io.read([threads.IoRun(0, [np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)])])
    os.close(fd)


def test_more_buffers_than_a_system_call_takes(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    io = ThreadsIO(fd)
    written = np.arange(3000 * 8, dtype=np.uint32).view(np.uint8).reshape(3000, 32)
    io.write([threads.IoRun(64, list(written))])
    found = np.zeros_like(written)
    io.read([threads.IoRun(64, list(found))])
    assert np.array_equal(written, found)
    os.close(fd)


def test_what_a_thread_dies_of_ends_its_ticket_only(rig, faults):
    rig.write([1], [1])
    for error in (SystemExit(3), KeyboardInterrupt(), MemoryError()):
        faults.io.read.error = error
        assert rig.read([1], [1]).is_good == (False,)
        faults.io.read.release()
        rig.wait_until(lambda: rig.tier.health.is_on)
    assert rig.read([1], [1]).is_good == (True,)
    for error in (SystemExit(3), KeyboardInterrupt()):
        faults.sync.error = error
        assert rig.write([2], [2]).is_good == (False,)
        faults.sync.release()
        rig.wait_until(lambda: rig.tier.health.is_on)
    assert rig.write([2], [2]).is_good == (True,)


def test_a_thread_that_dies_ends_the_process(rig):
    """The next one opens the same cache; until then, no order hangs."""
    rig.write(range(4), range(4))
    threads = {thread for thread in threading.enumerate() if thread.name == "kvbm-disk"}
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    for number in range(4):
        rig.start_read([number], [number], [number])  # wakes them
    rig.wait_until(lambda: rig.tier.health.has_lost_io)


# off and on


def test_repeated_errors_turn_it_off_and_a_probe_that_works_on_again(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write(range(4), range(4))
        faults.io.read.error = faults.io.write.error = os_error(errno.EIO)
        for _ in range(QUICK.errors_until_off):
            rig.read([0], [0])
        assert not rig.tier.health.is_on
        assert "EIO" in rig.tier.off_because or "Input/output" in rig.tier.off_because
        calls = faults.io.write.calls
        tickets = [rig.start_read([1], [1], [1]), rig.start_write([9], [2], [9])]
        results = rig.tier.poll()  # at once
        assert [(result.ticket, result.is_good) for result in results] == [(ticket, (False,)) for ticket in tickets]
        rig.wait_until(lambda: faults.io.write.calls > calls + 2)  # probes
        assert not rig.tier.health.is_on
        faults.io.read.release()
        faults.io.write.release()
        rig.wait_until(lambda: rig.tier.health.is_on)
        assert rig.read(range(4), range(4)).is_good == (True,) * 4
        assert rig.write([9], [9]).is_good == (True,)
        assert rig.tier.counters.times_off == 1
    with opened(tmp_path) as rig:
        assert set(rig.recovered()) == {0, 1, 2, 3, 9}


def test_errors_with_success_between_them_do_not_turn_it_off(rig, faults):
    rig.write(range(2), range(2))
    faults.io.read.is_for = lambda runs: runs[0].offset == 0
    faults.io.read.error = os_error(errno.EIO)
    for _ in range(3 * QUICK.errors_until_off):
        rig.read([0], [0])
        assert rig.read([1], [1]).is_good == (True,)
    assert rig.tier.health.is_on


def test_index_that_fails_again_and_again_turns_it_off(rig, faults):
    faults.index.change.error = faults.index.prove.error = sqlite_error("readonly", sqlite3.SQLITE_READONLY)
    for number in range(QUICK.errors_until_off):
        rig.write([number], [number])
    assert not rig.tier.health.is_on
    time.sleep(3 * QUICK.probe_interval_s)
    assert not rig.tier.health.is_on
    faults.index.change.release()
    faults.index.prove.release()
    rig.wait_until(lambda: rig.tier.health.is_on)


def test_index_that_is_found_damaged_while_off_is_replaced(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write(range(4), range(4))
        faults.io.read.error = os_error(errno.EIO)
        faults.index.prove.error = sqlite3.DatabaseError("malformed")
        for _ in range(QUICK.errors_until_off):
            rig.read([0], [0])
        assert not rig.tier.health.is_on
        faults.io.read.release()
        rig.wait_until(lambda: rig.tier.health.is_on)
        assert rig.tier.counters.damaged_indexes == 1
        assert all(rig.read(range(4), range(4)).is_good)


def test_removed_directory_turns_it_off_for_good(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write(range(4), range(4))
        shutil.rmtree(tmp_path / "000102030405060708090a0b0c0d0e0f")
        rig.wait_until(lambda: not rig.tier.health.is_on)
        assert rig.read([1], [1]).is_good == (False,)
        time.sleep(3 * QUICK.probe_interval_s)
        assert not rig.tier.health.is_on
        rig.clear()
    assert left_in(tmp_path) == {}


# a disk that hangs


def test_hanging_read_holds_its_ticket_and_nothing_else(rig, faults):
    rig.write(range(8), range(8))
    faults.io.read.is_for = lambda runs: runs[0].offset == 0
    faults.io.read.hold()
    hanging = rig.start_read([0], [0], [0])
    faults.io.read.wait_until_held()
    assert rig.wait(rig.start_read([1, 2], [1, 2], [1, 2])).is_good == (True, True)
    assert rig.wait(rig.start_write([9], [3], [9])).is_good == (True,)
    assert hanging not in rig.ended
    faults.io.read.release()
    assert rig.wait(hanging).is_good == (True,)


def test_disk_that_hangs_turns_it_off_until_it_moves(hasty_rig, faults):
    rig = hasty_rig
    rig.write(range(8), range(8))
    faults.io.read.hold()
    hanging = [rig.start_read([number], [number], [number]) for number in range(2)]
    for _ in hanging:
        faults.io.read.wait_until_held()
    waiting = rig.start_read([5], [5], [5])
    started = time.monotonic()
    assert rig.wait(waiting).is_good == (False,)  # behind them, on a disk that is then off
    assert time.monotonic() - started >= 0.8 * HASTY.stall_s
    assert not rig.tier.health.is_on
    assert rig.wait(rig.start_write([6], [6], [6])).is_good == (False,)
    time.sleep(3 * HASTY.probe_interval_s)
    assert not rig.tier.health.is_on  # although a probe would work
    assert not rig.ended.keys() & set(hanging)
    faults.io.read.release()
    assert all(rig.wait(ticket).is_good == (True,) for ticket in hanging)
    rig.wait_until(lambda: rig.tier.health.is_on)
    assert rig.read([5], [5]).is_good == (True,)


def test_hanging_flush_lets_reads_pass_and_waiting_writes_end(hasty_rig, faults):
    rig = hasty_rig
    rig.write(range(8), range(8))
    faults.sync.hold()
    hanging = rig.start_write([20], [20], [10])
    faults.sync.wait_until_held()
    assert rig.read([1], [1]).is_good == (True,)
    waiting = rig.start_write([21], [21], [11])
    assert rig.wait(waiting).is_good == (False,)
    assert not rig.tier.health.is_on
    assert hanging not in rig.ended
    with pytest.raises(EnvironmentProblem, match="not cleared durably"):
        rig.clear(limit_s=1.0)
    assert not rig.tier.health.is_on
    faults.sync.release()
    rig.wait(hanging)  # whose rows the clear deletes
    rig.wait_until(lambda: rig.tier.health.is_on)


def test_close_does_not_wait_for_a_disk_that_hangs(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write([1], [1])
        faults.io.read.hold()
        hanging = rig.start_read([1], [1], [1])
        faults.io.read.wait_until_held()
        started = time.monotonic()
        rig.tier.close(0.2)
        assert time.monotonic() - started < 5
        with opened(tmp_path) as other:  # it is still locked
            assert other.tier.path != instance_of_first(tmp_path, other)
        faults.io.read.release()
        assert rig.wait(hanging).is_good == (True,)
    with opened(tmp_path) as rig:
        assert len(rig.recovered()) in (0, 1)


def instance_of_first(directory, other):
    (path,) = [lock.parent for lock in directory.glob("*/*/lock") if lock.parent != other.tier.path]
    return path


# clear


def test_clear_that_fails_says_so_and_keeps_the_tier_off_until_it_is_done(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        rig.write(range(4), range(4))
        faults.index.clear.error = sqlite_error("database or disk is full", sqlite3.SQLITE_FULL)
        with pytest.raises(EnvironmentProblem, match="disk is full"):
            rig.clear()
        time.sleep(3 * QUICK.probe_interval_s)
        assert not rig.tier.health.is_on
        faults.index.clear.release()
        rig.wait_until(lambda: rig.tier.health.is_on)
        assert rig.write([9], [9]).is_good == (True,)
    assert left_in(tmp_path) == {9: 9}


@pytest.mark.parametrize("where", ["write", "sync"])
def test_clear_forgets_a_write_wherever_it_is(tmp_path, faults, where):
    with assembled(tmp_path, change=faults.put_into, host_slots=8) as rig:
        part = faults.sync if where == "sync" else faults.io.write
        part.hold()
        running = rig.start_write([1, 2], [1, 2], [1, 2], [b"a", b"b"])
        part.wait_until_held()
        queued = rig.start_write([3], [3], [3], [b"a"])
        cleared = threading.Thread(target=rig.clear, args=(b"a",))
        cleared.start()
        time.sleep(0.05)
        part.release()
        cleared.join()
        assert rig.wait(running).is_good[1]
        assert rig.wait(queued).is_good == (False,)
    assert left_in(tmp_path) == {2: 2}


def test_forgotten_slot_of_a_running_write_has_no_row(tmp_path, faults):
    with assembled(tmp_path, change=faults.put_into) as rig:
        faults.io.write.hold()
        running = rig.start_write([1, 2], [1, 2], [1, 2])
        faults.io.write.wait_until_held()
        rig.tier.forget([1])
        time.sleep(0.05)
        faults.io.write.release()
        assert rig.wait(running).is_good == (False, True)
    assert left_in(tmp_path) == {2: 2}


def test_reads_go_before_writes_that_wait(rig, faults):
    rig.write(range(8), range(8))
    order = []
    real_read, real_write = faults.io.read.call, faults.io.write.call
    faults.io.read.call = lambda runs: (order.append("read"), real_read(runs))
    faults.io.write.call = lambda runs: (order.append("write"), real_write(runs))
    faults.io.write.hold()
    writes = [rig.start_write([20 + slot], [20 + slot], [slot]) for slot in range(8)]
    for _ in range(2):  # both threads
        faults.io.write.wait_until_held()
    reads = [rig.start_read([number], [number], [number]) for number in (4, 5)]
    rig.wait_until(lambda: not rig.tier._index_thread._commands)
    faults.io.write.release()
    for ticket in (*writes, *reads):
        rig.wait(ticket)
    assert order.index("read") <= 2
    assert [rig.ended[ticket].is_good for ticket in writes] == [(True,)] * 8


def test_neighbours_on_disk_are_one_io(rig, faults):
    runs = []
    real = faults.io.write.call
    faults.io.write.call = lambda some: (runs.extend(some), real(some))
    rig.wait(rig.start_write(range(4), [7, 2, 30, 5], [6, 5, 8, 7]))  # two threads, two pieces
    assert sorted((run.offset // rig.block_bytes, len(run.buffers)) for run in runs) == [(5, 4), (7, 4)]


def test_hash_of_another_block_does_not_fit(rig):
    rig.write([1], [1])
    ticket = rig.last_ticket = rig.last_ticket + 1
    rig.tier.submit(Read(ticket, [make_hash(2)], [1], [0]))
    assert rig.wait(ticket).is_good == (False,)


def test_host_slots_that_have_lost_their_bytes_leave_no_row(tmp_path, faults):
    """As when a rank ends and its memory reads as zeros: checked after the payload was read, before the rows."""
    order = []
    intact_generation = 7

    def slots_carry(host_slots, generations):
        order.append("checked")
        return (host_slots, generations) == ([0], [intact_generation])

    with assembled(tmp_path, change=faults.put_into, slots_carry=slots_carry) as rig:
        real_write, real_change = faults.io.write.call, faults.index.change.call
        faults.io.write.call = lambda runs: (order.append("payload"), real_write(runs))
        faults.index.change.call = lambda rows, *more: (order.append(len(rows)), real_change(rows, *more))
        for generation in (intact_generation - 1, intact_generation):
            rig.fill(0, make_hash(1))
            rig.last_ticket += 1
            rig.tier.submit(rig.order_write([make_hash(1)], [0], [4], generation=generation))
            assert rig.wait(rig.last_ticket).is_good == (generation == intact_generation,)
            rig.wait_until(lambda: rig.tier._index_thread.busy_since() is None)
    assert [step for step in order if step != 0] == ["payload", "checked", "payload", "checked", 1]
    assert left_in(tmp_path) == {1: 4}


@pytest.mark.parametrize("kind", ["read", "write"])
def test_ticket_whose_end_cannot_be_detected_stays_open(tmp_path, faults, kind):
    """Its host slots may still be written to; only the end of the process ends it."""
    with assembled(tmp_path, change=faults.put_into, limits=HASTY) as rig:
        rig.write(range(4), range(4))
        call = getattr(faults.io, kind)
        call.is_for = lambda runs: runs[0].offset == 0
        call.error = IoNotEnded("lost")
        lost = rig.start_read([0], [0], [0]) if kind == "read" else rig.start_write([9], [0], [0])
        rig.wait_until(lambda: rig.tier.health.has_lost_io)
        assert rig.tier.off_because == "lost"
        assert rig.wait(rig.start_read([1], [1], [1])).is_good == (False,)
        time.sleep(3 * HASTY.probe_interval_s)
        rig.tier.poll()
        assert lost not in rig.ended
        rig.tier._index_thread._in_flight.clear()  # so that it can be closed
    with opened(tmp_path) as rig:
        assert set(rig.recovered()) >= {1, 2, 3}
