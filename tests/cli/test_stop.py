"""`kvbm stop` and the next `kvbm serve` where a process was stopped, killed or hangs, or a directory was removed.

`kvbm stop`, `status` and `logs` where the description of a run cannot be read, or names another process.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from recorded_runs import facts, own
from terminal import HANGS_S, PROGRAM, environment, kvbm, kvbm_here
from test_manage import status
from test_runs import states
from test_serve import LONG_STOP, RUNS, Serving, serving, started
from test_serve import home as home  # the fixture
from waiting import eventually, is_gone

from kvbm_cli.app import run
from kvbm_cli.engine.process import choose_port
from kvbm_cli.runs import stop
from kvbm_cli.runs.run_directory import FACTS, LOCK, MOST_BYTES, Runs
from kvbm_cli.runs.run_facts import RunFacts, RunState
from kvbm_cli.system.process_identity import ProcessIdentity

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


DAMAGED = {
    "empty": b"",
    "half": b'{"name": "mine-1", "prof',
    "huge": b" " * (2 * MOST_BYTES),
    "no text": bytes(range(256)),
    "later version": b'{"format": 2, "run": {}}',
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("options", [("--all",), ("mine",)], ids=" ".join)
def test_engine_whose_description_is_damaged_is_stopped(home, what, options):
    with serving(home) as program:
        (engine,) = [one["processes"]["engine"] for one in status(home)]  # type: ignore[index]
        (home / RUNS / "mine-1" / FACTS).write_bytes(DAMAGED[what])
        outcome = kvbm("stop", *options, home=home)
        assert outcome.exit_code == 0, outcome
        assert outcome.stdout.startswith("mine-1 stopped after ")
        assert "no engine" not in outcome.stderr
        assert program.wait(timeout=HANGS_S) == 0
        assert is_gone(engine)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "kvbm" / "runs").mkdir(parents=True)
    return Runs(tmp_path / "kvbm")


@pytest.fixture
def processes():
    """Processes that end at SIGTERM, as launchers."""
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(2)]
        yield started
        for process in started:
            process.kill()


def identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = ProcessIdentity.of(process.pid)
    assert found is not None
    return found


def written(runs: Runs, launcher: ProcessIdentity) -> Path:
    """A run as this launcher has written it. The lock is not held."""
    made = runs.create("demo")
    made.begin(facts(made.name, launcher, state=RunState.HEALTHY))
    made.close()
    (made.path / LOCK).write_text(json.dumps(asdict(launcher)))
    return made.path


def test_all_others_are_stopped_when_one_cannot_be_found(runs, processes, capsys):
    unknown, known = (written(runs, identity(process)) for process in processes)
    (unknown / FACTS).write_text("half")
    with open(unknown / LOCK, "w") as lock:  # of an earlier version: held, and without the name of its holder
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(["stop", "--all"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{known.name} was killed") or shown.out.startswith(f"{known.name} stopped")
    assert f"cannot stop `{unknown.name}`: `{unknown / FACTS}` is damaged; an engine is running there" in shown.err
    assert "hint: find its launcher with" in shown.err
    assert "no engine is running" not in shown.err
    assert processes[0].poll() is None
    assert processes[1].wait(timeout=HANGS_S) == -15


@pytest.mark.parametrize("command", ["stop --all", "stop demo-1"])
def test_process_that_has_the_pid_of_a_launcher_is_not_signalled(runs, processes, command, capsys):
    own = identity(processes[0])
    path = written(runs, replace(own, started=own.started - 1))
    assert run(command.split()) == 0
    assert ("no engine is running" if command == "stop --all" else "has already ended") in capsys.readouterr().err
    (path / FACTS).write_text("half")
    with open(path / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(command.split()) == 1
    assert "cannot stop `demo-1`" in capsys.readouterr().err
    assert processes[0].poll() is None


def test_all_others_are_stopped_when_one_runs_elsewhere_or_belongs_to_another_user(
    runs, processes, monkeypatch, capsys
):
    foreign, known = (identity(process) for process in processes)
    elsewhere = written(runs, replace(known, host="other-machine"))
    written(runs, foreign)
    written(runs, known)
    signal = ProcessIdentity.signal

    def refused(process: ProcessIdentity, number: int) -> bool:
        if process == foreign:
            raise PermissionError(1, "Operation not permitted")
        return signal(process, number)  # type: ignore[arg-type]

    monkeypatch.setattr(ProcessIdentity, "signal", refused)
    with open(elsewhere / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(["stop", "--all"]) == 1
    shown = capsys.readouterr()
    assert "`demo-1` runs on other-machine or in another container" in shown.err
    assert "`demo-2` belongs to another user" in shown.err
    assert shown.out.startswith("demo-3 ")
    assert processes[1].wait(timeout=HANGS_S) == -15


def test_lock_that_cannot_be_opened_is_not_taken_for_free(runs, capsys):
    path = written(runs, own())
    (path / FACTS).write_text("half")
    (path / LOCK).unlink()
    assert run(["stop", "--all"]) == 1
    assert "an engine may be running there" in capsys.readouterr().err
    assert run(["status"]) == 0
    assert "unreadable" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": "x"}', "[" * 100_000, "\x00"])
def test_lock_that_names_nothing_stops_no_command(runs, content, capsys):
    path = written(runs, own())
    (path / FACTS).write_text("half")
    (path / LOCK).write_text(content)
    for command, exit_code in (("status", 0), ("status demo-1", 1), ("logs demo-1", 1), ("stop --all", 0)):
        assert run(command.split()) == exit_code
        assert "is damaged; its engine has ended" in capsys.readouterr().err


HELD = ("--set", "engine.environment.FAKE=held_stop")


@pytest.fixture(params=["port", "disk cache"])
def shared(home, request):
    """What two engines share, and the options for it."""
    if request.param == "port":
        port = choose_port("127.0.0.1", 0)
        yield f"port {port}", ["--port", str(port)]
    else:
        yield "disk cache", ["--set", LONG_STOP % home]


def test_start_waits_for_an_engine_that_is_stopping(home, shared):
    resource, options = shared
    with serving(home, "--set", LONG_STOP % home, *options, *HELD) as first:
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
    options = ["--set", LONG_STOP % home]
    with serving(home, *options), serving(home, *options) as second:
        second.send_signal(signal.SIGTERM)
        assert "waiting for" not in second.stderr.read()


def test_start_waits_for_what_a_killed_launcher_has_left(home):
    """The guard is stopped, so nobody removes the engine's child until it continues."""
    options = ["--set", LONG_STOP % home]
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


