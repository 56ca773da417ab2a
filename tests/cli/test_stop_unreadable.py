"""`kvbm stop`, `status` and `logs` where the description of a run cannot be read, or names another process."""

import fcntl
import json
import subprocess
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from recorded_runs import facts, own
from terminal import HANGS_S, kvbm
from test_manage import status
from test_serve import RUNS, serving
from test_serve import home as home  # the fixture
from waiting import is_gone

from kvbm_cli.app import run
from kvbm_cli.runs.run_directory import FACTS, LOCK, MOST_BYTES, Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.system.process_identity import ProcessIdentity

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
