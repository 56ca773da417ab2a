"""What an engine leaves is cleared away, whoever ends it and how; what is not its own stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_process import DEADLINE_S, fake_plan
from waiting import eventually, is_gone, own_children

from kvbm.errors import EnvironmentProblem
from kvbm_cli.engine.process import LONGEST_TMPDIR, EngineProcess
from kvbm_cli.system import leftovers
from kvbm_cli.system.guard_process import GUARD, GuardProcess
from kvbm_cli.system.leftovers import Leftovers, shared_files

SHARED_MEMORY = Path("/dev/shm")

STARTER = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_process import fake_plan
from kvbm_cli.engine.process import EngineProcess
engine = EngineProcess.start(fake_plan("litters"), log_path=Path(sys.argv[3]))
engine.wait_healthy(20)
print(engine.pid, flush=True)
time.sleep(600)
"""


@dataclass(frozen=True, slots=True)
class Litter:
    """Everything that the fake engine has made by the time it is healthy."""

    processes: list[psutil.Process]
    shared_files: list[Path]
    directory: Path

    @classmethod
    def of(cls, engine_pid: int) -> Litter:
        engine = psutil.Process(engine_pid)
        mapped = {region.path.split(" ")[0] for region in engine.memory_maps() if region.path.startswith("/dev/shm")}
        segments = [Path(path) for path in mapped if Path(path).exists()]
        inodes = _mapped_inodes(engine_pid)
        semaphores = [Path(entry) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes]
        semaphores = [path for path in semaphores if path.name.startswith("sem.")]
        assert len(segments) == len(semaphores) == 1
        directory = Path(engine.environ()["TMPDIR"])
        assert list(directory.iterdir())
        processes = [engine, *engine.children(recursive=True)]
        assert len({os.getpgid(process.pid) for process in processes}) == 2, "one has left the group"
        return cls(processes, segments + semaphores, directory)

    def left(self) -> list[object]:
        files = [*self.shared_files, self.directory]
        alive = [process for process in self.processes if not is_gone(process.pid)]
        return [*alive, *(path for path in files if path.exists())]


