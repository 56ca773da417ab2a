"""The contract of BlockIO, for system calls and for NIXL; and by a fake that notes it, what NIXL is never asked."""

from __future__ import annotations

import errno
import importlib.util
import mmap
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from fake_nixl import FakeAgent, FakeNixl, nixlBackendError

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.io.nixl import MAX_DESCRIPTORS, NixlIO
from kvbm.tiers.disk.io.threads import BlockIO, EndOfArena, IoNotEnded, IoRun, ThreadsIO

BLOCK = 8192
COUNT = 64
HAS_NIXL = importlib.util.find_spec("nixl_cu13") or importlib.util.find_spec("nixl_cu12")
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: `pip install 'kvbm-cli[nixl]'`")
MakeIO = Callable[[int, list[np.ndarray]], BlockIO]


def rows(count: int = COUNT) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, count * BLOCK), np.uint8).reshape(count, BLOCK)


def pattern(count: int = COUNT) -> np.ndarray:
    made = rows(count)
    made[:] = np.random.default_rng(7).integers(0, 256, made.shape, np.uint8)
    return made


def nixl_of(queue: str) -> MakeIO:
    return lambda fd, memory: NixlIO(fd, memory, queue=queue)


@pytest.fixture(
    params=["threads", pytest.param("uring", marks=needs_nixl), pytest.param("aio", marks=needs_nixl), "fake"]
)
def make_io(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeIO:
    if request.param == "threads":
        return lambda fd, memory: ThreadsIO(fd)
    if request.param == "fake":
        use_fake(monkeypatch, FakeNixl())
    elif request.param == "uring" and not allows_uring():
        pytest.skip("the kernel or a filter of system calls forbids io_uring here")
    return nixl_of(request.param)


@pytest.fixture(params=["O_DIRECT", "page cache"])
def fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if request.param == "O_DIRECT" else 0)
    opened = os.open(tmp_path / "arena", flags, 0o600)
    os.truncate(opened, COUNT * BLOCK)
    yield opened
    os.close(opened)


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNixl]:
    fake = FakeNixl()
    use_fake(monkeypatch, fake)
    yield fake
    assert fake.misuse == []


def use_fake(monkeypatch: pytest.MonkeyPatch, fake: FakeNixl) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", fake.api)
    monkeypatch.setitem(sys.modules, "nixl_cu13._bindings", fake.bindings)


def allows_uring() -> bool:
    setting = Path("/proc/sys/kernel/io_uring_disabled")
    return not setting.exists() or setting.read_text().strip() == "0"


def in_slots(blocks: np.ndarray, slots: list[int]) -> list[IoRun]:
    return [IoRun(slot * BLOCK, [block]) for slot, block in zip(slots, blocks, strict=True)]


def test_every_block_comes_back_from_where_it_was_put(make_io: MakeIO, fd: int) -> None:
    source, target = pattern(), rows()
    slots = random.Random(1).sample(range(COUNT), COUNT)
    io = make_io(fd, [source, target])
    io.write(in_slots(source, slots))
    io.read(in_slots(target, slots))
    io.close()
    assert np.array_equal(source, target)
    assert os.fstat(fd).st_size == COUNT * BLOCK  # the descriptor stays the arena's


def test_run_of_several_buffers_is_one_piece_of_the_file(make_io: MakeIO, fd: int) -> None:
    source, target = pattern(), rows()
    io = make_io(fd, [source, target])
    io.write([IoRun(0, [source[3], source[1], source[2]]), IoRun(5 * BLOCK, [source[0]])])
    io.read([IoRun(BLOCK, [target[0], target[1]]), IoRun(5 * BLOCK, [target[2]])])
    io.close()
    assert np.array_equal(target[:3], source[[1, 2, 0]])


def test_nothing_but_the_run_is_touched(make_io: MakeIO, fd: int) -> None:
    source, target = pattern(), rows()
    io = make_io(fd, [source, target])
    io.write(in_slots(source, list(range(COUNT))))
    io.write([IoRun(4 * BLOCK, [source[9]])])
    io.read(in_slots(target[:8], list(range(8))))
    io.close()
    assert np.array_equal(target[:8], source[[0, 1, 2, 3, 9, 5, 6, 7]])
    assert not target[8:].any()


def test_order_of_no_runs_is_done(make_io: MakeIO, fd: int) -> None:
    io = make_io(fd, [rows()])
    io.read([])
    io.write([])
    io.close()


