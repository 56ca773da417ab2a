"""`kvbm top` as a program: on a terminal, in a pipe, and while its engine ends and starts again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from metric_pages import FakeLeader, serving

WAIT_S = 60.0
PROGRAM = [sys.executable, "-c", "from kvbm_cli.app import main; main()", "top"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment
    )


class Screen:
    """A terminal of 80 columns and 24 lines that collects what a program draws."""

    def __init__(self, descriptor: int, child: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self.child = child
        self.text = ""

    def wait_for(self, what: str) -> None:
        """Read until this is drawn, after what was waited for before."""
        seen, deadline_s = "", time.monotonic() + WAIT_S
        os.set_blocking(self._descriptor, False)
        while what not in seen:
            assert time.monotonic() < deadline_s, f"never drawn: {what}\n{seen[-3000:]}"
            try:
                seen += os.read(self._descriptor, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # the program has ended
                break
        self.text += seen
        assert what in seen, self.text[-3000:]

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())


@contextmanager
def on_terminal(*arguments: str) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(
        [*PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as child:
        before = termios.tcgetattr(theirs)
        try:
            yield Screen(ours, child)
            assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
        finally:
            child.kill()
            os.close(ours)
            os.close(theirs)


def test_a_page_without_a_terminal_has_the_figures_of_two_scrapes():
    leader = FakeLeader(prompt_host_tokens=100)
    with serving(leader) as port:
        done = run("--url", f"127.0.0.1:{port}", "--interval", "0.2")
        assert (done.returncode, done.stderr) == (0, "")
        assert "prompt   0 tokens/s" in done.stdout
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
        assert "\x1b" not in done.stdout


def test_json_names_each_engine_and_their_sum():
    with serving(FakeLeader()) as port:
        done = run("--url", f"http://127.0.0.1:{port}/metrics", "--json", "--interval", "0.2")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    (one,) = found["engines"]
    assert (one["name"], one["problem"]) == (f"127.0.0.1:{port}", "")
    assert one["tiers"]["host"] == {"used_bytes": 75_000, "capacity_bytes": 100_000}
    assert found["total"]["hit_rate"] is None


def test_without_an_answer_the_exit_code_is_1_and_the_reason_is_there():
    with serving(FakeLeader()) as port:
        pass
    done = run("--url", f"127.0.0.1:{port}", "--once", "--interval", "0.2")
    assert done.returncode == 1
    assert "refused" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_without_a_run_it_says_so(tmp_path) -> None:
    done = run("--once", "--interval", "0.2", XDG_STATE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no engine is running\n")


def test_a_run_and_a_url_exclude_each_other():
    done = run("demo", "--url", "127.0.0.1:1")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr


def test_it_obeys_keys_and_follows_an_engine_that_ends_and_starts_again():
    leader = FakeLeader(prompt_host_tokens=100)
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        port = first.enter_context(serving(leader))
        screen = stack.enter_context(on_terminal("--url", f"127.0.0.1:{port}", "-i", "0.2"))
        screen.wait_for("of prefill per second")
        screen.press("p")
        screen.wait_for("paused")
        screen.press("p")
        screen.wait_for("q quit")
        leader.counters.prompt_host_tokens += 10**6
        screen.wait_for("host 100%")
        first.close()
        screen.wait_for("refused")
        stack.enter_context(serving(FakeLeader(prompt_disk_tokens=5), port))
        screen.wait_for("of prefill per second")
        screen.press("q")
        assert screen.child.wait(WAIT_S) == 0
    assert "Traceback" not in screen.text


def test_an_interrupt_ends_it_and_restores_the_terminal():
    with serving(FakeLeader()) as port, on_terminal("--url", f"127.0.0.1:{port}", "-i", "0.2") as screen:
        screen.wait_for("of prefill per second")
        os.killpg(screen.child.pid, 2)
        assert screen.child.wait(WAIT_S) == 0
    assert not re.search("Traceback|Error", screen.text)
