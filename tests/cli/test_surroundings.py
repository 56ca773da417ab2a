"""Commands where the machine refuses: no space, read-only, no home, no streams, no files.

An entry of `snapshots/surroundings.txt` is what a shell does before each of the commands below it. They have an exit
code, and a part of what is said. Never a traceback, never a "bug", nothing half-written, nothing left behind. `full`
and `frozen` make a directory so in a mount namespace of the command's own; where this user may not have one, their rows
are skipped.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from recorded_runs import facts
from terminal import (
    FAKE_ENGINE,
    HANGS_S,
    PROGRAM,
    assert_said,
    environment,
    given_in,
    kvbm,
    kvbm_here,
    on_a_terminal,
    steps_of,
    stored_entries,
)
from test_cache import make_cache
from test_mistakes import what_lies_in
from test_serve import MODEL

from kvbm_cli.app import run
from kvbm_cli.runs import status
from kvbm_cli.runs.run_directory import FACTS, RunDirectory, Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.system.filesystem import NO_HOME, problem_of
from kvbm_cli.system.process_identity import ProcessIdentity
from kvbm_cli.terminal.streams import BROKEN_PIPE

PRELUDE = """\
full() { mkdir -p "$1" new; mount -t tmpfs -o size=2m,mode=700 none new; cp -a "$1/." new; mount --move new "$1"
         rmdir new; cd .; cat /dev/zero > "$1/filler"; }
frozen() { mkdir -p "$1"; mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; cd .; }
closed() { mkdir closed; echo "extends: demo" > closed/mine.yaml; echo "extends: ./closed/mine.yaml" > below.yaml
           chmod 0 closed; }
