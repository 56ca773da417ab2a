"""Commands that speak to a run whose port, process id or control socket another program has: it receives nothing."""

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from json import dumps
from urllib.parse import urlsplit

import pytest
from recorded_runs import facts
from terminal import kvbm, kvbm_here
from test_serve import RUNS, serving
from test_serve import home as home  # the fixture
from waiting import eventually

from kvbm_cli.runs.run_directory import FACTS, LOCK, Runs
from kvbm_cli.runs.run_facts import RunFacts, RunState
from kvbm_cli.system.process_identity import ProcessIdentity

ASKED = [
    "cache pin mine-1 --text secret",
    "cache prefetch mine-1 --text secret",
    "cache ls mine-1",
    "cache clear mine-1 --yes",
    "cache release mine-1",
    "cache limit mine-1 10%",
]
SHOWN = ["top mine-1 --once", "plan mine-1", "status mine-1", "logs mine-1"]


class ForeignServer:
    """Another program. Keeps what it receives."""

    def __init__(self, listener: socket.socket) -> None:
        self.connections, self.received = 0, b""
        self.address, self._listener = listener.getsockname(), listener
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the test has ended
                return
            self.connections += 1
            with connection:
                while data := connection.recv(1 << 16):
                    self.received += data


@contextmanager
def foreign(address: str | tuple[str, int], family: int = socket.AF_INET) -> Iterator[ForeignServer]:
    with closing(socket.socket(family)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        yield ForeignServer(listener)
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def stranger() -> Iterator[ProcessIdentity]:
    """Another process of this user."""
    with subprocess.Popen(["sleep", "600"]) as process:
        found = ProcessIdentity.of(process.pid)
        assert found is not None
        yield found
        process.kill()


@pytest.mark.parametrize("how", ["stopped", "killed", "killed, and its process id reused"])
def test_nothing_is_sent_to_the_port_of_a_run_that_has_ended(home, how, stranger):
    with serving(home) as program:
        path = home / RUNS / "mine-1"
        program.code_after(signal.SIGTERM if how == "stopped" else signal.SIGKILL)
        known = RunFacts.from_json((path / FACTS).read_text())
        eventually(lambda: not any(one.is_alive() for one in known.processes.values()))
    if "reused" in how:
        launcher = replace(stranger, started=stranger.started - 1)
        (path / FACTS).write_text(replace(known, launcher=launcher).to_json())
        (path / LOCK).write_text(dumps(asdict(launcher)))
    with foreign(("127.0.0.1", urlsplit(known.url).port)) as server:
        for command in ASKED:
            outcome = kvbm_here(*command.split(), home=home)
            assert (outcome.exit_code, outcome.stderr) == (1, "error: `mine-1` is not running: it has ended\n")
        assert kvbm(*ASKED[0].split(), home=home) == kvbm_here(*ASKED[0].split(), home=home)
        for command in [*SHOWN, "stop mine-1"]:
            kvbm_here(*command.split(), home=home)
        assert (server.connections, server.received) == (0, b"")
    assert stranger.is_alive()


@pytest.mark.parametrize("is_https", [False, True])
def test_nothing_is_sent_to_another_program_at_the_port_of_a_living_run(tmp_path, stranger, monkeypatch, is_https):
    """Its launcher is another process, so that this one is not one of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "kvbm" / "runs").mkdir(parents=True)
    run = Runs(tmp_path / "kvbm").create("mine")
    engine_log = run.path / "engine.log"
    engine_log.touch()
    with foreign(("127.0.0.1", 0)) as server, foreign(str(run.path / "control-0-1.sock"), socket.AF_UNIX) as control:
        url = f"{'https' if is_https else 'http'}://127.0.0.1:{server.address[1]}"
        run.begin(facts(run.name, stranger, url=url, state=RunState.HEALTHY, logs={"engine": str(engine_log)}))
        run.close()
        said = {
            command: kvbm_here(*command.split(), home=tmp_path, XDG_STATE_HOME=str(tmp_path))
            for command in [*ASKED, *SHOWN]
        }
        assert server.connections > 0
        assert (server.received, control.received) == (b"", b"")
    assert all("another program listens there" in said[command].stderr for command in [*ASKED, "plan mine-1"]), said
    assert "another program listens there" in said["top mine-1 --once"].stdout
    assert "no answer" in said["status mine-1"].stdout
