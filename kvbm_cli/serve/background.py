"""Background: the process that `kvbm serve --detach` leaves behind, and the one that waits until it is ready.

The command forks before it has done anything. The child, in a session of its own, goes on as `kvbm serve` would, on the
same terminal, so that everything is said as it always is; when the engine is ready it puts its output into a file and
tells the parent, which ends with 0. A child that ends before that gives the parent its exit code. A signal to the
parent is passed on to the child, which then stops what it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

READY = b"r"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Background:
    """`child` is 0 in the child itself. `pipe` carries one byte, from the child to the parent."""

    child: int
    pipe: int

    @classmethod
    def fork(cls) -> Background:
        sys.stdout.flush()
        sys.stderr.flush()
        readable, writable = os.pipe()
        child = os.fork()
        os.close(writable if child else readable)
        if child:
            return cls(child, readable)
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return cls(0, writable)

    @property
    def is_parent(self) -> bool:
        return self.child != 0

    def wait(self) -> int:
        """In the parent: 0 when the child is ready, else the exit code that it ended with."""
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        if os.read(self.pipe, 1) == READY:
            return 0
        _, status = os.waitpid(self.child, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def release(self, output: Path) -> None:
        """In the child: the terminal is not ours any more, and the parent may end."""
        sys.stdout.flush()
        sys.stderr.flush()
        with open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the parent
            os.write(self.pipe, READY)
        os.close(self.pipe)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The child is not waited for before it has ended, so its process id is still its own."""
        os.kill(self.child, number)
