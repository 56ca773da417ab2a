"""ServeDisplay: what `kvbm serve` prints while its engine runs. Its thread is the only writer to the terminal.

    notes, data   of the launcher, in the order of the calls
    log lines     of the engine, read from its log file, so that the engine never waits for the terminal
    live line     phase and time of a start or a stop, on a terminal only; erased before anything else is printed

The launcher never waits for the terminal either, which may be stopped with Ctrl-S. The thread writes to the file
descriptors: if it hangs in a write, no lock of a Python stream is held when the process exits.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.runs.log_tail import LogTail, shown_line
from kvbm_cli.terminal.console import WIDTH, columns
from kvbm_cli.terminal.printable import without_commands
from kvbm_cli.terminal.progress import PHASE_INTERVAL_S, REDRAW_S, Pace

CLOSE_TIMEOUT_S = 1.0  # for a slow terminal to take the rest of the log
ERASE = "\r\033[K"


class ServeDisplay:
    """Methods are called by the main thread. `tails` are the logs to print, none with `--quiet`.

    `heading` is its first note.
    """

    def __init__(self, tails: Sequence[LogTail], heading: str) -> None:
        self._tails = tails
        self._verb, self._phase, self._started = "starting", "", time.monotonic()
        self._queue: deque[tuple[int, str]] = deque()  # removed from when written
        self._failure: OSError | None = None  # of the standard output
        self._is_closing = threading.Event()
        self._deadline_s = float("inf")
        self._wakes = threading.Event()
        # Owned by the thread.
        self._has_line = False
        self._printed_phase, self._printed_s = "", -PHASE_INTERVAL_S
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self.note(heading)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        """Print the rest. Gives up on a terminal that does not take it."""
        self._deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._is_closing.set()
        self._wakes.set()
        self._thread.join(2 * CLOSE_TIMEOUT_S)

    def report(self, phase: str) -> None:
        """Set what the engine is doing now; an empty phase removes the live line."""
        self._phase = phase

    def restart(self, verb: str) -> None:
        """Begins another activity, with its own clock."""
        self._phase = ""
        self._verb, self._started = verb, time.monotonic()

    def note(self, text: str) -> None:
        """Print a text to stderr."""
        self._put(sys.stderr.fileno(), f"{text}\n")

    def data(self, text: str) -> None:
        """Print a text to stdout."""
        self._put(sys.stdout.fileno(), f"{text}\n")

    def has_printed(self) -> bool:
        """Return whether all notes and data have been printed."""
        return not self._queue

    def raise_failure(self) -> None:
        """Raise BrokenPipeError or EnvironmentProblem if data could not be written."""
        failure, self._failure = self._failure, None
        if isinstance(failure, BrokenPipeError):
            raise failure
        if failure is not None:
            reason = reason_of(failure)
            raise EnvironmentProblem(f"cannot write to standard output: {reason}")

    def _put(self, descriptor: int, text: str) -> None:
        self._queue.append((descriptor, without_commands(text)))
        self._wakes.set()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._print_log()
            self._print_queue()
            self._draw()
            self._wakes.wait(REDRAW_S)
            self._wakes.clear()
        self._print_log()
        for tail in self._tails:
            self._print_lines(tail, tail.finish())
        self._print_queue()
        self._notes("")

    def _print_queue(self) -> None:
        while self._queue:
            descriptor, text = self._queue[0]
            if descriptor == sys.stderr.fileno():
                self._notes(text)
            else:
                self._notes("")
                try:
                    _write(descriptor, text.encode(sys.stdout.encoding, "replace"))
                except OSError as error:
                    self._failure = self._failure or error
            self._queue.popleft()

    def _print_log(self) -> None:
        """Print new lines until none is left. Before the end, notes in between do not wait for a long log."""
        is_behind = True
        while is_behind:
            is_behind = False
            for tail in self._tails:
                if lines := tail.read():
                    is_behind = True
                    self._print_lines(tail, lines)
                if is_behind and not self._is_closing.is_set():
                    self._print_queue()
            if is_behind and time.monotonic() > self._deadline_s:
                self._notes(f"the terminal is too slow for the rest of the log: see {self._tails[0].path}\n")
                return

    def _print_lines(self, tail: LogTail, lines: Sequence[bytes]) -> None:
        if lines:
            self._notes("".join(f"{tail.prefix}{shown_line(line)}\n" for line in lines))

    def _draw(self) -> None:
        phase, now = self._phase, time.monotonic()
        if not phase:
            self._notes("")
            return
        line = shown_line(f"{self._verb}  {now - self._started:5.1f} s  {self._pace.of(phase)}".encode())
        line = line[: (columns(sys.stderr) or WIDTH) - 1]
        if sys.stderr.isatty():
            self._notes(line)
            self._has_line = True
        elif not self._tails and phase != self._printed_phase and now - self._printed_s >= PHASE_INTERVAL_S:
            self._printed_phase, self._printed_s = phase, now
            self._notes(f"{line}\n")

    def _notes(self, text: str) -> None:
        """Erases the live line and prints `text` to stderr. Ignores errors: no stream is left to report them."""
        text, self._has_line = (ERASE if self._has_line else "") + text, False
        try:
            _write(sys.stderr.fileno(), text.encode(sys.stderr.encoding, "replace"))
        except OSError:
            return


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it, also to a descriptor that another process has made non-blocking."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(descriptor, select.POLLOUT)
            writable.poll()
