"""`kvbm serve` whose run directory is on a file system that hangs while the engine runs: a signal still ends it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from test_hanging_directories import mounted_and_obeying
from test_serve import home as home  # the fixture
from test_serve import serving
from waiting import eventually

LIMIT_S = 60.0
CHILD = """
import signal, subprocess, sys, time
from pathlib import Path
from kvbm_cli.serve.background import Background
from kvbm_cli.system import answering

answering.LOOK, answering.ANSWER_LIMIT_S = "import time; time.sleep(600)", 0.2
background = Background.fork(is_detached=False)
if background.is_parent:
    try:
        background.wait([Path("/hung")])
    except Exception as error:
        print(error, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for options in ({}, {"start_new_session": True}):
    print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, **options).pid, flush=True)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def program():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as program:
        yield program
        program.kill()


def test_a_launcher_that_hangs_is_given_up_after_a_signal_with_its_engine(program):
    engine, guard = (psutil.Process(int(program.stdout.readline())) for _ in range(2))
    assert program.stdout.readline() == "ready\n"
    try:
        time.sleep(0.5)
        assert program.poll() is None, "without a signal, nothing is asked"
        began_s = time.monotonic()
        program.send_signal(signal.SIGTERM)
        assert program.wait(LIMIT_S) == 7
        assert time.monotonic() - began_s < LIMIT_S
        assert (
            "/hung does not answer within 0.2 s: its file system hangs; the engine was killed" in program.stdout.read()
        )
        eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        assert guard.is_running(), "it removes what the engine leaves"
    finally:
        guard.kill()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["hang", "hang-stat", "hang-writes"])
def test_ctrl_c_ends_a_serve_whose_run_directory_hangs(home, tmp_path, what):
    with mounted_and_obeying(tmp_path) as (point, order), serving(home, state=str(point)) as program:
        assert program.url.startswith("http")
        order(what)
        time.sleep(2.0)
        began_s = time.monotonic()
        program.send_signal(signal.SIGINT)
        try:
            program.wait(LIMIT_S)
            assert time.monotonic() - began_s < LIMIT_S
        finally:
            program.kill()
            order("")
        if program.returncode:
            assert f"{point}/kvbm does not answer within" in program.stderr.read()


@pytest.mark.slow
def test_a_serve_that_may_hang_stops_as_any_other(home, tmp_path):
    with mounted_and_obeying(tmp_path) as (point, _):
        for end in (signal.SIGINT, signal.SIGKILL):
            with serving(home, state=str(point)) as program:
                assert program.url.startswith("http")
                children = psutil.Process(program.pid).children(recursive=True)
                assert len(children) >= 2, "the launcher and the engine"
                os.kill(program.pid, end)
                code = program.wait(60)
                assert code == (0 if end is signal.SIGINT else -signal.SIGKILL)
                eventually(lambda: not any(child.is_running() for child in children))  # noqa: B023
