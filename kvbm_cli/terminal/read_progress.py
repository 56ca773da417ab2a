"""ReadProgress: how much of a known number of bytes has been read, on stderr."""

from __future__ import annotations

import sys
import time

from kvbm.text.outside import one_line
from kvbm_cli.terminal.console import print_note
from kvbm_cli.terminal.quantities import shown_size

NOTE_INTERVAL_S = 2.0
LIVE_INTERVAL_S = 0.1


class ReadProgress:
    """Prints progress: one live line on a terminal, else a line every two seconds."""

    def __init__(self, name: str) -> None:
        self._name, self._is_live = one_line(name), sys.stderr.isatty()
        self._interval_s = LIVE_INTERVAL_S if self._is_live else NOTE_INTERVAL_S
        self._started_s = self._shown_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._is_live and done == total:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        elif now_s - self._shown_s >= self._interval_s:
            self._shown_s = now_s
            rate = done / (now_s - self._started_s)
            line = f"{self._name}  {shown_size(done)} of {shown_size(total)}, {shown_size(int(rate))}/s"
            line += f", {(total - done) / rate:.0f} s left" if rate else ""
            if self._is_live:
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            else:
                print_note(line)
