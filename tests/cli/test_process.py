"""EngineProcess around a stand-in engine: starts, failures, signals, and that nothing outlives its parent."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_server import FakeServer
from terminal import FAKE_ENGINE, HANGS_S
from waiting import eventually, is_gone, own_children

from kvbm.child.start import CANNOT_RUN, command_line
from kvbm.engines.launch_plan import LaunchPlan
from kvbm.errors import EngineError, EnvironmentProblem
from kvbm_cli.engine.engine_log import readable_phase
from kvbm_cli.engine.process import EPHEMERAL_PORTS, EngineProcess, choose_port, engine_environment
from kvbm_cli.system.guard_process import GUARD, GuardProcess
from kvbm_cli.system.open_files import is_served_by

DEADLINE_S = HANGS_S


def fake_plan(mode: str = "", port: int | None = None) -> LaunchPlan:
    port = choose_port("127.0.0.1", 0) if port is None else port
    url = f"http://127.0.0.1:{port}"
    argv = (sys.executable, str(FAKE_ENGINE), "--port", str(port))
    return LaunchPlan(argv, {"FAKE": mode}, url, "m")


def test_healthy_engine_is_stopped_by_sigterm_at_the_latest_when_the_context_is_left(tmp_path):
    seen: list[str] = []
    for stops in (True, False):
        with EngineProcess.start(fake_plan(), log_path=tmp_path / "log") as engine:
            engine.wait_healthy(DEADLINE_S, seen.append)
            assert engine.poll() is None
            assert not stops or engine.stop() == 0
        assert engine.poll() == 0
    assert set(seen) <= {"starting", "loading the weights"}


def test_a_stranger_on_the_port_is_not_taken_for_the_engine(tmp_path):
    with FakeServer() as stranger:
        plan = fake_plan("hang", port=stranger.port)
        with EngineProcess.start(plan, log_path=tmp_path / "log") as engine:
            with pytest.raises(EngineError, match="not healthy after 1 s"):
                engine.wait_healthy(1)
            assert urllib.request.urlopen(plan.health_url).status == 200


def error_of(plan: LaunchPlan, log: Path, deadline_s: float = DEADLINE_S) -> EngineError:
    """What is said of an engine that does not get healthy. It is gone then."""
    with EngineProcess.start(plan, log_path=log) as engine:
        with pytest.raises(EngineError) as caught:
            engine.wait_healthy(deadline_s)
        assert is_gone(engine.pid)
    return caught.value


def test_crash_during_the_start_reports_the_log_at_once_without_that_of_an_earlier_run(tmp_path):
    log_path = tmp_path / "log"
    log_path.write_text("an old story\n")
    error = error_of(fake_plan("crash"), log_path)
    assert error.message.splitlines()[1:] == [
        "  out of memory",
        f"  {log_path}, last lines:",
        "    loading the weights",
        "    Traceback (most recent call last):",
        "    MemoryError: not enough of it",
    ]
    assert error.exit_code == 1


def test_what_an_engine_says_before_we_are_ready_is_shown_too(tmp_path, monkeypatch):
    def start_guard_late(*arguments: Any, **options: Any) -> None:
        eventually(lambda: "MemoryError" in (tmp_path / "log").read_text())
        start_guard(*arguments, **options)

    start_guard = GuardProcess.__init__
    monkeypatch.setattr(GuardProcess, "__init__", start_guard_late)
    assert "MemoryError: not enough of it" in error_of(fake_plan("crash"), tmp_path / "log").message


def test_the_error_that_began_it_is_shown_where_a_long_farewell_follows(tmp_path):
    assert error_of(fake_plan("long_farewell"), tmp_path / "log").message.splitlines()[-3:] == [
        "    farewell 19",
        "  first error before them:",
        "    (Worker pid=7) ERROR 11-21 18:03:38 [worker.py:3] the device is gone",
    ]


def test_engine_that_never_gets_healthy_is_killed_in_time(tmp_path):
    error = error_of(fake_plan("hang"), tmp_path / "log", 0.5)
    assert "the engine was not healthy after 0.5 s" in error.message


def test_stubborn_engine_is_killed_when_patience_ends(tmp_path):
    with EngineProcess.start(fake_plan("stubborn"), log_path=tmp_path / "log") as engine:
        engine.wait_healthy(DEADLINE_S)
        assert engine.stop(timeout_s=0.2) == 128 + signal.SIGKILL


def test_engine_stops_as_usual_without_its_guard(tmp_path):
    with EngineProcess.start(fake_plan(), log_path=tmp_path / "log") as engine:
        engine.wait_healthy(DEADLINE_S)
        guard = next(child for child in own_children() if str(GUARD) in child.cmdline())
        guard.kill()
        assert engine.stop() == 0
    assert is_gone(guard.pid)


def test_program_is_not_run_for_a_parent_that_is_gone(tmp_path):
    marker = tmp_path / "ran"
    nobody = 2**22 + 1  # above the largest process id there can be
    command = command_line(["touch", str(marker)])
    command[command.index(str(os.getpid()))] = str(nobody)
    assert subprocess.run(command).returncode == CANNOT_RUN
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changed", "log", "message", "hint"),
    [
        ({"argv": ("/no/such/python",)}, "log", "`/no/such/python` is not a program", None),
        (
            {"libraries": ("os", "no_such_library"), "install": "pip install it"},
            *("log", "the engine needs no_such_library", "`pip install it`"),
        ),
        ({}, "file/log", "cannot write the engine's log", None),  # it became so after the check of the profile
    ],
)
def test_engine_that_cannot_be_started_is_a_problem_of_the_environment(tmp_path, changed, log, message, hint):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem) as caught:
        EngineProcess.start(replace(fake_plan(), **changed), log_path=tmp_path / log)
    assert caught.value.message.startswith(message)
    assert hint in (None, caught.value.hint)


def test_engine_gets_the_profile_and_of_our_variables_only_the_credentials_of_its_store():
    caller = {"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_OBJECT_BUCKET": "kv", "A": "caller", "B": "caller"}
    plan = LaunchPlan((), {"A": "profile"}, "", "")
    seen: Mapping[str, str] = engine_environment(plan, {**caller, "DYN_KVBM_OBJECT_SECRET_KEY": "hunter2"})
    expected = {"A": "profile", "B": "caller", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    assert seen == {**expected, "DYN_KVBM_OBJECT_SECRET_KEY": "hunter2"}


def test_taken_port_is_named():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(EnvironmentProblem) as caught:
            choose_port("127.0.0.1", port)
    assert caught.value.message == f"cannot listen on 127.0.0.1 port {port}: address already in use"
    assert choose_port("127.0.0.1", port) == port


def test_chosen_port_is_none_that_a_connection_may_get_before_the_engine_listens():
    first, last = map(int, EPHEMERAL_PORTS.read_text().split())
    assert not {choose_port("127.0.0.1", 0) for _ in range(100)} & set(range(first, last + 1))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70, "..", "[::1]"])
def test_host_that_is_none_is_named(host):
    with pytest.raises(EnvironmentProblem) as caught:
        choose_port(host, 0)
    assert caught.value.message.startswith(f"cannot listen on {host}: ")


LOG = """\
(Worker pid=8688) INFO 11-21 18:03:33 [cpu_model_runner.py:68] Starting to load model /m...
Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00, 42.65it/s]
\x1b[36m(APIServer pid=1)\x1b[0;0m INFO 11-21 18:02:27 [model.py:2] Using max model len 4096
loading the weights
01:47:19 kvbm: 3 blocks were written
INFO 11-21 18:02:27 [progress.py:2] kvbm: taken 1.0 of 2.0 GB
(APIServer pid=7962) INFO 11-21 18:02:27 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █
(APIServer pid=7962) WARNING 11-21 18:02:28 [cpu.py:224] Triton is not installed.
/lib/python3.11/api_server.py:24: DeprecationWarning: `vllm` is deprecated and will like
  warnings.warn(
W1121 18:03:32.942000 8688 torch/_library/triton.py:53] Triton not available, none
"""
PHASES = """\
Starting to load model /m...
Loading safetensors checkpoint shards:  50% Completed
Using max model len 4096
loading the weights
3 blocks were written
taken 1.0 of 2.0 GB
"""


def test_log_lines_are_phases_in_words_or_none():
    phases = list(map(readable_phase, LOG.splitlines()))
    assert phases == PHASES.splitlines() + [None] * 5


def test_a_guard_that_was_killed_is_replaced(tmp_path):
    with EngineProcess.start(fake_plan("children"), log_path=tmp_path / "log") as engine:
        engine.wait_healthy(DEADLINE_S)
        first, child = engine.pids()["guard"], psutil.Process(engine.pid).children()[0]
        os.kill(first, signal.SIGKILL)
        eventually(lambda: engine.poll() is None and engine.pids()["guard"] != first)
        assert f"kvbm: the guard process {first} was killed" in (tmp_path / "log").read_text()
        assert engine.stop() == 0
    assert is_gone(child.pid)


US = [os.getpid()]
NOBODY = [2**22 + 1]


def listener(address: str, port: int = 0, *, shares_port: bool = False) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if shares_port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((address, port))
    made.listen()
    return made


@pytest.mark.parametrize(
    ("bound", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")],
)
def test_a_listening_process_is_found_by_the_address_that_reaches_it(bound, asked):
    with closing(listener(bound)) as made:
        port = made.getsockname()[1]
        assert is_served_by(US, address=asked, port=port)
        assert not is_served_by(NOBODY, address=asked, port=port)
    assert not is_served_by(US, address=asked, port=port)


def test_another_address_of_the_same_port_is_somebody_else():
    with closing(listener("127.0.0.2")) as made:
        assert not is_served_by(US, address="127.0.0.1", port=made.getsockname()[1])


def test_the_socket_of_this_very_address_gets_the_connections():
    script = "import socket, sys; s = socket.create_server(('127.0.0.1', 0), reuse_port=True)\n"
    script += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        port = int(other.stdout.readline())
        with closing(listener("0.0.0.0", port, shares_port=True)):
            assert is_served_by([other.pid], address="127.0.0.1", port=port)
            assert not is_served_by(US, address="127.0.0.1", port=port)
            assert is_served_by(US, address="127.0.0.3", port=port)
        with closing(listener("127.0.0.1", port, shares_port=True)):
            assert not is_served_by(US, address="127.0.0.1", port=port), "it gets only a part of the connections"
            assert is_served_by([*US, other.pid], address="127.0.0.1", port=port)
        other.communicate()


def test_a_connection_is_no_listener():
    with closing(listener("127.0.0.1")) as made, socket.create_connection(made.getsockname()) as connection:
        assert not is_served_by(US, address="127.0.0.1", port=connection.getsockname()[1])
