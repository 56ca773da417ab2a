"""Batches of the kernel's asynchronous I/O, with real files, and what ThreadsIO makes of those that end in part."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvbm.tiers.disk.io import kernel_aio
from kvbm.tiers.disk.io.kernel_aio import MAX_REQUESTS, READ, WRITE, KernelAio
from kvbm.tiers.disk.io.threads import EndOfArena, IoRun, ThreadsIO, address_of

PAGE = 4096
PAGES = 4 * MAX_REQUESTS


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "arena", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.ftruncate(opened, PAGES * PAGE)
    yield opened
    os.close(opened)


def pages(count: int, seed: int | None = None) -> np.ndarray:
    found = np.frombuffer(mmap.mmap(-1, count * PAGE), np.uint8).reshape(count, PAGE)
    if seed is not None:
        found[:] = np.random.default_rng(seed).integers(0, 256, found.shape, np.uint8)
    return found


def runs(memory: np.ndarray, places: list[int]) -> list[IoRun]:
    return [IoRun(place * PAGE, [row]) for place, row in zip(places, memory, strict=True)]


def test_what_was_written_at_random_places_is_read_from_there(fd: int) -> None:
    written, found = pages(PAGES, seed=1), pages(PAGES)
    places = random.Random(1).sample(range(PAGES), PAGES)
    io = ThreadsIO(fd)
    io.write(runs(written, places))
    io.read(runs(found, places))
    assert (found == written).all()
    assert len(io._idle) == 1, "io_submit was not used"
    io.close()
    back = pages(PAGES)
    os.preadv(fd, [back], 0)
    assert (back[places] == written).all()


def test_buffers_of_a_run_lie_one_after_the_other(fd: int) -> None:
    written, found = pages(6, seed=2), pages(6)
    io = ThreadsIO(fd)
    io.write([IoRun(0, list(written[:4])), IoRun(8 * PAGE, list(written[4:]))])
    io.read([IoRun(8 * PAGE, list(found[4:])), IoRun(0, list(found[:4]))])
    assert (found == written).all()
    io.close()


def test_threads_have_batches_of_their_own(fd: int) -> None:
    io = ThreadsIO(fd)
    written = pages(PAGES, seed=3)
    io.write(runs(written, list(range(PAGES))))

    def read(seed: int) -> bool:
        found = pages(64)
        places = random.Random(seed).sample(range(PAGES), 64)
        io.read(runs(found, places))
        return bool((found == written[places]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))
    io.close()


def test_each_request_has_a_result_of_its_own(fd: int) -> None:
    os.ftruncate(fd, 2 * PAGE)
    memory = pages(4)
    aio = KernelAio(fd)
    offsets, addresses = [0, PAGE, 2 * PAGE, 0], [*(address_of(row) for row in memory[:3]), PAGE]
    assert aio.move(READ, offsets, addresses, [PAGE] * 4) == [PAGE, PAGE, 0, -errno.EFAULT]
    assert aio.move(WRITE, [0], addresses[:1], [PAGE]) == [PAGE]
    aio.close()


def test_what_the_kernel_refuses_to_take_has_not_been_done(fd: int) -> None:
    memory = pages(3)
    aio = KernelAio(fd)
    addresses = [address_of(row) for row in memory]
    assert aio.move(READ, [0, PAGE, 0], addresses, [PAGE, 1 << 63, PAGE]) == [PAGE, -errno.EAGAIN, -errno.EAGAIN]
    aio.close()


def test_a_cut_arena_is_said_to_end_where_it_does(fd: int) -> None:
    os.ftruncate(fd, 5 * PAGE)
    io = ThreadsIO(fd)
    with pytest.raises(EndOfArena, match=f"ends at byte {7 * PAGE}"):
        io.read([*runs(pages(3), [1, 7, 2]), IoRun(5 * PAGE, [pages(1)[0]])])
    io.close()


def test_without_it_blocks_are_moved_one_by_one(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = kernel_aio._SystemCalls(*[99999] * 4)
    monkeypatch.setattr(kernel_aio, "_SYSTEM_CALLS", dict.fromkeys(kernel_aio._SYSTEM_CALLS, numbers))
    written, found = pages(8, seed=4), pages(8)
    io = ThreadsIO(fd)
    io.write(runs(written, list(range(8))))
    io.read(runs(found, list(range(8))))
    assert (found == written).all()
    assert not io._has_aio
    with pytest.raises(OSError, match="not implemented"):
        KernelAio(fd)


def test_a_call_that_is_interrupted_leaves_nothing_running(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KernelAio] = []

    def interrupted(aio: KernelAio, count: int) -> np.ndarray:
        made.append(aio)
        raise KeyboardInterrupt

    monkeypatch.setattr(KernelAio, "_wait_for", interrupted)
    io = ThreadsIO(fd)
    with pytest.raises(KeyboardInterrupt):
        io.read(runs(pages(4), [0, 1, 2, 3]))
    assert [bool(aio._context) for aio in made] == [False]
    assert io._idle == []


def test_buffered_files_are_not_moved_in_batches(tmp_path: Path) -> None:
    opened = os.open(tmp_path / "arena", os.O_RDWR | os.O_CREAT, 0o600)
    written, found = pages(4, seed=5), pages(4)
    io = ThreadsIO(opened, is_direct=False)
    io.write(runs(written, [3, 2, 1, 0]))
    io.read(runs(found, [3, 2, 1, 0]))
    assert (found == written).all()
    assert io._idle == []
    os.close(opened)
