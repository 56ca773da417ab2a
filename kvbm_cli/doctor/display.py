"""How the doctor's report looks: a group with its checks as soon as each is known, progress while one takes long."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from kvbm_cli.doctor.result import Check, CheckState
from kvbm_cli.terminal.console import WIDTH, columns, print_data

STATE_WIDTH = max(len(state.value) for state in CheckState)
NAME_WIDTH = 17
COLUMN = 2 + STATE_WIDTH + 2 + NAME_WIDTH + 2
INDENT = " " * COLUMN
SILENCE_S = 2.0
TICK_S = 0.5
LINE_INTERVAL_S = 5.0


def show_group(name: str, about: str | None, *, is_first: bool) -> None:
    heading = name if about is None else f"{name}: {about}"
    print_data(heading if is_first else f"\n{heading}")


def show_check(check: Check) -> None:
    """CheckState, name and finding in columns; the remedy below the finding."""
    head = f"  {check.state.value:{STATE_WIDTH}}  {check.name:{NAME_WIDTH}}"
    print_data(
        f"{head}  {_beside(check.finding)}" if len(head) < COLUMN else f"{head}\n{INDENT}{_beside(check.finding)}"
    )
    if check.remedy is not None:
        print_data(f"{INDENT}remedy: {check.remedy}")  # in one line: some are commands to copy


def _beside(text: str) -> str:
    """The text in lines that begin at COLUMN; a word that is too long for one, such as a path, stays whole."""
    room = max(1, (columns() or WIDTH) - COLUMN)
    return f"\n{INDENT}".join(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False))


def summary(checks: Sequence[Check]) -> str:
    counts = Counter(check.state for check in checks)
    shown = (f"{counts[state]} {_NOUNS[state][counts[state] != 1]}" for state in CheckState if counts[state])
    return f"{len(checks)} checks: {', '.join(shown)}"


_NOUNS = {state: (state.value, state.value) for state in CheckState} | {
    CheckState.WARNING: ("warning", "warnings"),
    CheckState.FAILURE: ("failure", "failures"),
}


def as_data(groups: Mapping[str, Sequence[Check]]) -> list[Mapping[str, object]]:
    return [
        {"group": group, **asdict(check), "state": check.state.value} for group, of in groups.items() for check in of
    ]


class Progress:
    """Says on stderr what the doctor is at, from two seconds on: one live line on a terminal, else now and then a line.

    `say` is called by the doctor's thread; a thread of this object prints.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._phase, self._since = "", time.monotonic()
        self._printed: tuple[str, float] = ("", 0.0)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._has_line = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._over.set()
        self._thread.join()
        self.clear()

    def say(self, phase: str) -> None:
        with self._lock:
            self._phase = phase

    def clear(self) -> None:
        """Before something else is printed."""
        with self._lock:
            self._since = time.monotonic()
            if self._has_line:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
                self._has_line = False

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            with self._lock:
                self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        taken_s = now - self._since
        if not self._phase or taken_s < SILENCE_S:
            return
        line = f"checking  {taken_s:5.1f} s  {self._phase}"
        if self._live:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            self._has_line = True
        elif self._phase != self._printed[0] or now - self._printed[1] >= LINE_INTERVAL_S:
            self._printed = (self._phase, now)
            print(line, file=sys.stderr, flush=True)
