"""Commands on a directory whose file system hangs: they say so after a deadline. A child that sleeps plays that."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from doctor_machine import machine
from filesystems import Unavailable, mounted
from test_serve import home as home  # the fixture
from test_serve import serving
from waiting import eventually

from kvbm.host.mounts import may_hang
from kvbm_cli.app import run
from kvbm_cli.doctor.command import doctor
from kvbm_cli.profile import machine_problems, preflight
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.system import answering

LIMIT_S = 30.0  # a file system that hangs does so for 600 s; a busy machine takes its time


@pytest.fixture
def hanging(monkeypatch):
    monkeypatch.setattr(answering, "LOOK", "import time; time.sleep(600)")
    monkeypatch.setattr(answering, "ANSWER_LIMIT_S", 0.2)
    monkeypatch.setattr(answering, "_silent", {})


@contextmanager
def mounted_and_obeying(directory):
    try:
        with mounted("fuse-obeys", directory) as point:
            yield point, (directory / "orders").write_text
            (directory / "orders").write_text("")
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_a_directory_that_answers_is_used_whatever_is_in_it(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert answering.answers(tmp_path)
    assert answering.answers(tmp_path / "missing")


@pytest.mark.parametrize("command", ["ls", "verify", "clear", "export-stats"])
def test_nothing_touches_a_path_of_the_command_line_before_its_file_system_has_answered(
    command, hanging, monkeypatch, tmp_path, capsys
):
    touched, stat = [], os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, *rest, **named: touched.append(str(path)) or stat(path, *rest, **named)
    )
    assert run(["cache", command, "--dir", str(tmp_path)]) == 1
    assert "does not answer within" in capsys.readouterr().err
    assert str(tmp_path) not in touched


def test_an_engine_may_start_although_its_directory_hangs(hanging, tmp_path):
    file = tmp_path / "profile.yaml"
    disk = f"{{directory: {tmp_path}/disk, blocks: 10}}"
    file.write_text(
        f"engine: {{kind: embedded, model: 'synthetic:tiny'}}\ntiers: {{host: {{blocks: 8}}, disk: {disk}}}\n"
    )
    resolved = resolve(str(file))
    sizing, mistakes = preflight.examine_here(resolved)
    assert not mistakes
    # The other problems of a machine are not asked for: they would touch more directories.
    (problem,) = machine_problems._disk(resolved.profile.tiers.disk, sizing)
    assert problem.severity is machine_problems.Severity.WARNING
    assert "does not answer within" in problem.error(resolved).message


@pytest.mark.parametrize("what", ["open", "reads", "changes", "list"])
def test_an_empty_or_missing_directory_that_hangs_is_noticed(tmp_path, what):
    with mounted_and_obeying(tmp_path) as (point, order):
        (point / "disk").mkdir()
        order(f"hang-{what}")
        for name in ("disk", "missing"):
            began_s = time.monotonic()
            assert not answering.answers(point / name, changes=True)
            assert time.monotonic() - began_s < LIMIT_S


@pytest.mark.parametrize("what", ["writes", "fsync", "changes"])
def test_commands_that_change_a_directory_ask_for_more_than_a_read(tmp_path, what):
    """A file system that answers reads, and hangs in everything else."""
    with mounted_and_obeying(tmp_path) as (point, order):
        (point / "disk").mkdir()
        order(f"hang-{what}")
        assert answering.answers(point / "disk")
        assert not answering.answers(point / "disk", changes=True)


def test_a_look_that_changes_leaves_nothing(tmp_path):
    assert answering.answers(tmp_path, changes=True)
    assert list(tmp_path.iterdir()) == []


# Whatever a command does with a path: a profile, a directory of a model or a store, a file to write. `ok` answers.
HUNG = [
    *("profile check {hung}/p.yaml", "serve --dry-run --profile={hung}/p.yaml", "size {hung}/model"),
    *("serve --profile demo --log {hung}/log", "cache ls --dir {hung}"),
    *("profile check {ok}", "size -p {ok}", "serve --dry-run -p {ok}", "doctor -p {ok}"),
]
ON_ANY_FILE_SYSTEM = ["cache ls --url file://{hung}", "doctor --url file://{hung}"]
OF_RUNS = ["status", "stop --all", "logs", "serve --profile demo", "profile check demo"]


@pytest.mark.parametrize("command", [*HUNG, *OF_RUNS, *ON_ANY_FILE_SYSTEM])
def test_what_hangs_is_named(command, hanging, monkeypatch, tmp_path, capsys):
    hung, ok = tmp_path / "hung", tmp_path / "ok.yaml"
    ok.write_text(f"engine: {{kind: embedded, model: {hung}/model}}\ntiers: {{host: {{blocks: 8}}}}\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(hung if command in OF_RUNS else tmp_path))
    if command not in ON_ANY_FILE_SYSTEM:
        monkeypatch.setattr(answering, "may_hang", lambda path: path.startswith(str(hung)))
    began_s = time.monotonic()
    assert run(command.format(hung=hung, ok=ok).split()) == 1
    shown = capsys.readouterr()
    assert time.monotonic() - began_s < LIMIT_S
    if "doctor --url" in command:
        assert "the filesystem does not respond" in " ".join(shown.out.split())
    else:
        assert f"{hung}{'/kvbm' if command in OF_RUNS else ''}" in shown.err
        assert "does not answer within" in shown.err
    assert run(["--version"]) == 0


def test_the_doctor_asks_the_directories_of_all_tiers_in_parallel(hanging, monkeypatch, tmp_path, capsys):
    """Several that hang take no longer than one."""
    events, popen = [], subprocess.Popen

    class Asked(popen):
        def __init__(self, command, **rest):
            super().__init__(command, **rest)
            events.append(Path(command[-2]).name)

        def wait(self, timeout=None):
            events.append("wait")
            return super().wait(timeout)

    monkeypatch.setattr(answering.subprocess, "Popen", Asked)
    file = tmp_path / "profile.yaml"
    tiers = f"{{disk: {{directory: {tmp_path}/disk, blocks: 10}}, shared: {{url: 'file://{tmp_path}/shared'}}}}"
    file.write_text(f"engine: {{kind: embedded, model: 'synthetic:tiny'}}\ntiers: {tiers}\n")
    options = {"directory": None, "as_json": True, "is_quick": False, "write": None}
    assert doctor([str(file)], [], machine=machine(tmp_path), **options) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    silent = [one["group"] for one in checks if "does not respond" in one["finding"]]
    assert silent == ["disk", "store"]
    assert events == ["disk", "shared", "wait", "wait"]


def test_a_file_system_that_may_hang_is_found_through_links_and_not_touched(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    lines = ["1 1 0:1 / / rw - ext4 /dev/a rw", f"2 1 0:2 / {tmp_path}/nfs rw - nfs4 server:/a rw"]
    table.write_text("\n".join(lines))
    (tmp_path / "link").symlink_to("nfs/models")
    (tmp_path / "there").symlink_to(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    read, followed = os.readlink, []
    monkeypatch.setattr(os, "readlink", lambda path: followed.append(path) or read(path))
    for name in ("nfs", "nfs/a", "there/a", "x/../nfs"):
        assert may_hang(f"{tmp_path}/{name}", table)
    for name in ("nfs2", "loop/a", "new/a"):
        assert not may_hang(f"{tmp_path}/{name}", table)
    assert not any(path.startswith(f"{tmp_path}/nfs/") for path in followed)
    table.write_text("1 1 0:1 / / rw - fuse.x x rw")
    assert may_hang("/", table)


def test_a_directory_that_did_not_answer_is_not_asked_again_by_the_same_command(hanging, monkeypatch):
    assert not answering.answers(Path("/tmp"))
    monkeypatch.setattr(answering, "ANSWER_LIMIT_S", 60.0)
    began_s = time.monotonic()
    assert not answering.answers(Path("/tmp"))
    assert time.monotonic() - began_s < LIMIT_S


ENDS_WITHIN_S = 60.0
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
        assert program.wait(ENDS_WITHIN_S) == 7
        assert time.monotonic() - began_s < ENDS_WITHIN_S
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
            program.wait(ENDS_WITHIN_S)
            assert time.monotonic() - began_s < ENDS_WITHIN_S
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
