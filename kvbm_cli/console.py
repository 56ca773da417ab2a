"""What commands print: data to stdout, everything else to stderr, the same words with and without a terminal."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence
from types import TracebackType

from kvbm_cli.process import Progress

WIDTH = 80
PHASE_INTERVAL_S = 2.0
PHASE_WIDTH = 60


def print_data(text: str) -> None:
    print(text, flush=True)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2), flush=True)


def print_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns of equal width, two spaces apart; those whose index is in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def cell(text: str, column: int) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    return "\n".join("  ".join(cell(text, column) for column, text in enumerate(row)).rstrip() for row in rows)


def labelled(label: str, text: str, *, label_width: int) -> list[str]:
    """Lines with `text` beside `label`, or below it, at the right, where one of them is too long for its place."""
    room = WIDTH - label_width - 2
    lines = _wrapped(text, room)
    if len(label) > label_width or max(map(len, lines)) > room:
        return [label, *(line.rjust(WIDTH) for line in _wrapped(text, WIDTH))]
    labels = [label, *[""] * (len(lines) - 1)]
    return [f"{head.ljust(label_width)}  {line}" for head, line in zip(labels, lines, strict=True)]


def noted(line: str, note: str, *, separator: str = "  ") -> str:
    """`line` with `note` behind it, or below it, at the right, where the line has no room for it."""
    whole = f"{line}{separator}{note}"
    return whole if len(whole) <= WIDTH else f"{line.rstrip()}\n{note.rjust(WIDTH)}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]


class StartProgress:
    """Shows what a starting engine is at: one live line on a terminal, a line per phase anywhere else."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._phase = ""
        self._printed = -PHASE_INTERVAL_S

    def __enter__(self) -> StartProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, progress: Progress) -> None:
        phase = progress.phase[:PHASE_WIDTH]
        line = f"starting  {progress.elapsed_s:5.1f} s  {phase}"
        if self._live:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif phase != self._phase and time.monotonic() - self._printed >= PHASE_INTERVAL_S:
            self._phase, self._printed = phase, time.monotonic()
            print_note(line)