def test_many_more_runs_than_one_transfer_takes(make_io: MakeIO, fd: int) -> None:
    source, target = pattern(), rows()
    io = make_io(fd, [source, target])
    slots = list(range(COUNT))
    io.write(in_slots(source, slots))
    io.read(in_slots(target, slots) * (2 * MAX_DESCRIPTORS // COUNT + 1))
    io.close()
    assert np.array_equal(source, target)


@pytest.mark.parametrize("at", [0, 5, 11])
def test_read_past_the_end_of_the_arena_is_an_error(make_io: MakeIO, fd: int, at: int) -> None:
    source, target = pattern(), rows()
    io = make_io(fd, [source, target])
    io.write(in_slots(source, list(range(COUNT))))
    os.truncate(fd, (COUNT - 1) * BLOCK)
    slots = list(range(12))
    slots[at] = COUNT - 1
    with pytest.raises((EndOfArena, IoNotEnded)):
        io.read(in_slots(target[:12], slots))
    with pytest.raises(EndOfArena):
        io.read([IoRun((COUNT - 1) * BLOCK, [target[12]])])
    io.read(in_slots(target[:12], list(range(12))))
    io.close()
    assert np.array_equal(target[:12], source[:12])


def test_error_of_the_system_keeps_its_number(make_io: MakeIO, fd: int, tmp_path: Path) -> None:
    source = pattern()
    reads_only = os.open(tmp_path / "arena", os.O_RDONLY)
    io = make_io(reads_only, [source])
    with pytest.raises((OSError, IoNotEnded)) as raised:
        io.write([IoRun(0, [source[0]])])
    assert isinstance(raised.value, IoNotEnded) == (isinstance(io, NixlIO) and io._queue != "uring")
    assert getattr(raised.value, "errno", errno.EBADF) == errno.EBADF
    io.close()
    os.close(reads_only)


def test_full_disk_is_told_by_its_number(make_io: MakeIO, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the full disk: a write that crosses it is short, the next one fails."""
    source = pattern()
    opened = os.open(tmp_path / "small", os.O_RDWR | os.O_CREAT, 0o600)
    io = make_io(opened, [source])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK // 2, limits[1]))
    try:
        io.write([IoRun(0, [source[0]])])
        with pytest.raises(OSError) as raised:
            io.write([IoRun(BLOCK, [source[1]])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    io.write([IoRun(0, [source[0]])])
    io.close()
    os.close(opened)


def test_calls_of_many_threads_do_not_mix(make_io: MakeIO, fd: int) -> None:
    source, target = pattern(), rows()
    io = make_io(fd, [source, target])

    def move(part: int) -> bool:
        mine = list(range(part * 8, part * 8 + 8))
        for _ in range(20):
            target[mine] = 0
            io.write(in_slots(source[mine[0] : mine[0] + 8], mine))
            io.read(in_slots(target[mine[0] : mine[0] + 8], mine))
            if not np.array_equal(source[mine], target[mine]):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(move, range(8)))
    io.close()


def test_memory_that_nixl_was_not_told_of_is_moved_all_the_same(make_io: MakeIO, fd: int) -> None:
    source, other = pattern(), rows()
    io = make_io(fd, [source])
    io.write([IoRun(0, [source[0]])])
    io.read([IoRun(0, [other[0]])])
    io.close()
    assert np.array_equal(other[0], source[0])


@needs_nixl
@pytest.mark.parametrize("queue", ["uring", "aio"])
def test_process_that_used_nixl_ends_with_its_own_code(tmp_path: Path, queue: str) -> None:
    program = f"""
import mmap, os, numpy, threading
from kvbm.tiers.disk.io.threads import IoRun
from kvbm.tiers.disk.io.nixl import NixlIO
rows = numpy.frombuffer(mmap.mmap(-1, 8192), numpy.uint8).reshape(2, 4096)
fd = os.open({str(tmp_path / "arena")!r}, os.O_RDWR | os.O_CREAT, 0o600)
io = NixlIO(fd, [rows], queue={queue!r})
io.write([IoRun(0, [rows[0]])])
threads = [threading.Thread(target=io.read, args=([IoRun(0, [rows[1]])],)) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
os._exit(3) if io.redone_count else None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_handle_is_released_when_nothing_of_it_runs_any_more(nixl: FakeNixl, fd: int) -> None:
    source = pattern()
    nixl.polls = 20
    io = NixlIO(fd, [source], queue="uring")
    io.write(in_slots(source, list(range(COUNT))))
    assert [handle.state for handle in nixl.released] == ["DONE"]
    assert io.redone_count == 0


def test_failed_transfer_of_one_part_is_released_and_done_by_the_system_calls(nixl: FakeNixl, fd: int) -> None:
    source, target = pattern(), rows()
    io = NixlIO(fd, [source, target], queue="uring")
    nixl.refused = {"end"}
    io.write([IoRun(0, [source[0]])])
    io.read([IoRun(0, [target[0]])])
    assert np.array_equal(source[0], target[0])
    assert io.redone_count == 2
    nixl.refused = set()
    io.read([IoRun(0, [target[0]])])
    assert [handle.state for handle in nixl.released] == ["ERR", "ERR", "DONE"]


@pytest.mark.parametrize("refused", ["start", "end"])
def test_transfer_whose_end_is_unknown_is_not_repeated_and_never_released(
    nixl: FakeNixl, fd: int, refused: str
) -> None:
    """NIXL reports the failure of one part while others may be running."""
    source, target = pattern(), rows()
    io = NixlIO(fd, [source, target], queue="uring")
    nixl.refused = {refused}
    for move in (io.write, io.read):
        with pytest.raises(IoNotEnded):
            move(in_slots(source[:2], [0, 1]))
    assert nixl.released == []
    assert io.redone_count == 0
    nixl.refused = set()
    io.write(in_slots(source, list(range(COUNT))))
    io.read(in_slots(target, list(range(COUNT))))
    assert np.array_equal(source, target)
    assert len(nixl.agents) == 3, "an agent with a transfer that may be running is not used again"


def test_exception_while_a_transfer_runs_does_not_end_its_call(
    nixl: FakeNixl, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pattern()
    io = NixlIO(fd, [source], queue="uring")

    def fail(seconds: float) -> None:
        raise MemoryError

    monkeypatch.setattr("kvbm.tiers.disk.io.nixl.time.sleep", fail)
    with pytest.raises(IoNotEnded, match="MemoryError"):
        io.write([IoRun(0, [source[0]])])
    assert nixl.released == []


def test_transfer_that_is_done_and_cannot_be_released_is_done(
    nixl: FakeNixl, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pattern(), rows()
    io = NixlIO(fd, [source, target], queue="uring")

    def refuse(agent: FakeAgent, handle: object) -> None:
        raise nixlBackendError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(FakeAgent, "release_xfer_handle", refuse)
    io.write(in_slots(source, list(range(COUNT))))
    io.read(in_slots(target, list(range(COUNT))))
    assert np.array_equal(source, target)
    assert io.redone_count == 0


def test_calls_at_one_time_have_an_agent_each_and_later_ones_use_them_again(nixl: FakeNixl, fd: int) -> None:
    source = pattern()
    io = NixlIO(fd, [source], queue="aio")
    nixl.started = Barrier(4, timeout=30).wait
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda slot: io.write([IoRun(slot * BLOCK, [source[slot]])]), range(4)))
    assert len(nixl.agents) == 4
    assert [agent.backend for agent in nixl.agents] == [("POSIX", {"use_aio": "true", "ios_pool_size": "1024"})] * 4


def test_agent_that_cannot_be_made_later_leaves_the_call_to_the_system_calls(nixl: FakeNixl, fd: int) -> None:
    source = pattern()
    io = NixlIO(fd, [source], queue="uring")
    nixl.refused = {"create"}
    is_started = Barrier(2, timeout=30)
    may_end = Barrier(2, timeout=30)
    nixl.started = lambda: (is_started.wait(), may_end.wait())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(io.write, [IoRun(0, [source[0]])])
        is_started.wait()
        io.write([IoRun(BLOCK, [source[1]])])
        may_end.wait()
        first.result()
    assert io.redone_count == 1


def test_backend_that_does_not_work_is_a_problem_of_the_machine(nixl: FakeNixl, fd: int) -> None:
    nixl.refused = {"create"}
    with pytest.raises(EnvironmentProblem, match="NIXL cannot use uring on this machine"):
        NixlIO(fd, [rows()], queue="uring")


def test_absent_nixl_is_a_problem_of_the_machine(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    monkeypatch.setattr("kvbm.tiers.disk.io.nixl.PACKAGES", ("nixl_of_nobody",))
    with pytest.raises(EnvironmentProblem) as raised:
        NixlIO(fd, [rows()], queue="uring")
    assert "kvbm-cli[nixl]" in (raised.value.hint or "")
