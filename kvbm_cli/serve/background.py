"""Background: the process that `kvbm serve --detach` leaves running, and the parent that waits until it is ready.

The command forks first. The child, in its own session, continues like `kvbm serve` and prints to the same terminal.
When the engine is ready, the child redirects its output to a file and notifies the parent, which exits with 0. If the
child exits earlier, the parent exits with the same code. The parent forwards signals to the child, which then stops
its engine.
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
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Background:
    """`child` is the process id, 0 in the child itself. `pipe` carries one byte from the child to the parent."""

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
        """In the parent: returns 0 when the child is ready, otherwise the exit code of the child."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        if os.read(self.pipe, 1) == READY:
            return 0
        _, status = os.waitpid(self.child, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def release(self, output: Path) -> None:
        """In the child: redirects output to a file, or to nothing if that fails, and lets the parent exit."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:  # a full disk must not end the engine
            descriptor = os.open(os.devnull, os.O_WRONLY)
        with open(descriptor, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        with contextlib.suppress(BrokenPipeError):  # the parent was killed
            os.write(self.pipe, READY)
        os.close(self.pipe)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal. The child was not waited for yet, so its process id still belongs to it."""
        os.kill(self.child, number)
