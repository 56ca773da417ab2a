"""BenchProgress: the phases of an experiment on stderr, one live line on a terminal, a line per phase elsewhere.

The load client only changes plain attributes; the thread of ProgressDisplay draws the line.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.show_error import coloured

BAR_CELLS = 20
SMALLEST_BAR_CELLS = 8
GREEN, DIM = "32", "2"
RECENT_REQUESTS = 20  # of an arm, whose median is shown


class BenchProgress(ProgressDisplay):
    """Follows the phases of an experiment. As a context manager it owns the terminal's last line."""

    def __init__(self) -> None:
        super().__init__(interval_s=0.0)
        self._phase_started = time.monotonic()
        self._expected_s: float | None = None
        self._remaining_s: float | None = None
        self._answered = 0
        self._failed = 0
        self._ttft_ms: dict[str, deque[float]] = {}

    def phase(self, text: str, *, expected_s: float | None = None, remaining_s: float | None = None) -> None:
        self._phase_started = time.monotonic()
        self._expected_s, self._remaining_s = expected_s, remaining_s
        self._answered = self._failed = 0
        self._ttft_ms = {}
        self.report(text)

    def request_ended(self, record: RequestRecord) -> None:
        self._answered += record.is_ok
        self._failed += not record.is_ok
        if record.is_ok and record.ttft_ms is not None:
            self._ttft_ms.setdefault(record.arm, deque(maxlen=RECENT_REQUESTS)).append(record.ttft_ms)

    def left_s(self) -> float | None:
        """Seconds until the whole run ends; unknown until the recording has fixed the schedule."""
        if self._remaining_s is None:
            return None
        passed_s = time.monotonic() - self._phase_started
        return max(0.0, (self._expected_s or 0.0) - passed_s) + self._remaining_s

    def line(self, phase: str, elapsed_s: float, width: int) -> str:
        left_s = self.left_s()
        left = f"{duration(left_s)} left" if left_s is not None else ""
        if not self.is_live:
            return f"{phase} ({left})" if left else phase
        room = width - 1
        words = self._words(phase, left or f"{duration(elapsed_s)} so far", room)
        cells = min(BAR_CELLS, room - len(words) - 2)
        if cells < SMALLEST_BAR_CELLS:
            return words if len(words) <= room else f"{words[: room - 1]}…"
        filled = round(cells * elapsed_s / (elapsed_s + left_s)) if left_s else 0
        return f"{coloured('━' * filled, GREEN)}{coloured('━' * (cells - filled), DIM)}  {words}"

    def _words(self, phase: str, clock: str, room: int) -> str:
        """Return phase, counts and `clock`. Drops the least important until the rest fits into `room`."""
        details = []
        if self._answered or self._failed:
            details.append(f"{self._answered} answered" + (f", {self._failed} failed" if self._failed else ""))
        arms = dict(self._ttft_ms)  # the client's thread adds arms
        if arms:
            medians = (f"{name} {median(tuple(times)):.0f}" for name, times in arms.items())
            details.append(f"first token: {', '.join(medians)} ms")
        while len(words := " · ".join([phase, *details, clock])) > room and details:
            details.pop()
        return words


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
