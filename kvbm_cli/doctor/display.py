"""Prints the doctor's report: a group with its checks, each as soon as it is known."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from kvbm_cli.doctor.result import Check, CheckState
from kvbm_cli.terminal.console import WIDTH, columns, print_data

STATE_WIDTH = max(len(state.value) for state in CheckState)
NAME_WIDTH = 17
COLUMN = 2 + STATE_WIDTH + 2 + NAME_WIDTH + 2
INDENT = " " * COLUMN


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
    """Return the text in lines that begin at COLUMN; a word that is too long for one, such as a path, stays whole."""
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
