"""ProgressDisplay: what a command shows on stderr while something takes long: the phase, the time, the rate."""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import Self

from kvbm.text.outside import one_line
from kvbm_cli.terminal.console import WIDTH, columns

REDRAW_S = 0.25
PHASE_INTERVAL_S = 2.0


class ProgressDisplay:
    """One live line on a terminal, a line per phase anywhere else.

    Any thread may call `report`. A thread redraws the line, so that the time advances while the command waits. Nothing
    is shown before the first report, nor within `delay_s` of the start or the last `clear`. Outside of a terminal,
    lines are at least `interval_s` apart. A phase that counts (`12 of 256 MiB`) gets its rate and the time left.
    """

    def __init__(self, verb: str = "", *, delay_s: float = 0.0, interval_s: float = PHASE_INTERVAL_S) -> None:
        self.is_live = sys.stderr.isatty()
        self._verb = verb
        self._delay_s = delay_s
        self._interval_s = interval_s
        self._started = time.monotonic()
        self._phase: str | None = None
        self._printed_phase, self._printed = "", -interval_s
        self._has_line = False
        self._pace = Pace()
        self._lock = threading.Lock()  # of everything above
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self.clear()

    def report(self, phase: str) -> None:
        """Set what the command is doing now. A server may have sent the text."""
        phase = one_line(phase)
        with self._lock:
            if phase != self._phase:
                self._phase = phase
                self._draw()
        if self._thread is None:
            self._thread = threading.Thread(target=self._redraw, name="progress", daemon=True)
            self._thread.start()

    def report_bytes(self, what: str, done: int, total: int) -> None:
        self.report(f"{what}, {done >> 20} of {total >> 20} MiB")

    def clear(self) -> None:
        """Remove the line and start the clock again; to be called before something else is printed."""
        with self._lock:
            self._started = time.monotonic()
            if self._has_line:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
                self._has_line = False

    def restart(self, verb: str) -> None:
        """Begins another activity. Nothing is shown until its first report."""
        with self._lock:
            self._verb, self._phase = verb, None
        self.clear()

    def line(self, phase: str, elapsed_s: float, width: int) -> str:
        """Return the text to show, shorter than `width`: some terminals wrap after the last column."""
        return f"{self._verb}  {elapsed_s:5.1f} s  {phase}"[: width - 1]

    def _redraw(self) -> None:
        while not self._is_over.wait(REDRAW_S):
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if self._phase is None or now - self._started < self._delay_s:
            return
        line = self.line(self._pace.of(self._phase), now - self._started, columns(sys.stderr) or WIDTH)
        if self.is_live:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            self._has_line = True
        elif self._phase not in ("", self._printed_phase) and now - self._printed >= self._interval_s:
            self._printed_phase, self._printed = self._phase, now
            print(line, file=sys.stderr, flush=True)


class Pace:
    """Rate and time left of a counted phase: `taking host memory, 12 of 256 MiB`."""

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
