"""Output of commands: data to stdout, everything else to stderr, with the same text on a terminal and in a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from kvbm.errors import UsageError
from kvbm.text.outside import json_text, one_line
from kvbm_cli.terminal.printable import printable

WIDTH = 80


def print_data(text: str) -> None:
    print(printable(text), flush=True)


def print_json(value: object) -> None:
    print(json_text(value, indent=2), flush=True)


def print_note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def is_confirmed(question: str) -> bool:
    """Asks on the terminal. UsageError if there is none."""
    if not sys.stdin.isatty():
        raise UsageError("cannot ask for confirmation: stdin is not a terminal", hint="add `--yes`")
    print(printable(f"{question} [y/N] "), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Format rows with two spaces between columns. Columns with an index in `right` are right-aligned."""
    rows = [[one_line(text) for text in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def cell(text: str, column: int) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    return "\n".join("  ".join(cell(text, column) for column, text in enumerate(row)).rstrip() for row in rows)


def columns(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal, or COLUMNS. None in a pipe or a file, where nothing is wrapped."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if (stream or sys.stdout).isatty() else None


def labelled(label: str, text: str, *, label_width: int) -> list[str]:
    """Format `text` next to `label`, or right-aligned below it if one of them is too long."""
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
    """Format `note` after `line`, or right-aligned below it if the line is too long."""
    whole, width = f"{line}{separator}{note}", columns()
    if width is None or len(whole) <= width:
        return whole
    line = line.rstrip()
    room = width - len(line)
    return line + (note.rjust(room) if len(separator + note) <= room else f"\n{note.rjust(width)}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]


def stopped_text(name: str, took_s: float, *, was_killed: bool) -> str:
    """Format the result of a stop."""
    return f"{name} {'was killed' if was_killed else 'stopped'} after {took_s:.1f} s"
