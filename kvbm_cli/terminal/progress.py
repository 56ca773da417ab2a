"""What a command shows while something takes longer than two seconds: the phase, the time, the rate, the time left."""

from __future__ import annotations

import re
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from kvbm_cli.terminal.console import PHASE_INTERVAL_S, WIDTH, columns, print_note


@dataclass(frozen=True, slots=True)
class Progress:
    """What a starting engine is at: seconds since its start, and its own words for it."""

    elapsed_s: float
    phase: str


class ProgressLine:
    """Shows what an engine is at while it starts or stops: one live line on a terminal, a line per phase anywhere else.

    A phase that counts (`12 of 256 MiB`) gets its rate and the time that is left.
    """

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self._live = sys.stderr.isatty()
        self._phase = ""
        self._printed = -PHASE_INTERVAL_S
        self._pace = Pace()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Before something else is printed."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, progress: Progress) -> None:
        phase = progress.phase
        line = f"{self.verb}  {progress.elapsed_s:5.1f} s  {self._pace.of(phase)}"[: (columns(sys.stderr) or WIDTH) - 1]
        if self._live:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif phase not in ("", self._phase) and time.monotonic() - self._printed >= PHASE_INTERVAL_S:
            self._phase, self._printed = phase, time.monotonic()
            print_note(line)


class Waiting:
    """Shows that something which says nothing of its progress goes on, and for how long."""

    def __init__(self, verb: str, what: str) -> None:
        self._line = ProgressLine(verb)
        self._what = what
        self._started = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _show(self) -> None:
        with self._line as show:
            while not self._is_over.wait(WAITING_INTERVAL_S):
                show(Progress(time.monotonic() - self._started, self._what))


WAITING_INTERVAL_S = 0.5


class Pace:
    """Rate and time left of what is counted in words: `taking host memory, 12 of 256 MiB`."""

    def __init__(self) -> None:
        self._what = ""
        self._first: tuple[float, float] | None = None  # when it was first seen, and how much was done then

    def of(self, phase: str) -> str:
        found = _COUNT.search(phase)
        if found is None:
            return phase
        what, now = phase[: found.start()], time.monotonic()
        done, total, unit = float(found[1]), float(found[2]), found[3]
        if what != self._what or self._first is None or done < self._first[1]:
            self._what, self._first = what, (now, done)
        since, before = self._first
        if now - since < PACE_AFTER_S or done <= before:
            return phase
        rate = (done - before) / (now - since)
        return f"{phase}, {rate:.3g} {unit}/s, {(total - done) / rate:.0f} s left"


PACE_AFTER_S = 1.0
_COUNT = re.compile(r"(\d+(?:\.\d+)?) of (\d+(?:\.\d+)?) (\w+)")
