"""Disturbances of an engine in service.

    FAULTS[name].disturb(stage)      do it while clients ask, and undo it; all choices come from `stage.random`

A fault proves that it happened: it reads back the state of a process, a limit or a file, or waits for a counter.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_engine import EngineProcess, Hung
from chaos_traffic import Load

from kvbm.tiers.disk.directory import ARENA, INDEX, LOCK, SUPERBLOCK

COUNTED_LIMIT_S = 40.0
BEYOND_LIMITS_S = 13.0  # the disk is given up after 10 s
FILES = (ARENA, INDEX, f"{INDEX}-wal", SUPERBLOCK, LOCK)
PIDFD_GETFD = 438  # system call


@dataclass
class Stage:
    """An engine under load on the cache in `instance`; its disk process obeys `orders`."""

    engine: EngineProcess
    load: Load
    instance: Path
    orders: Path
    random: random.Random

    def wait(self, least_s: float, most_s: float | None = None) -> None:
        """While the clients ask. Raises their first failure."""
        self.load.run_for(self.random.uniform(least_s, most_s or least_s))

    def pid(self, name: str) -> int:
        return self.engine.call("pids")[name]

    def order(self, **faults) -> None:
        """See tests/embedded/disk_faults."""
        new = self.orders.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self.orders)

    def count(self, *names: str) -> int:
        counters = self.engine.counters()
        return sum(counters[name] for name in names)

    def until_counted(self, before: int, *names: str) -> None:
        """Wait until one of these counters has increased."""
        deadline_s = time.monotonic() + COUNTED_LIMIT_S
        while self.count(*names) <= before:
            assert time.monotonic() < deadline_s, f"none of {names} increases: the disturbance did not happen"
            self.wait(0.1)


@dataclass(frozen=True)
class Fault:
    """`options` of the engine that it needs. `kills` the engine. `is_aborting`: of the clients."""

    name: str
    disturb: Callable[[Stage], None]
    kills: bool
    is_aborting: bool
    options: dict


FAULTS: dict[str, Fault] = {}


def fault(*, kills: bool = False, is_aborting: bool = False, **options):
    def register(disturb: Callable[[Stage], None]) -> Callable[[Stage], None]:
        assert disturb.__name__ not in FAULTS, disturb.__name__
        FAULTS[disturb.__name__] = Fault(disturb.__name__, disturb, kills, is_aborting, options)
        return disturb

    return register


# -- signals -----------------------------------------------------------------------------------------------------------


@contextmanager
def paused(*pids: int) -> Iterator[None]:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            wait_for_state(pid, "T")
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_for_state(pid: int, state: str) -> None:
    deadline_s = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline_s, f"process {pid} is not in state {state}"
        time.sleep(0.01)


def kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    deadline_s = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, f"process {pid} survives SIGKILL"
            time.sleep(0.01)


def kill_the_disk(stage: Stage) -> None:
    before = stage.count("disk_restarts")
    kill(stage.pid("disk"))
    stage.until_counted(before, "disk_restarts")


@fault()
def disk_killed(stage):
    kill_the_disk(stage)


def paused_fault(victim: str, *, is_brief: bool) -> Callable[[Stage], None]:
    def disturb(stage: Stage) -> None:
        for _ in range(4 if is_brief else 1):
            with paused(stage.pid(victim)):
                stage.wait(*((0.2, 1.5) if is_brief else (BEYOND_LIMITS_S,)))
            stage.wait(0.2, 0.6)

    disturb.__name__ = f"{victim}_paused_{'briefly' if is_brief else 'beyond_all_limits'}"
    return disturb


for _victim in ("disk", "worker"):
    for _is_brief in (True, False):
        fault(worker_process=_victim == "worker")(paused_fault(_victim, is_brief=_is_brief))


@fault()
def disk_killed_again_and_again(stage):
    for _ in range(3):
        kill_the_disk(stage)
        stage.wait(0.0, 0.5)


@fault()
def disk_killed_while_paused(stage):
    before = stage.count("disk_restarts")
    pid = stage.pid("disk")
    with paused(pid):
        stage.wait(0.5, 3.0)
        kill(pid)
    stage.until_counted(before, "disk_restarts")


@fault()
def resets_while_the_disk_is_paused(stage):
    """A reset waits for a disk that may be slow, with all requests: as long as the tier waits, no longer."""
    with paused(stage.pid("disk")):
        stage.wait(0.2)
        before = stage.count("resets")
        stage.engine.call("reset")
        stage.wait(2.0)
    stage.until_counted(before, "resets")


@fault(worker_process=True)
def worker_killed(stage):
    kill(stage.pid("worker"))
    stage.wait(3.0)


@fault(worker_process=True)
def worker_and_disk_killed(stage):
    kill(stage.pid("disk"))
    kill(stage.pid("worker"))
    stage.wait(3.0)


@fault()
def everything_paused(stage):
    for _ in range(3):
        seconds = stage.random.uniform(0.3, 3.0)
        stage.load.allow(seconds)
        with paused(*(process.pid for process in stage.engine.processes())):
            stage.wait(seconds)
        stage.wait(0.5)


@fault()
def engine_paused_beyond_all_limits(stage):
    """Its disk process goes on."""
    stage.load.allow(BEYOND_LIMITS_S)
    with paused(stage.engine.pid):
        stage.wait(BEYOND_LIMITS_S)


@fault(kills=True)
def everything_killed(stage):
    stage.wait(0.0, 2.0)
    stage.engine.kill()


@fault(kills=True)
def engine_killed(stage):
    """Its children must end by themselves."""
    stage.wait(0.0, 2.0)
    children = stage.engine.processes()[1:]
    assert children
    kill(stage.engine.pid)
    _, alive = psutil.wait_procs(children, 10)
    assert not alive, f"{alive} survive their engine"


@fault(kills=True)
def engine_killed_while_the_disk_is_paused(stage):
    with paused(stage.pid("disk")):
        kill(stage.engine.pid)
        time.sleep(0.5)


# -- I/O errors and delays ---------------------------------------------------------------------------------------------


def failing(error: str, kind: str):
    def disturb(stage: Stage) -> None:
        if kind == "write":
            stage.engine.call("reset")  # so that there is something to write
        before = stage.count("disk_io_errors")
        chance = stage.random.choice([0.05, 0.3, 1.0])
        stage.order(error=error, chance=chance, **({} if kind == "both" else {"for": kind}))
        stage.until_counted(before, "disk_io_errors")
        stage.wait(0.5, 3.0)
        stage.order()
        stage.wait(0.5)

    disturb.__name__ = f"{error.lower()}_at_{'calls' if kind == 'both' else kind + 's'}"
    return disturb


for _error, _kind in (("EIO", "both"), ("EIO", "read"), ("ENOSPC", "write"), ("EROFS", "write"), ("short", "both")):
    fault()(failing(_error, _kind))


@fault()
def calls_delayed(stage):
    stage.order(delay_s=stage.random.choice([0.05, 0.5, 3.0]))
    stage.wait(6.0)
    stage.order()


@fault()
def calls_held(stage):
    stage.order(hold=True)
    stage.wait(BEYOND_LIMITS_S)
    stage.order()


@fault()
def slow_disk(stage):
    stage.order(bytes_per_s=stage.random.choice([1e5, 1e6]))
    stage.wait(5.0)
    stage.order()


@fault()
def lying_reads(stage):
    before = stage.count("disk_checksum_failures")
    stage.order(lie=True, **{"for": "read"})
    stage.until_counted(before, "disk_checksum_failures")
    stage.wait(1.0)
    stage.order()


@fault()
def commits_fail(stage):
    stage.engine.call("reset")
    before = stage.count("disk_io_errors")
    stage.order(commit="disk I/O error", chance=stage.random.choice([0.3, 1.0]))
    stage.until_counted(before, "disk_io_errors")
    stage.wait(2.0)
    stage.order()


# -- files -------------------------------------------------------------------------------------------------------------


def existing(stage: Stage) -> Path:
    return stage.random.choice([path for name in FILES if (path := stage.instance / name).exists()])


@fault()
def file_deleted(stage):
    path = existing(stage)
    path.unlink()
    stage.wait(3.0)


@fault()
def arena_deleted(stage):
    before = stage.count("disk_restarts")
    (stage.instance / ARENA).unlink()
    stage.until_counted(before, "disk_restarts")


@fault()
def file_truncated(stage):
    path = existing(stage)
    os.truncate(path, stage.random.choice([0, 1, 5000]))
    stage.wait(3.0)


@fault()
def arena_truncated(stage):
    os.truncate(stage.instance / ARENA, stage.random.choice([0, 4096, 1 << 20]))
    stage.wait(3.0)


@fault()
def file_renamed(stage):
    path = existing(stage)
    path.rename(path.with_name("renamed"))
    stage.wait(2.0)
    if not path.exists():
        path.with_name("renamed").rename(path)


@fault()
def file_replaced(stage):
    path = existing(stage)
    shutil.copy(path, path.with_name("replaced"))
    path.with_name("replaced").replace(path)
    stage.wait(2.0)


@fault()
def instance_renamed(stage):
    stage.instance.rename(stage.instance.with_name("9" * 16))
    stage.wait(3.0)


@fault()
def directory_removed(stage):
    shutil.rmtree(stage.instance.parents[1])
    stage.wait(3.0)


@fault(is_plain_user=True)
def folders_unreadable(stage):
    folders = [stage.instance, *list(stage.instance.parents)[:2]]
    for folder in folders:
        folder.chmod(0)
    stage.wait(1.0)
    if stage.random.random() < 0.5:
        kill(stage.pid("disk"))
    stage.wait(3.0)
    for folder in reversed(folders):
        folder.chmod(0o700)


# -- limits ------------------------------------------------------------------------------------------------------------


@contextmanager
def limited(pid: int, kind: int, value: int) -> Iterator[None]:
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (value, before[1]))
    assert resource.prlimit(pid, kind)[0] == value
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(pid, kind, before)


@fault()
def no_descriptors_for_the_disk(stage):
    pid = stage.pid("disk")
    with limited(pid, resource.RLIMIT_NOFILE, stage.random.choice([0, 5, len(os.listdir(f"/proc/{pid}/fd"))])):
        stage.wait(3.0)


@fault()
def no_descriptors_for_the_engine(stage):
    """Its disk process is killed meanwhile, and cannot be replaced."""
    with limited(stage.engine.pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{stage.engine.pid}/fd"))):
        stage.wait(1.0)
        kill(stage.pid("disk"))
        stage.wait(4.0)


@fault(descriptors=1100)
def many_descriptors(stage):
    """More than select(2) can wait for."""
    assert len(os.listdir(f"/proc/{stage.engine.pid}/fd")) > 1100
    stage.wait(1.0)
    kill_the_disk(stage)


@fault()
def no_memory_for_the_disk(stage):
    pid = stage.pid("disk")
    more = stage.random.choice([0, 1 << 20, 16 << 20])
    with limited(pid, resource.RLIMIT_AS, psutil.Process(pid).memory_info().vms + more):
        stage.wait(4.0)


@fault()
def no_file_sizes_for_the_disk(stage):
    with limited(stage.pid("disk"), resource.RLIMIT_FSIZE, stage.random.choice([0, 10_000, 1 << 20])):
        stage.wait(4.0)


# -- orders ------------------------------------------------------------------------------------------------------------


@fault()
def storm_of_resets(stage):
    before = stage.count("resets")
    for _ in range(40):
        stage.engine.call("reset")
        stage.wait(0.0, 0.05)
    assert stage.count("resets") > before
    stage.wait(1.0)


@fault(is_aborting=True)
def storm_of_aborts(stage):
    stage.wait(4.0)


@fault(is_aborting=True)
def aborts_while_the_disk_is_paused(stage):
    with paused(stage.pid("disk")):
        stage.wait(4.0)


# -- the channel to the disk process -----------------------------------------------------------------------------------


@contextmanager
def end_of_the_channel(pid: int, fd: int) -> Iterator[socket.socket]:
    """A copy of the descriptor that another process has."""
    owner = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(PIDFD_GETFD, owner, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
    finally:
        os.close(owner)
    with socket.socket(fileno=copy) as end:
        yield end


def disk_end(stage: Stage) -> tuple[int, int]:
    pid = stage.pid("disk")
    return pid, int(psutil.Process(pid).cmdline()[-1])


def leader_end(stage: Stage) -> tuple[int, int]:
    return stage.engine.pid, stage.engine.call("channel")


def garbage(stage: Stage) -> bytes:
    chosen = stage.random
    noise = chosen.randbytes(chosen.choice([1, 7, 8, 100, 5000]))
    return chosen.choice(
        [
            noise,
            struct.pack("<Q", len(noise)) + noise,
            struct.pack("<Q", 1 << 60),
            struct.pack("<Q", 4) + b"I1\n.",  # a message of another type
            struct.pack("<Q", 2) + b"N.",
        ]
    )


def spoil(stage: Stage, end: tuple[int, int]) -> None:
    sent = 0
    with suppress(ProcessLookupError):  # the leader replaces a process that has sent garbage
        for _ in range(3):
            with end_of_the_channel(*end) as channel:
                sent += channel.send(garbage(stage))
            stage.wait(0.5)
    assert sent
    stage.wait(3.0)


@fault()
def garbage_for_the_leader(stage):
    spoil(stage, disk_end(stage))


@fault()
def garbage_for_the_disk(stage):
    with suppress(OSError, psutil.Error, Hung):  # it may end after the first
        spoil(stage, leader_end(stage))
    stage.wait(2.0)


@fault()
def channel_shut_down(stage):
    """For the disk process, as if its engine had ended. The leader must not see it before the process has ended."""
    before = stage.count("disk_restarts")
    end, direction = stage.random.choice([(disk_end, socket.SHUT_RD), (leader_end, socket.SHUT_WR)])
    with end_of_the_channel(*end(stage)) as channel:
        channel.shutdown(direction)
    stage.until_counted(before, "disk_restarts")
