"""GuardProcess: a process that removes the leftovers of its parent (leftovers.py), as the parent sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from kvbm.child.start import start
from kvbm_cli.system.leftovers import END, SCAN, Leftovers

GUARD = Path(__file__).with_name("leftovers.py")
SCAN_TIMEOUT_S = 30.0


class GuardProcess:
    """A started guard. It removes the leftovers when this process requests it or dies."""

    def __init__(self, leftovers: Leftovers, *, log: IO[bytes] | int) -> None:
        """Borrows `leftovers` and `log`, to which the guard writes its errors."""
        self._leftovers = leftovers
        command = [sys.executable, "-I", "-S", str(GUARD)]
        self._child = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, directory="/")
        self._send(leftovers.to_json() + b"\n")

    @property
    def pid(self) -> int:
        return self._child.pid

    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def scan(self) -> None:
        """Return when the guard has recorded all that exists at this moment."""
        assert self._child.stdout is not None
        self._child.send_signal(signal.SIGCONT)  # it may have been stopped
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._send(SCAN)
            answer = select.poll()
            answer.register(self._child.stdout, select.POLLIN)
            if answer.poll(1000 * SCAN_TIMEOUT_S):
                os.read(self._child.stdout.fileno(), 1)

    def remove(self, timeout_s: float) -> bool:
        """Remove the leftovers. False if the guard is still busy after `timeout_s`; it then continues alone."""
        self._child.send_signal(signal.SIGCONT)
        try:
            self._child.communicate(END, timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._child.returncode < 0:  # the guard was killed
            self._leftovers.remove()
        return True

    def kill_and_remove(self) -> None:
        """Kills a guard that hangs, then removes the leftovers in this process."""
        self._child.kill()
        self._child.wait()
        self._leftovers.remove()

    def close(self) -> None:
        """Close the pipes of a guard that has ended."""
        self._child.communicate()

    def _send(self, data: bytes) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(data)
        self._child.stdin.flush()
