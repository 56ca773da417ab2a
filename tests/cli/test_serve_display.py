"""What `kvbm serve` prints while its engine runs: the log of the engine, which never waits for the terminal."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import HANGS_S, kvbm
from test_runs import states
from test_serve import RUNS, serving, started
from test_serve import home as home  # the fixture
from waiting import eventually

from kvbm_cli.runs.log_tail import CHUNK_BYTES, LogTail, shown_line, start_of_last_lines
from kvbm_cli.serve.display import ServeDisplay

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
