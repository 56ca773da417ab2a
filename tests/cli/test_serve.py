"""`kvbm serve` in front of a stand-in engine: the plan, the start, signals, exit codes, and failures in seconds."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest
from model_configs import write_model
from terminal import FAKE_ENGINE, HANGS_S, PROGRAM, assert_snapshot, environment, filtered, kvbm, kvbm_here
from test_runs import states
from waiting import eventually, is_gone

from kvbm.engines.embedded.http.server import Server
from kvbm.engines.table import kind_of
from kvbm.errors import EnvironmentProblem
from kvbm_cli.engine.process import open_log
from kvbm_cli.profile.resolve import resolve_to_start
from kvbm_cli.runs.log_tail import CHUNK_BYTES, LogTail, shown_line, start_of_last_lines
from kvbm_cli.serve.command import _targets  # of engines that are not installed
from kvbm_cli.serve.display import ServeDisplay

RUNS = ".local/state/kvbm/runs"
LONG_STOP = "tiers.disk={capacity: 1MiB, directory: %s/cache, drain_s: 600}"  # a run has this time more to stop
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}


@pytest.fixture
def home(tmp_path):
    """A working directory with a model and a profile whose engine is the stand-in."""
    write_home(tmp_path)
    return tmp_path


def write_home(home: Path) -> None:
    write_model(home / "model", MODEL)
    (home / "mine.yaml").write_text(
        f"engine:\n  model: ./model\n  python: {FAKE_ENGINE}\n  arguments: {{num_blocks: 64}}\n"
        "tiers: {host: {capacity: 64MiB}}\nserver: {port: auto}\n"
    )


class Serving(subprocess.Popen[str]):
    """`kvbm serve`, healthy. `url` is its first line of stdout, the rest can be read."""

    url: str
    stdout: IO[str]
    stderr: IO[str]

    def code_after(self, number: int) -> int:
        """Its exit code after this signal."""
        self.send_signal(number)
        return self.wait(timeout=HANGS_S)


@contextmanager
def started(home: Path, *args: str, profile: str = "./mine.yaml", state: str = "", **streams: Any) -> Iterator[Serving]:
    """`kvbm serve`, killed at the end of the block. `state` is its XDG_STATE_HOME; streams are pipes unless given."""
    command = [*PROGRAM, "serve", "-p", profile, *args]
    variables = environment(home, **({"XDG_STATE_HOME": state} if state else {}))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams}
    with Serving(command, cwd=home, env=variables, **streams) as program:
        try:
            yield program
        finally:
            program.kill()


@contextmanager
def serving(home: Path, *arguments: str, **options: Any) -> Iterator[Serving]:
    with started(home, *arguments, **options) as program:
        program.url = program.stdout.readline().strip()
        yield program


def test_healthy_engine_is_announced_with_a_line_to_try(home):
    with serving(home) as program:
        assert urllib.request.urlopen(f"{program.url}/health").status == 200
        assert program.code_after(signal.SIGTERM) == 0
        text = f"----- stdout -----\n{program.url}\n{program.stdout.read()}----- stderr -----\n{program.stderr.read()}"
    text = re.sub(r"^starting .*\n", "", filtered(text), flags=re.MULTILINE)
    assert_snapshot("serve", text)


def test_ready_as_json(home):
    with serving(home, "--json") as program:
        program.code_after(signal.SIGTERM)
        ready = json.loads(program.url + program.stdout.read())
    assert ready["model"] == f"{home}/model"
    assert set(ready) == {"run", "url", "model", "log", "targets"}
    assert Path(ready["targets"]).parent == Path(ready["log"]).parent
    assert not Path(ready["targets"]).exists(), "the run has ended"


def test_an_engine_serves_if_the_file_for_prometheus_cannot_be_written(home):
    """The file is written as soon as that is possible."""
    with serving(home, "--set", "engine.environment.FAKE=obstructs") as program:
        path = home / ".local/state/kvbm/runs/mine-1/prometheus-targets.json"
        while not (line := program.stderr.readline()).startswith("warning"):
            assert line, "the program has ended"
        assert line == (
            f"warning: cannot write `{path}`: is a directory; the engine continues, but Prometheus does not find it by "
            "this file\n"
        )
        assert urllib.request.urlopen(f"{program.url}/health").status == 200
        path.rmdir()
        eventually(path.is_file)
        assert program.code_after(signal.SIGTERM) == 0
        assert not path.exists(), "the run has ended"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_engine_and_its_exit_code_is_ours(home, number):
    with serving(home) as program:
        assert program.code_after(number) == 0


def test_second_interrupt_kills_an_engine_that_does_not_stop(home):
    with serving(home, "--set", "engine.environment.FAKE=stubborn") as program:
        family = psutil.Process(program.pid).children()
        program.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.5)
        assert program.code_after(signal.SIGINT) == 128 + signal.SIGKILL
    assert all(is_gone(member.pid) for member in family)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["hang", "unhealthy", "mute"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_the_start_is_not_a_failed_start(home, mode, number):
    with started(home, "--set", f"engine.environment.FAKE={mode}") as program:
        eventually(lambda: any(b"loading" in log.read_bytes() for log in home.glob(f"{RUNS}/*/engine.log")))
        assert program.code_after(number) == 128 + number
        assert "error:" not in program.stderr.read()


@pytest.mark.parametrize("mode", ["busy", "keyed"])
def test_engine_is_ready_when_it_has_given_a_first_token(home, mode):
    """It answers 503 at first; it wants the key that its environment has."""
    variables = ["--set", f"engine.environment.FAKE={mode}", "--set", "engine.environment.VLLM_API_KEY=secret"]
    with serving(home, *variables) as program:
        assert program.code_after(signal.SIGTERM) == 0
        assert "refused" not in program.stderr.read()


def test_engine_that_takes_no_such_request_is_served_with_a_warning(home):
    with serving(home, "--set", "engine.environment.FAKE=refuses") as program:
        assert program.code_after(signal.SIGTERM) == 0
        warning = "warning: the engine is healthy, but a completion of one token was refused: 404: asked for"
        assert warning in program.stderr.read()


# Refusals before the start are in test_mistakes.py, and what last words tell is in test_runs.py.
FAILURES = {
    "crash": ["--set", "engine.environment.FAKE=crash"],
    "dies": ["--set", "engine.environment.FAKE=dies"],
    "ends": ["--set", "engine.environment.FAKE=ends"],
    "killed": ["--set", "engine.environment.FAKE=killed"],
    "own_words": ["--set", "engine.environment.FAKE=own_words"],
    "broken_answer": ["--set", "engine.environment.FAKE=broken"],
    "hangs": ["--set", "engine.environment.FAKE=hang", "--set", "transfer.init_timeout_s=2"],
    "stays_unhealthy": ["--set", "engine.environment.FAKE=unhealthy", "--set", "transfer.init_timeout_s=2"],
    "gives_no_token": ["--set", "engine.environment.FAKE=mute", "--set", "transfer.init_timeout_s=2"],
    "no_model": ["--set", "engine.model=Qwen/Qwen3-0.6B"],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAILURES)
def test_failed_serve(home, name):
    command = f"serve --profile ./mine.yaml {' '.join(FAILURES[name])}"
    text = kvbm(*command.split(), home=home).text(f"kvbm {command}")
    assert_snapshot(f"serve_{name}", re.sub(r"^starting .*\n", "", text, flags=re.MULTILINE))


def test_log_goes_to_a_temporary_directory_where_there_is_no_home(home):
    command = ["serve", "-p", "./mine.yaml", "--set", "engine.environment.FAKE=crash"]
    outcome = kvbm(*command, home=home, XDG_STATE_HOME="/dev/null", TMPDIR=str(home))
    (log,) = home.glob("kvbm-*/runs/mine-1/engine.log")
    assert f"  {log}, last lines:" in outcome.stderr


def test_log_never_goes_into_the_profile(home):
    before = (home / "mine.yaml").read_text()
    (home / "link").symlink_to("mine.yaml")
    for name in ("mine.yaml", "link"):
        outcome = kvbm_here("serve", "-p", "./mine.yaml", "--log", name, home=home)
        assert (outcome.exit_code, outcome.stdout) == (2, "")
        assert outcome.stderr.startswith(f"error: `--log {name}` is the profile itself\n")
    assert (home / "mine.yaml").read_text() == before


@pytest.mark.parametrize(
    ("name", "expected"), [("sglang", ["127.0.0.1:6880", "127.0.0.1:8000"]), ("vllm", ["127.0.0.1:8000"])]
)
def test_prometheus_finds_the_metrics_of_an_engine_that_lacks_those_of_kvbm_at_two_addresses(name, expected):
    profile = resolve_to_start(name, overrides=["metrics.serve=true"]).profile
    plan = kind_of(profile).launch_plan(profile, connector=True, port=8000)
    assert _targets(plan, SimpleNamespace(profile=profile)) == expected


NOISY = ("--set", "engine.environment.FAKE=noisy")
LINE = re.compile(r"^line (\d+)$", re.MULTILINE)


def stop(program: subprocess.Popen[str]) -> None:
    assert program.code_after(signal.SIGTERM) == 0


def log_of(home: Path, run: str = "mine-1") -> str:
    return (home / RUNS / run / "engine.log").read_text(errors="replace")


def test_log_is_printed_with_escapes_and_completely(home):
    """Stderr is a pipe here, as under systemd and in a container."""
    with serving(home, *NOISY) as program:
        stop(program)
        shown = program.stderr.read()
    assert "\nloading the weights\nred \\x1b]0;title\\x07 \\xff end\n100%|##########\nline 0\nline 1\n" in shown
    assert "\x1b" not in shown
    assert "starting  " not in shown, "phases repeat the lines of the log"
    numbers = [int(number) for number in LINE.findall(shown)]
    assert numbers == list(range(len(numbers)))
    assert numbers[-1] == int(LINE.findall(log_of(home))[-1])
    assert re.search(r"line \d+\n(stopping; .+\n)?mine-1 stopped after ", shown)


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_quiet_prints_only_our_own_lines(home, option):
    with serving(home, *NOISY, option) as program:
        stop(program)
        shown = program.stderr.read()
    assert LINE.search(shown) is None
    assert "mine-1 is ready after" in shown


def test_lines_of_an_earlier_engine_are_not_printed_again(home):
    (home / "log").write_text("of yesterday\n")
    with serving(home, "--log", "log") as program:
        stop(program)
        shown = program.stderr.read()
    assert "loading the weights" in shown
    assert "of yesterday" not in shown


def test_reader_that_goes_away_does_not_end_the_engine(home):
    with serving(home, *NOISY) as program:
        program.stderr.close()
        last = LINE.findall(log_of(home))[-1]
        eventually(lambda: LINE.findall(log_of(home))[-1] != last)
        time.sleep(0.3)
        assert states(home) == ["healthy"]
        stop(program)


@contextlib.contextmanager
def on_a_terminal(home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    leader, follower = pty.openpty()
    try:
        with started(home, *arguments, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower) as program:
            yield program, leader, follower
    finally:
        os.close(leader)
        os.close(follower)


@pytest.mark.parametrize("stopped_while", ["starting", "healthy"])
def test_stopped_terminal_delays_neither_engine_nor_stop(home, stopped_while):
    """As after Ctrl-S. Only the shown part of the log is late."""
    with on_a_terminal(home, *NOISY) as (program, _, follower):
        eventually(lambda: states(home) in (["healthy"], [stopped_while]))
        termios.tcflow(follower, termios.TCOOFF)
        eventually(lambda: states(home) == ["healthy"])
        before = len(log_of(home))
        eventually(lambda: len(log_of(home)) > before + 1000)
        outcome = kvbm("stop", home=home)
        assert re.fullmatch(r"mine-1 stopped after \d+\.\d s\n", outcome.stdout), outcome
        assert program.wait(timeout=HANGS_S) == 0
        termios.tcflow(follower, termios.TCOON)


ERASE = "\r\x1b[K"


def test_live_line_and_log_do_not_garble_each_other(tmp_path, monkeypatch):
    """Whatever follows the live line erases it first; afterwards only log lines and notes are on the screen."""
    leader, follower = pty.openpty()
    log = tmp_path / "log"
    with open(follower, "w") as terminal, log.open("a", buffering=1) as file:
        monkeypatch.setattr("sys.stderr", terminal)
        with ServeDisplay([LogTail(log)], "heading") as display:
            for number in range(3):
                display.report(f"phase {number}")
                time.sleep(1)  # several refreshes of the live line, also on a busy machine
                file.write(f"line {number}\n")
                display.note(f"note {number}")
    parts = []
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(leader, 1 << 16):
            parts.append(part)
    os.close(leader)
    written = b"".join(parts).decode().replace("\r\n", "\n")
    assert len(re.findall(r"starting +\d", written)) >= 3
    screen = [line.rpartition(ERASE)[2] for line in written.split("\n")]
    assert screen == ["heading", "line 0", "note 0", "line 1", "note 1", "line 2", "note 2", ""]


def test_tail_of_a_log_that_is_emptied_or_long(tmp_path):
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read() == []
    path.write_text("a\nb\nc")
    assert tail.read() == [b"a", b"b"]
    path.write_text("d\n")
    assert tail.read() == [b"cd"]
    with path.open("a") as file:
        file.write("x" * 3 * CHUNK_BYTES)
    assert len(tail.read()[0]) > CHUNK_BYTES, "a line without an end is not kept in memory"
    while tail.read():
        pass
    assert sum(map(len, tail.finish())) < 2 * CHUNK_BYTES


def test_snapshot_of_a_growing_log_ends(tmp_path):
    path = tmp_path / "log"
    path.write_text("a\n")
    tail = LogTail(path, follows=False)
    assert tail.read() == [b"a"]
    path.write_text("a\nb\n")
    assert tail.read() == []
    assert tail.finish() == []


@pytest.mark.parametrize(
    ("text", "count", "start"),
    [
        *(("a\nb\nc\n", 2, 2), ("a\nb\nc\n", 0, 6), ("a\nb\nc\n", 3, 0), ("a\nb\nc", 1, 4), ("a\nb", 5, 0)),
        *(("\n\n", 1, 0), ("x" * 200_000 + "\nb\n\n", 1, 200_001), ("", 1, 0)),
    ],
)
def test_last_lines_are_found(tmp_path, text, count, start):
    (tmp_path / "log").write_text(text)
    with (tmp_path / "log").open("rb") as file:
        assert start_of_last_lines(file, count) == start


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain \xc3\xbc\ttab", "plain ü\ttab"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b[2J\x9b2J\x07", "\\x1b[2J\\x9b2J\\x07"),
        (b"10%\r20%\r", "20%"),
        (b"\xe2\x80\xae", "\\u202e"),
    ],
)
def test_line_cannot_control_the_terminal(line, text):
    assert shown_line(line) == text


def test_hangup_that_the_parent_ignores_does_not_stop_serve(home):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with serving(home) as program:
            program.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                program.wait(timeout=1.5)
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_closed_stderr_and_a_poor_encoding_are_no_bug(home):
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
            open_log(path)
    open_log(Path("/dev/null")).close()


def test_a_server_whose_log_is_full_goes_on(monkeypatch):
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Full())
    Server._say(None, "stopping")  # type: ignore[arg-type]
