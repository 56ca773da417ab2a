"""`kvbm serve` right after its predecessor: it waits for a port and a disk cache that an ending engine still holds."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_runs import states
from test_serve import LONG_STOP as DISK
from test_serve import home as home  # the fixture
from test_serve import serving, started
from waiting import eventually

from kvbm_cli.engine.process import choose_port

HELD = ("--set", "engine.environment.FAKE=held_stop")


@pytest.fixture(params=["port", "disk cache"])
def shared(home, request):
    """What two engines share, and the options for it."""
    if request.param == "port":
        port = choose_port("127.0.0.1", 0)
        yield f"port {port}", ["--port", str(port)]
    else:
        yield "disk cache", ["--set", DISK % home]


def test_start_waits_for_an_engine_that_is_stopping(home, shared):
    resource, options = shared
    with serving(home, "--set", DISK % home, *options, *HELD) as first:
        first.send_signal(signal.SIGTERM)
        eventually(lambda: states(home) == ["stopping"])
        with serving_in_background(home, options):
            note = f"waiting for `mine-1` to end, which uses the same {resource}\n"
            eventually(lambda: note in (home / "err").read_text())
            assert states(home) == ["stopping"], "the second waits for the first"
            (home / "may_end").touch()
            assert first.wait(timeout=240) == 0
            eventually(lambda: states(home) == ["healthy"])


def test_start_does_not_wait_for_an_engine_that_runs(home):
    options = ["--set", DISK % home]
    with serving(home, *options), serving(home, *options) as second:
        second.send_signal(signal.SIGTERM)
        assert "waiting for" not in second.stderr.read()


def test_start_waits_for_what_a_killed_launcher_has_left(home):
    """The guard is stopped, so nobody removes the engine's child until it continues."""
    options = ["--set", DISK % home]
    with serving(home, *options) as first:
        launcher = psutil.Process(first.pid)
        guard = next(child for child in launcher.children() if "leftovers.py" in " ".join(child.cmdline()))
        guard.suspend()
        first.kill()
        first.wait()
        assert states(home, with_ended=True) == ["dead"]
        with serving_in_background(home, options):
            eventually(lambda: "waiting for `mine-1` to end" in (home / "err").read_text())
            guard.resume()
            eventually(lambda: states(home) == ["healthy"])


@contextmanager
def serving_in_background(home: Path, options: list[str]) -> Iterator[None]:
    with open(home / "err", "w") as err, started(home, *options, stdout=err, stderr=err):
        yield