def foreign_facts(path: Path, what: str, strangers: list[ProcessIdentity]) -> None:
    """Write a valid description that names other processes."""
    known = RunFacts.from_json((path / FACTS).read_text())
    changes = {
        "others": {"launcher": strangers[0], "processes": {"engine": strangers[1], "guard": strangers[1]}},
        "only others of the engine": {"processes": {"engine": strangers[1]}},
        "nobody": {"launcher": replace(strangers[0], pid=2**22 + 1), "processes": {}},
        "others elsewhere": {"launcher": replace(strangers[0], host="other-machine"), "processes": {}},
        "others, and the end": {"launcher": strangers[0], "processes": {}, "state": RunState.ENDED},
    }
    (path / FACTS).write_text(replace(known, **changes[what]).to_json())  # type: ignore[arg-type]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "what", ["others", "only others of the engine", "nobody", "others elsewhere", "others, and the end"]
)
@pytest.mark.parametrize("options", [("--all",), ("mine-1",)], ids=" ".join)
def test_engine_whose_description_names_other_processes_is_stopped_and_they_are_not(home, processes, what, options):
    with serving(home, *CHILDREN) as program:
        own = members(program)
        foreign_facts(home / RUNS / "mine-1", what, [identity(one) for one in processes])
        outcome = kvbm("stop", *options, home=home)
        assert outcome.exit_code == 0, outcome
        assert outcome.stdout.startswith("mine-1 stopped after ")
        assert program.wait(timeout=HANGS_S) == 0
        assert all(is_gone(process.pid) for process in own.values())
    assert [one.poll() for one in processes] == [None, None]


@pytest.mark.parametrize("lock", ["free", "removed"])
def test_processes_that_no_description_names_are_named_by_stop(home, processes, lock, monkeypatch):
    """The launcher was killed and its guard is stopped; a process of the engine lives."""
    monkeypatch.setattr(stop, "LINGER_S", 0.1)
    with serving(home, *CHILDREN) as program:
        own = members(program)
        own["guard"].suspend()
        program.kill()
        program.wait()
        foreign_facts(home / RUNS / "mine-1", "others", [identity(one) for one in processes])
        if lock == "removed":
            (home / RUNS / "mine-1" / LOCK).unlink()
        own_pids = sorted([own["guard"].pid, own["child"].pid])
        for options in ("--all",), (), ("mine-1",):
            outcome = kvbm_here("stop", *options, home=home)
            assert outcome.exit_code == 1, outcome
            assert f"processes of `mine-1` are still running: {own_pids[0]}, {own_pids[1]}" in outcome.stderr
            assert "no engine is running" not in outcome.stderr
        assert [one.poll() for one in processes] == [None, None]
        own["guard"].resume()
        eventually(lambda: is_gone(own["guard"].pid))
    outcome = kvbm_here("stop", "--all", home=home)
    assert "still running" not in outcome.stderr
    assert ("no engine is running" in outcome.stderr) == (lock == "free"), "without a lock, one may run elsewhere"
