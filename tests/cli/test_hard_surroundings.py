"""Full disks, closed streams, hangups, noise: what surrounds the command must not make it lie, hang or crash."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import PROGRAM, environment
from test_serve import home, serving  # noqa: F401

from kvbm.embedded.http.server import Server
from kvbm.errors import EnvironmentProblem
from kvbm_cli.engine.process import _open_log


def test_hangup_that_the_parent_ignores_does_not_stop_serve(home):  # noqa: F811
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with serving(home) as program:
            program.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                program.wait(timeout=1.5)
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_closed_stderr_and_a_poor_encoding_are_no_bug(home):  # noqa: F811
    command = [*PROGRAM, "profile", "show", "demo", "--set", "description=日本"]
    ascii_only = {**environment(home), "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(command, env=ascii_only, capture_output=True).returncode == 0
    closed = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *PROGRAM, "profile", "show", "nope"], env=environment(home), capture_output=True
    )
    assert closed.returncode == 2


def test_a_log_must_be_a_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/full"), tmp_path / "fifo", tmp_path):
        with pytest.raises(EnvironmentProblem):
            _open_log(path)
    _open_log(Path("/dev/null")).close()


def test_a_server_whose_log_is_full_goes_on(monkeypatch):
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Full())
    Server._say(None, "stopping")  # type: ignore[arg-type]
