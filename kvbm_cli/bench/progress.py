"""What is shown while a run goes on, on stderr: one live line on a terminal, a line per phase elsewhere.

The live line is drawn a few times per second by a thread of its own; the load client only changes plain attributes.
It is never wider than the terminal: a line that wraps cannot be drawn over.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from kvbm_cli.bench.request_record import RequestRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

REFRESH_PER_SECOND = 4
BAR_CELLS = 20
SMALLEST_BAR_CELLS = 8


class ShownProgress:
    """Follows the phases of an experiment. As a context manager it owns the terminal's last line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._started = time.monotonic()
        self._text = "starting"
        self._phase_started = self._started
        self._expected_s: float | None = None
        self._remaining_s: float | None = None
        self._answered = 0
        self._failed = 0
        self._last_ttft_ms: float | None = None

    def __enter__(self) -> ShownProgress:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str, *, expected_s: float | None = None, remaining_s: float | None = None) -> None:
        self._text = text
        self._phase_started = time.monotonic()
        self._expected_s, self._remaining_s = expected_s, remaining_s
        self._answered = self._failed = 0
        self._last_ttft_ms = None
        if self._live is None:
            left = self.left_s()
            self._console.print(text + (f" ({duration(left)} left)" if left is not None else ""), highlight=False)

    def request_ended(self, record: RequestRecord) -> None:
        self._answered += record.is_ok
        self._failed += not record.is_ok
        self._last_ttft_ms = record.ttft_ms if record.is_ok else self._last_ttft_ms

    def left_s(self) -> float | None:
        """Seconds until the whole run ends; unknown until the recording has fixed the schedule."""
        if self._remaining_s is None:
            return None
        passed_s = time.monotonic() - self._phase_started
        return max(0.0, (self._expected_s or 0.0) - passed_s) + self._remaining_s

    def _line(self) -> Text:
        from rich.text import Text

        left_s, passed_s = self.left_s(), time.monotonic() - self._started
        clock = f"{duration(left_s)} left" if left_s is not None else f"{duration(passed_s)} so far"
        room = self._console.width - 1  # some terminals wrap after a character in the last column
        words = self._words(clock, room)
        cells = min(BAR_CELLS, room - len(words) - 2)
        cells = cells if cells >= SMALLEST_BAR_CELLS else 0
        filled = round(cells * passed_s / (passed_s + left_s)) if left_s else 0
        line = Text.assemble(("━" * filled, "green"), ("━" * (cells - filled), "dim"), "  " if cells else "", words)
        line.no_wrap = True
        line.truncate(room, overflow="ellipsis")
        return line

    def _words(self, clock: str, room: int) -> str:
        """Phase, what was answered and `clock`; the least important is left out until the rest fits into `room`."""
        details = []
        if self._answered or self._failed:
            details.append(f"{self._answered} answered" + (f", {self._failed} failed" if self._failed else ""))
        if self._last_ttft_ms is not None:
            details.append(f"first token {self._last_ttft_ms:.0f} ms")
        while len(words := " · ".join([self._text, *details, clock])) > room and details:
            details.pop()
        return words


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
