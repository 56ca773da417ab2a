"""What commands print: data to stdout, everything else to stderr, the same words with and without a terminal."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from kvbm_cli.process import Progress

WIDTH = 80
PHASE_INTERVAL_S = 2.0


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


def columns(stream: TextIO | None = None) -> int | None:
    """Of the terminal that a stream (stdout) is, or COLUMNS; None in a pipe or a file, where nothing is wrapped."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if (stream or sys.stdout).isatty() else None


def labelled(label: str, text: str, *, label_width: int) -> list[str]:
    """Lines with `text` beside `label`, or below it, at the right, where one of them is too long for its place."""
    width = columns()
    if width is None:
        return [f"{label.ljust(label_width)}  {text}"]
    room = width - label_width - 2
    lines = _wrapped(text, room)
    if len(label) > label_width or max(map(len, lines)) > room:
        return [label, *(line.rjust(width) for line in _wrapped(text, width))]
    labels = [label, *[""] * (len(lines) - 1)]
    return [f"{head.ljust(label_width)}  {line}" for head, line in zip(labels, lines, strict=True)]


def noted(line: str, note: str, *, separator: str = "  ") -> str:
    """`line` with `note` behind it, or below it, at the right, where the line has no room for it."""
    whole, width = f"{line}{separator}{note}", columns()
    if width is None or len(whole) <= width:
        return whole
    line = line.rstrip()
    room = width - len(line)
    return line + (note.rjust(room) if len(separator + note) <= room else f"\n{note.rjust(width)}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]


def stopped_text(name: str, took_s: float, *, was_killed: bool) -> str:
    """How a run ended that was told to."""
    return f"{name} {'was killed' if was_killed else 'stopped'} after {took_s:.1f} s"


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
