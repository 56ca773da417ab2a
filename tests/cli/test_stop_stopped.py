"""`kvbm stop` where a process of the run was stopped, killed or hangs, or its directory was removed."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from terminal import HANGS_S, PROGRAM, environment, kvbm
from test_manage import status
from test_runs import states
from test_serve import LONG_STOP, RUNS, Serving, serving
from test_serve import home as home  # the fixture
from waiting import eventually, is_gone

CHILDREN = ("--set", "engine.environment.FAKE=children")


def members(program: Serving) -> dict[str, psutil.Process]:
    launcher = psutil.Process(program.pid)
    guard = next(child for child in launcher.children() if "leftovers.py" in " ".join(child.cmdline()))
    engine = next(child for child in launcher.children() if child.pid != guard.pid)
    return {"launcher": launcher, "guard": guard, "engine": engine, "child": engine.children()[0]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("who", ["launcher", "guard", "engine", "child"])
def test_stop_continues_a_stopped_process(home, who):
    with serving(home, *CHILDREN, "--set", LONG_STOP % home) as program:
        processes = members(program)
        processes[who].suspend()
        outcome = kvbm("stop", home=home)  # both deadlines are longer than this may take
        assert outcome.exit_code == 0, outcome
        assert outcome.stdout.startswith("mine-1 stopped after ")
        assert program.wait(timeout=HANGS_S) == 0
        assert all(is_gone(process.pid) for process in processes.values())


def test_stop_removes_what_a_killed_launcher_and_a_stopped_guard_have_left(home):
    with serving(home, *CHILDREN) as program:
        processes = members(program)
        processes["guard"].suspend()
        program.kill()
        eventually(lambda: is_gone(processes["engine"].pid))
        assert not is_gone(processes["child"].pid)
        assert states(home, with_ended=True) == ["dead"]
        assert "; `kvbm stop mine-1` ends its remaining processes;" in kvbm("status", home=home).stderr
        outcome = kvbm("stop", "mine", home=home)
        assert outcome.exit_code == 3, "it was killed"
        assert outcome.stdout.startswith("mine-1 was killed after ")
        assert all(is_gone(process.pid) for process in processes.values())
    assert "has already ended" in kvbm("stop", "mine", home=home).stderr


def test_run_whose_directory_is_removed_is_found_again(home):
    with serving(home) as program:
        shutil.move(home / RUNS, home / "removed")  # all at once: the launcher may write while a tree is removed
        eventually(lambda: states(home) == ["healthy"])
        assert kvbm("stop", "mine-1", home=home).exit_code == 0
        assert program.wait(timeout=HANGS_S) == 0


def test_guard_is_replaced_although_the_log_cannot_be_written(home):
    with serving(home) as program:
        guard = recorded_guard(home)
        log = home / RUNS / "mine-1" / "engine.log"
        log.unlink()
        log.mkdir()
        os.kill(guard, signal.SIGKILL)
        eventually(lambda: recorded_guard(home) != guard)
        assert kvbm("stop", home=home).exit_code == 0
        assert program.wait(timeout=HANGS_S) == 0


def test_detached_engine_is_ready_although_its_own_log_cannot_be_written(home):
    command = [*PROGRAM, "serve", "-p", "./mine.yaml", "--detach"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=home, env=environment(home), **streams) as program:  # type: ignore[call-overload]
        eventually(lambda: states(home) != [])
        (home / RUNS / "mine-1" / "kvbm.log").mkdir()
        assert program.wait(timeout=HANGS_S) == 0
    assert states(home) == ["healthy"]
    assert kvbm("stop", home=home).exit_code == 0


def recorded_guard(home: Path) -> int:
    (run,) = status(home)
    processes = run["processes"]
    assert isinstance(processes, dict)
    return int(processes["guard"])