"""


@dataclass(frozen=True)
class Row:
    """`said` is on stderr, or on stdout where the exit code is 0."""

    surroundings: str
    command: str
    exit_code: int
    said: str

    @property
    def needs_mounts(self) -> bool:
        return self.surroundings.startswith(("full", "frozen"))


SERVE = "serve -p mine.yaml"
ROWS = [
    Row(surroundings, line.removeprefix("kvbm "), int(code.removeprefix("exit code: ")), said.rstrip())
    for surroundings, text in stored_entries("surroundings").items()
    for line, (code, _, said) in ((line, shown.partition("\n")) for line, shown in steps_of(text))
]


@functools.cache
def may_mount() -> bool:
    tried = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(tried, capture_output=True).returncode == 0


@pytest.fixture
def home(tmp_path):
    for name in ("model", "work", "caches", "temporary", ".local/state/kvbm/runs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".local/state/kvbm/runs/lock").touch()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "mine.yaml").write_text(
        f"engine:\n  model: {tmp_path}/model\n  python: {FAKE_ENGINE}\n  arguments: {{num_blocks: 64}}\n"
        "  environment: {FAKE: own_words}\ntiers: {host: {capacity: 64MiB}}\nserver: {port: auto}\n"
    )
    (tmp_path / "work" / "old.yaml").write_text("extends: demo\n")
    make_cache(tmp_path / "caches", "00000000000000aa", model="m", salts=[None, "alice"], age_s=60)
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.surroundings}: {row.command}")
def test_refusal_is_told_as_one(row, home):
    if row.needs_mounts and not may_mount():
        pytest.skip("needs a mount namespace, which this user may not have")
    if row.surroundings == "closed" and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    powerless = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
    shell = ["unshare", "-rm", "sh", "-c"] if row.needs_mounts else ["bash", "-c"]
    shell = [*powerless, *shell] if row.surroundings == "closed" else shell
    variables = environment(home, TMPDIR=str(home / "temporary"), DYN_KVBM_CPU_CACHE_GB="1")
    if "import-env" not in row.command:
        del variables["DYN_KVBM_CPU_CACHE_GB"]
    done = subprocess.run(
        [*shell, f'{PRELUDE}\n{row.surroundings}; exec "$@"', "sh", *PROGRAM, *row.command.split()],
        cwd=home,
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        stdin=subprocess.DEVNULL,
    )
    if row.surroundings == "closed":
        (home / "closed").chmod(0o700)
    said = done.stdout + done.stderr
    assert row.said in said
    assert done.returncode == row.exit_code, said
    assert not any(sign in said for sign in ("Traceback", "a bug", "Exception ignored")), said
    assert [path for path in left_in(home) if not path.startswith(MAY_BE_LEFT)] == []


MADE = {
    "model",
    "work",
    "caches",
    "temporary",
    ".local",
    "mine.yaml",
    "new",
    "closed",
    "closed/mine.yaml",
    "below.yaml",
}
MAY_BE_LEFT = (".local/state/kvbm/runs/mine-1",)  # of an engine that was started, or of a start that was refused late


def left_in(home: Path) -> list[str]:
    found = [str(Path(path).relative_to(home)) for path in what_lies_in(home)]
    return [path for path in found if not path.startswith(("model", "caches", "closed")) and path not in KNOWN]


KNOWN = {*MADE, "work/old.yaml", *(str(path) for path in Path(".local/state/kvbm/runs/lock").parents)}


def test_names_that_are_no_text_are_used_or_refused(home):
    odd = os.fsdecode(b"\xff\n")
    for name in ("mine.yaml", "caches"):
        (home / name).rename(home / f"{odd}{name}")
    for arguments, exit_code, said in (
        (["serve", "-p", f"{odd}mine.yaml"], 1, "the engine exited before it was healthy"),
        (["serve", "-p", "demo", "--set", f"description={odd}"], 2, "`description` must be UTF-8 text"),
        (["serve", "-p", "demo", "--set", f"engine.environment.A={odd}"], 2, "must be UTF-8 text, not `\\udcff`"),
        (["cache", "export-stats", "--dir", f"{odd}caches", "--format", "csv", "--output", "stats.csv"], 0, ""),
    ):
        outcome = kvbm(*arguments, home=home)
        assert said in outcome.stderr
        assert outcome.exit_code == exit_code
    assert b"\xff\ncaches" in (home / "stats.csv").read_bytes()
    (kept,) = home.glob(".local/state/kvbm/runs/*/profile.yaml")
    assert run(["profile", "check", str(kept)]) == 0


def test_output_that_nobody_reads_stops_the_engine_and_is_no_bug(home):
    (home / "mine.yaml").write_text((home / "mine.yaml").read_text().replace("own_words", "none"))
    closed = f"exec {shlex.join(PROGRAM)} {SERVE} > >(exec <&-; sleep 1)"
    done = subprocess.run(["bash", "-c", closed], cwd=home, env=environment(home), capture_output=True, timeout=HANGS_S)
    assert done.returncode == BROKEN_PIPE
    written = json.loads((home / ".local/state/kvbm/runs/mine-1" / FACTS).read_text())
    assert (written["state"], written["exit_code"]) == ("ended", BROKEN_PIPE)


def test_no_home_is_no_bug(home, monkeypatch, capsys):
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    for command in ("status", "stop", "logs", "cache ls"):
        assert run(command.split()) == 1
        assert capsys.readouterr().err.startswith("error: no home directory")
    assert run(["profile", "check", "demo"]) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", ["profile list", "profile show demo", "size -p demo", "cache ls --dir caches"])
def test_a_narrow_terminal_is_no_bug(command, home):
    assert on_a_terminal(*command.split(), home=home, columns=20)


def test_a_profile_that_is_half_written_holds_nobody_up(tmp_path, capsys):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"exec > {pipe}; echo engine:; exec sleep 60"]) as writer:
        assert run(["profile", "check", str(pipe)]) == 2
        writer.kill()
    assert "pipe.yaml`: the process that writes this pipe is too slow\n" in capsys.readouterr().err


def test_a_profile_of_a_slow_shell_pipe_is_read(home):
    command = f"{shlex.join(PROGRAM)} profile check <(sleep 1.5; cat mine.yaml)"
    done = subprocess.run(["bash", "-c", command], cwd=home, env=environment(home), capture_output=True, text=True)
    assert "no mistakes found" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["fifo", "nested", "huge"])
def test_a_model_whose_configuration_is_odd_is_refused(name, home):
    config = home / "model" / "config.json"
    config.unlink()
    if name == "fifo":
        os.mkfifo(config)
    else:
        config.write_text("[" * 100_000 if name == "nested" else " " * (17 << 20))
    outcome = kvbm_here("profile", "check", "mine.yaml", home=home)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("error: `engine.model`: ")
    assert "config.json" in outcome.stderr


def test_no_process_no_thread_and_no_memory_are_no_bugs():
    for error in (
        BlockingIOError(11, "x"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        RuntimeError(NO_HOME),
    ):
        found = problem_of(error)
        assert found.hint
    refused = problem_of(PermissionError(13, "Permission denied", "/a"))
    assert (refused.message, refused.hint) == (
        "cannot use `/a`: permission denied",
        "check the permissions with `namei -l /a`",
    )
    assert problem_of(ValueError("x")) is None
    assert problem_of(OSError(9, "Bad file descriptor")) is None


ALL, ONE = ["status", "--all"], ["status", "demo-1"]
DAMAGED = {
    "nothing": lambda content: "",
    "nested": lambda content: "[" * 100_000,
    "an address that is none": lambda content: {**content, "url": "http://[::1"},
    "a port that is none": lambda content: {**content, "url": "http://127.0.0.1:99999"},
    "no logs": lambda content: {**content, "logs": {}},
    "a log that is no path": lambda content: {**content, "logs": {"engine": "a\0b"}},
    "a time beyond all": lambda content: {**content, "started_s": 1e300},
    "a time in words": lambda content: {**content, "ended_s": "soon"},
    "a name that is a number": lambda content: {**content, "name": 5},
    "a state of a later version": lambda content: {**content, "state": "hibernating", "format": 99},
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_run_that_cannot_be_read_is_told_of(what, tmp_path, monkeypatch, capsys):
    file = written_run(tmp_path, monkeypatch)
    damaged = DAMAGED[what](json.loads(file.read_text()))
    file.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    why = {"nothing": "is empty", "a state of a later version": "has the format of another version"}
    expected = f"`{file}` {why.get(what, 'is damaged')}; its engine has ended"
    for command, exit_code in (("status --all", 0), ("stop --all", 0), ("status demo-1", 1), ("logs demo-1", 1)):
        assert run(command.split()) == exit_code
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_run_that_cannot_be_read_is_listed(is_alive, tmp_path, monkeypatch, capsys):
    file = written_run(tmp_path, monkeypatch)
    file.write_text("half of it")
    launcher = RunDirectory(file.parent) if is_alive else None
    for command, is_listed in (("status", is_alive), ("status --all", True)):
        assert run(command.split()) == 0
        seen = capsys.readouterr()
        assert (["demo-1", "unreadable"] in [line.split()[:2] for line in seen.out.splitlines()]) == is_listed
        engine = "an engine is running there" if is_alive else "its engine has ended"
        problem = f"`{file}` is damaged; {engine}"
        assert f"warning: {problem}\n" in seen.err
        assert run([*command.split(), "--json"]) == 0
        listed = {"run": "demo-1", "state": "unreadable", "is_locked": is_alive, "problem": problem}
        found = [{**listed, "directory": str(file.parent)}] if is_listed else []
        assert json.loads(capsys.readouterr().out) == found
    if launcher is not None:
        launcher.close()


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_a_clock_that_jumps_does_not_change_the_age_of_a_run(jump_s, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "kvbm" / "runs").mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as launcher:
        made = Runs(tmp_path / "kvbm").create("demo")
        made.begin(facts(made.name, ProcessIdentity.of(launcher.pid), started_s=time.time() + jump_s))
        assert run(["status"]) == 0
        assert re.search(r"demo-1  starting +\d+ +[0-9] s ", capsys.readouterr().out)
        made.close()
        launcher.kill()


@pytest.mark.parametrize("count", ["NaN", "1e999", "-1", "9" * 400, "many"])
def test_metrics_that_are_no_counts_are_ignored(count):
    line = 'kvbm_host_blocks{engine="0",state="%s"} %s'
    # Of a page of metrics, without an engine that serves it.
    assert status._figures_of(line % ("free", count))[0] == {}
    # Of a page of metrics, without an engine that serves it.
    assert status._figures_of(line % ("free", "4.194304e+06"))[0] == {"host": {"free": 4194304}}


# Lines of the metrics of an engine, and what `kvbm status` says of them.
@pytest.mark.parametrize("name", given_in("status_of_metrics"))
def test_status_says_which_tiers_are_off_and_how_they_evict_and_why(name, tmp_path, monkeypatch):
    written_run(tmp_path, monkeypatch)
    blocks = {tier: {"free": 8} for tier in ("host", "disk")}
    # Of a page of metrics, without an engine that serves it.
    _, *figures = status._figures_of(given_in("status_of_metrics")[name])
    monkeypatch.setattr(status, "_probe", lambda run: status.RunStatus(run, True, blocks, *figures))
    said = [
        kvbm_here(*command, home=tmp_path, XDG_STATE_HOME=str(tmp_path)) for command in (ALL, [*ALL, "--json"], ONE)
    ]
    (data,) = json.loads(said[1].stdout)
    row = said[0].stdout.splitlines()[1].split("  ")
    of_cache = ("cache", "eviction", "to host", "on disk")
    reasons = [line for line in said[2].stdout.splitlines() if line.startswith(of_cache)]
    machine_readable = {key: data[key] for key in ("off", "is_shared_off", "eviction", "disk_eviction", "to_host")}
    told = [*(cell for cell in row if "G2" in cell), *reasons, json.dumps(machine_readable), said[0].stderr.strip()]
    assert_said("status_of_metrics", name, "\n".join(told).rstrip())


def test_a_fifo_in_the_place_of_a_run_holds_nobody_up(tmp_path, monkeypatch, capsys):
    file = written_run(tmp_path, monkeypatch)
    file.unlink()
    os.mkfifo(file)
    assert run(["status"]) == 0
    assert "cannot be read (not a regular file)" in capsys.readouterr().err


def test_a_clock_that_went_back_is_no_bug(tmp_path, monkeypatch, capsys):
    file = written_run(tmp_path, monkeypatch)
    file.write_text(json.dumps({**json.loads(file.read_text()), "started_s": 5e9, "ended_s": 4e9}))
    for command in ("status --all", "status demo-1"):
        assert run(command.split()) == 0
        assert "demo-1" in capsys.readouterr().out


def written_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The description of a run that has ended, in a state directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    (home / "kvbm" / "runs").mkdir(parents=True)
    made = Runs(home / "kvbm").create("demo")
    made.begin(facts(made.name, state=RunState.ENDED, ended_s=1.0, exit_code=0))
    made.close()
    return made.path / FACTS
