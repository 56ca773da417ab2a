"""Runs short programs, which may hang or crash: one deadline, bounded output, and no process is left behind."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvbm.child import deadlines
from kvbm.child.start import start

LONGEST_OUTPUT = 16 << 20  # of more, only the end is read

log = logging.getLogger(__name__)


class Output:
    """What a process writes, in memory: it requires no writable directory, and no reader meanwhile."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("kvbm-output")

    def fileno(self) -> int:
        return self._fd

    def text(self) -> str:
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, LONGEST_OUTPUT, max(0, size - LONGEST_OUTPUT)).decode(errors="replace")

    def close(self) -> None:
        os.close(self._fd)


class Ended(NamedTuple):
    """`code` is negative for a signal."""

    code: int
    out: str
    err: str


def run(
    command: Sequence[str],
    *,
    timeout_s: float | None,
    environment: Mapping[str, str] | None = None,
    merges: bool = False,
    dies_with_parent: bool = False,
    on_output: Callable[[str], None] | None = None,
) -> Ended:
    """Run a program to its end. Raises TimeoutError, and OSError if it cannot be started.

    Kills it with all that it started after `timeout_s`, and if this thread is interrupted. `merges` its errors into
    its output. `on_output` gets what it has written so far, now and then.
    """
    out, err = Output(), Output()
    try:
        child = start(
            command,
            environment=environment,
            stdout=out.fileno(),
            stderr=subprocess.STDOUT if merges else err.fileno(),
            dies_with_parent=dies_with_parent,
        )
        try:
            code = _code(child, timeout_s, on_output and (lambda: on_output(out.text())))
        except BaseException:  # also when the start of an engine is interrupted
            _kill(child)
            raise
        return Ended(code, out.text(), err.text())
    finally:
        out.close()
        err.close()


def last_line(text: str, default: str = "") -> str:
    """Return the last line with content."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), default)


def _code(child: subprocess.Popen[bytes], timeout_s: float | None, look: Callable[[], None] | None) -> int:
    """Return the exit code. Raises TimeoutError."""
    end_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    interval_s = math.inf if look is None else deadlines.OUTPUT_INTERVAL_S
    while (left_s := end_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(min(left_s, interval_s))
        if look is not None:
            look()
    raise TimeoutError


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(deadlines.EXIT_S)
    except subprocess.TimeoutExpired:
        child.returncode = 0  # left behind: it ends when the kernel lets it go
        log.warning("process %d cannot be killed: it is blocked in the kernel", child.pid)
