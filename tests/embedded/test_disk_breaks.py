"""File systems that break under a serving engine, really: requests go on, and the disk is used again when it works.

Each row mounts a file system, breaks it in its own way while an engine answers, and mends it. What must hold is the
same for all: equal outputs, no step that waits, a tier that turns itself off and comes back by itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from bookkeeping import check_leader
from filesystems import Unavailable, mounted
from kvbm_engine import assert_same, prompt, running
from test_disk_in_engine import LONGEST_STEP_S, Faults, Steps, rest, wait_until
from waiting import eventually

BATCHES = (3, 6, 3)  # users before it breaks, while it is broken, and afterwards
STALL_S = 30.0
LIMIT_OF_A_ROUND_S = 8.0  # of nine chats, while the disk is off

Mend = Callable[[], None]


def fill(point: Path) -> Mend:
    filler = point / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 512):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
                    os.fdatasync(file.fileno())

    def mend() -> None:
        filler.unlink()
        os.sync()

    return mend


def abort(point: Path) -> Mend:
    """As after an error of the device: ext4 is read-only from then on, until somebody repairs it."""
    device = subprocess.run(["findmnt", "-no", "SOURCE", point], check=True, capture_output=True, text=True).stdout
    subprocess.run(["mount", "-o", "remount,abort", point], check=True)

    def mend() -> None:
        subprocess.run(["umount", "--lazy", point], check=True)
        check = ["e2fsck", "-fy", device.strip()]
        eventually(lambda: subprocess.run(check, capture_output=True).returncode <= 2, "files of it are open")
        subprocess.run(["mount", device.strip(), point], check=True)

    return mend


def remove(point: Path) -> Mend:
    shutil.rmtree(point / "disk")
    return lambda: None


def order(what: str) -> Callable[[Path], Mend]:
    def give(point: Path) -> Mend:
        orders = point.parent / "orders"
        orders.write_text(what)
        return lambda: orders.write_text("") and None

    return give


@dataclass(frozen=True)
class Row:
    """How a file system of some kind is broken, and whether the tier must notice enough of it to turn itself off."""

    kind: str
    breaks: Callable[[Path], Mend]
    turns_off: bool = True


TABLE = {
    "ENOSPC": Row("ext4", fill),
    "EDQUOT": Row("btrfs-quota", fill),
    "EROFS": Row("ext4", abort),
    "EIO": Row("fuse-obeys", order("EIO")),
    "short reads and writes": Row("fuse-obeys", order("short"), turns_off=False),
    "removed directory": Row("ext4", remove),
}


class Users:
    """Chats of users that each have prompts of their own, and what an engine without cache says to them."""

    def __init__(self) -> None:
        with running() as engine:
            self._truth = [self._said(engine, user) for user in range(sum(BATCHES))]

    @staticmethod
    def _said(engine, user):
        history, said = prompt(user, 180, shared=96), []
        for turn in range(2):
            answer = engine.ask(history, max_tokens=8)
            said += answer.said()
            history = history + answer.tokens + prompt(100 * user + turn, 24)
        return said

    def talk(self, engine, *batches: int) -> None:
        """All users of these batches, two at a time, to whom everything is answered as without a cache."""
        users = [user for batch in batches for user in range(sum(BATCHES[:batch]), sum(BATCHES[: batch + 1]))]
        with ThreadPoolExecutor(2) as pool:
            assert_same(list(pool.map(lambda user: self._said(engine, user), users)), [self._truth[u] for u in users])


def broken_and_mended(engine, point, users, row):
    counters, steps = engine.counters, Steps(engine)
    users.talk(engine, 0)
    rest(engine)
    assert counters.disk.off == counters.disk.io_errors == 0
    mend = row.breaks(point)
    users.talk(engine, 1, 0)
    if row.turns_off:
        wait_until(engine, lambda: counters.disk.times_off)
    assert_used_again(engine, mend, users, steps)


def assert_used_again(engine, mend, users, steps):
    mend()
    counters = engine.counters
    wait_until(engine, lambda: not counters.disk.off)
    before = counters.disk.onboard_blocks
    users.talk(engine, 2)
    rest(engine)  # a slow disk has written everything
    users.talk(engine, 2)
    assert counters.disk.onboard_blocks > before, "it is used again"
    rest(engine)
    check_leader(engine.leader)
    assert steps.longest_s < LONGEST_STEP_S, "a step waited for the disk"


@pytest.fixture
def quick_limits(tmp_path, monkeypatch):
    """A disk is given up and tried again sooner than in service."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "disk_faults"))
    monkeypatch.setenv("KVBM_TEST_DISK_FAULTS", str(tmp_path / "faults"))
    Faults(tmp_path / "faults")


@pytest.fixture(scope="module")
def users():
    return Users()


@contextmanager
def engine_on(kind, directory):
    """On a file system of that kind, and where it is mounted. More blocks move than fit in its memory."""
    try:
        with ExitStack() as stack:
            point = stack.enter_context(mounted(kind, directory))
            disk = {"directory": str(point / "disk"), "blocks": 100, "zerofill": kind.startswith("fuse")}
            memory = {"host_blocks": 12, "num_blocks": 24}
            policy = {"offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}
            yield stack.enter_context(running(disk=disk, **memory, **policy)), point
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TABLE)
def test_a_file_system_that_breaks_in_service_changes_no_output(tmp_path, users, quick_limits, name):
    with engine_on(TABLE[name].kind, tmp_path) as (engine, point):
        broken_and_mended(engine, point, users, TABLE[name])


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_file_system_that_stalls_for_half_a_minute_holds_up_nobody(tmp_path, users):
    """With the limits of service: it is given up after ten seconds."""
    with engine_on("fuse-obeys", tmp_path) as (engine, point):
        counters, steps = engine.counters, Steps(engine)
        users.talk(engine, 0)
        rest(engine)
        mend = order("stall")(point)
        stalled_s, answers = time.monotonic(), []
        while time.monotonic() - stalled_s < STALL_S:
            asked_s = time.monotonic()
            users.talk(engine, 1, 0)
            answers.append(time.monotonic() - asked_s)
        assert counters.disk.off
        assert counters.disk.times_off == 1
        assert len(answers) > 3
        assert max(answers[2:]) < LIMIT_OF_A_ROUND_S
        assert_used_again(engine, mend, users, steps)