def _mapped_inodes(pid: int) -> set[int]:
    return {int(line.split()[4]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}


@pytest.mark.parametrize("end", ["stop", "kill", "dies", "group_dies", "guard_dies"])
def test_nothing_of_an_engine_is_left(tmp_path, end):
    with EngineProcess.start(fake_plan("litters"), log_path=tmp_path / "log") as engine:
        engine.wait_healthy(DEADLINE_S)
        litter = Litter.of(engine.pid)
        if end == "dies":
            os.kill(engine.pid, signal.SIGKILL)
        elif end == "group_dies":
            os.killpg(engine.pid, signal.SIGKILL)
        elif end == "guard_dies":
            _guard().kill()
            engine.kill()
        else:
            getattr(engine, end)()
        eventually(lambda: engine.poll() is not None)
        assert litter.left() == [], (tmp_path / "log").read_text()


def _guard() -> psutil.Process:
    return next(child for child in own_children() if str(GUARD) in child.cmdline())


def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    folders = map(str, Path(__file__).parents[:2])
    command = [sys.executable, "-c", STARTER, *folders, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        litter = Litter.of(int(parent.stdout.readline()))
        family = psutil.Process(parent.pid).children(recursive=True)
        assert any(str(GUARD) in process.cmdline() for process in family)
        parent.kill()
        eventually(lambda: not litter.left() and all(is_gone(process.pid) for process in family))


def test_what_is_older_than_the_guard_and_younger_than_the_engine_is_cleared_away_too(tmp_path, monkeypatch):
    def start_guard_late(*arguments: Any, **options: Any) -> None:
        eventually(lambda: "made 4 things" in (tmp_path / "log").read_text())
        start_guard(*arguments, **options)

    start_guard = GuardProcess.__init__
    monkeypatch.setattr(GuardProcess, "__init__", start_guard_late)
    with EngineProcess.start(fake_plan("litters"), log_path=tmp_path / "log") as engine:
        engine.wait_healthy(DEADLINE_S)
        litter = Litter.of(engine.pid)
        engine.stop()
        assert litter.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_everybody_do_not_end_the_guard(tmp_path, number):
    with EngineProcess.start(fake_plan(), log_path=tmp_path / "log") as engine:
        engine.wait_healthy(DEADLINE_S)
        guard = _guard()
        eventually(lambda: guard.status() == psutil.STATUS_SLEEPING)
        guard.send_signal(number)
        with pytest.raises(psutil.TimeoutExpired):
            guard.wait(0.3)


def test_temporary_directory_of_an_engine_has_a_short_name(tmp_path, monkeypatch):
    long = tmp_path / ("x" * LONGEST_TMPDIR)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with EngineProcess.start(fake_plan("litters"), log_path=tmp_path / "log") as engine:
        engine.wait_healthy(DEADLINE_S)
        directory = Litter.of(engine.pid).directory
        assert len(str(directory)) < LONGEST_TMPDIR
    assert not directory.exists()
    assert not list(long.iterdir())


def test_temporary_directory_lies_in_that_of_the_profile(tmp_path):
    with tempfile.TemporaryDirectory(prefix="k") as wanted:
        plan = fake_plan("litters")
        plan = replace(plan, environment={**plan.environment, "TMPDIR": wanted})
        with EngineProcess.start(plan, log_path=tmp_path / "log") as engine:
            engine.wait_healthy(DEADLINE_S)
            assert Litter.of(engine.pid).directory.parent == Path(wanted)
        assert not list(Path(wanted).iterdir())


def test_a_place_without_room_for_temporary_files_is_a_problem_of_the_environment(tmp_path):
    plan = replace(fake_plan(), environment={"TMPDIR": "/no/such/place"})
    with pytest.raises(
        EnvironmentProblem, match="cannot create a temporary directory in `/no/such/place`: no such file"
    ):
        EngineProcess.start(plan, log_path=tmp_path / "log")


@contextlib.contextmanager
def sleeping_group() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0) as leader:
        try:
            yield leader
        finally:
            leader.kill()


@contextlib.contextmanager
def segment() -> Iterator[shared_memory.SharedMemory]:
    made = shared_memory.SharedMemory(create=True, size=4096)
    try:
        yield made
    finally:
        made.close()
        with contextlib.suppress(FileNotFoundError):
            made.unlink()


def test_files_of_others_stay_whenever_they_were_made(tmp_path):
    with segment() as older, sleeping_group() as leader:
        remains = Leftovers(str(tmp_path / "none"), process_group=leader.pid, existing_files=set(shared_files()))
        with segment() as younger:
            remains.scan()
            assert remains.remove()
            assert (SHARED_MEMORY / older.name).exists()
            assert (SHARED_MEMORY / younger.name).exists()


def test_a_file_of_the_engine_that_another_process_maps_stays(tmp_path):
    """Made in the engine's time, mapped by its process, and by this one."""
    script = "import sys, time; f = open(sys.argv[1]); print(flush=True); time.sleep(600)"
    remains_of: list[Leftovers] = []
    with segment() as shared:
        path = SHARED_MEMORY / shared.name
        command = [sys.executable, "-c", script, str(path)]
        with subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE) as leader:
            leader.stdout.readline()
            remains = Leftovers(str(tmp_path / "none"), process_group=leader.pid)
            remains_of.append(remains)
            assert remains.remove()
        assert path.exists()
        # Without it, the reason why the segment is kept is not known.
        assert path.stat().st_ino in remains._owned, "it was taken for the engine's, and kept because it is in use"
        shared.close()
        assert remains_of[0].remove()
        assert not path.exists()


def test_file_is_not_looked_for_for_ever(tmp_path, monkeypatch):
    searches: list[object] = []
    monkeypatch.setattr(leftovers, "_held_files", lambda pids: searches.append(pids) or set())
    with sleeping_group() as leader:
        remains = Leftovers(str(tmp_path / "none"), process_group=leader.pid, existing_files=set(shared_files()))
        with segment():
            for _ in range(3 * leftovers.SCAN_LIMIT):
                remains.scan()
    assert len(searches) == leftovers.SCAN_LIMIT
