"""Background: the process that `kvbm serve --detach` leaves running, and the parent that waits until it is ready.

The command forks first. The child, in its own session, continues like `kvbm serve` and prints to the same terminal.
When the engine is ready, the child redirects its output to a file and notifies the parent, which exits with 0. If the
child exits earlier, the parent exits with the same code. The parent forwards signals to the child, which then stops
its engine.

Without `--detach`, `kvbm serve` forks too if its run directory is on a file system that may hang: nothing ends a
process that waits for one that does, but the parent then still kills the engine and exits. The child ends with the
parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kvbm.child.start import die_with_parent
from kvbm.errors import EnvironmentProblem
from kvbm_cli.system.answering import problem_of_silent, silent_among
from kvbm_cli.system.process_identity import descendants

READY = b"r"
CHECK_S = 1.0  # after a signal, between checks that the child does not hang
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Background:
    """`child` is the process id, 0 in the child itself. `pipe` carries one byte from the child to the parent.
    `signals` were forwarded to the child."""

    child: int
    pipe: int
    signals: list[int] = field(default_factory=list)

    @classmethod
    def fork(cls, *, is_detached: bool = True) -> Background:
        sys.stdout.flush()
        sys.stderr.flush()
        readable, writable = os.pipe()
        parent = os.getpid()
        child = os.fork()
        os.close(writable if child else readable)
        if child:
            return cls(child, readable)
        os.setsid()
        if not is_detached:
            die_with_parent(parent, signal.SIGTERM)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return cls(0, writable)

    @property
    def is_parent(self) -> bool:
        return self.child != 0

    def wait(self, may_hang: Collection[Path]) -> int:
        """In the parent: returns 0 when the child is ready, otherwise the exit code of the child.

        Raises EnvironmentProblem if the child was signalled and one of the paths that `may_hang` does; the engine is
        killed then.
        """
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        news = select.poll()
        news.register(self.pipe, select.POLLIN)
        while not news.poll(1000 * CHECK_S):
            self._require_answers(may_hang)
        if os.read(self.pipe, 1) == READY:
            return 0
        while (ended := os.waitpid(self.child, os.WNOHANG))[0] == 0:
            time.sleep(CHECK_S / 20)
        code = os.waitstatus_to_exitcode(ended[1])
        return code if code >= 0 else 128 - code

    def _require_answers(self, may_hang: Collection[Path]) -> None:
        """Raise EnvironmentProblem if the child hangs in the file system of a path while it should stop its engine."""
        silent = silent_among(may_hang, changes=True) if self.signals else ()
        for path in silent:
            for pid in list(descendants(self.child)):
                with contextlib.suppress(OSError):
                    if os.getsid(pid) == self.child:  # not the guard, which removes what is left when the child ends
                        os.kill(pid, signal.SIGKILL)
            problem = problem_of_silent(path)
            raise EnvironmentProblem(f"{problem.message}; the engine was killed", hint=problem.hint)

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
        self.signals.append(number)
        os.kill(self.child, number)
