"""A window of tmux in which `kvbm top` runs: what a person sees at a size."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRAM = [sys.executable, "-c", "from kvbm_cli.app import main; main()", "top"]
WAIT_S = 60.0


class Window:
    """A window of a tmux server of its own."""

    def __init__(self, name: str, width: int, height: int, command: list[str]) -> None:
        self._tmux = ["tmux", "-L", name, "-f", "/dev/null"]
        self.width, self.height = width, height
        size = ["-x", str(width), "-y", str(height)]
        shown = f"{shlex.join(command)}; echo exit code $?; sleep 1000"
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "COLUMNS", "LINES")}
        subprocess.run([*self._tmux, "new-session", "-d", *size, shown], check=True, env=environment)

    def lines(self) -> list[str]:
        done = subprocess.run([*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        assert len(lines) <= self.height
        assert all(len(line) <= self.width for line in lines), lines
        assert "Traceback" not in done.stdout, done.stdout
        return lines

    def wait_for(self, what: Callable[[str], object]) -> str:
        end_s = time.monotonic() + WAIT_S
        while not what(text := "\n".join(self.lines())):
            assert time.monotonic() < end_s, text
            time.sleep(0.1)
        return text

    def press(self, key: str) -> None:
        subprocess.run([*self._tmux, "send-keys", key], check=True)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@contextmanager
def window(width: int, height: int, *arguments: str) -> Iterator[Window]:
    one = Window(f"kvbm-{os.getpid()}-{width}", width, height, [*PROGRAM, *arguments])
    try:
        yield one
    finally:
        one.close()
