"""`kvbm top`: reads engines at an interval and draws a page, until q is pressed. One page without a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvbm.errors import UsageError
from kvbm_cli.terminal.console import WIDTH, columns, print_data, print_json, print_note
from kvbm_cli.top.figures import figures
from kvbm_cli.top.screen import View, page
from kvbm_cli.top.watched import EngineReader, WatchedEngine, of_runs, of_url

if TYPE_CHECKING:
    from rich.text import Text

QUIT = ("q", "\x03", "\x04")
KEY_BYTES = 32


def run_top(run: str | None, *, url: str | None, interval_s: float, once: bool, as_json: bool) -> int:
    if run is not None and url is not None:
        raise UsageError("`RUN` and `--url` exclude each other", hint="give one of them")
    engines = EngineReader(of_url(url) if url is not None else of_runs(run))
    title = url or run or "all engines"
    if not (once or as_json) and sys.stdin.isatty() and sys.stdout.isatty():
        return _live(engines, title, interval_s)
    if engines.read():
        time.sleep(interval_s)
    found = engines.read()
    if as_json:
        print_json(as_data(found, engines.warnings))
    elif not found:
        print_note("no engine is running")
    else:
        print_data(page(found, engines.warnings, View(), title=title, width=columns() or WIDTH, height=None).plain)
    return 0 if any(one.pair for one in found) else 1


def as_data(engines: list[WatchedEngine], warnings: list[str]) -> dict[str, Any]:
    known = [one.pair for one in engines if one.pair]
    return {
        "engines": [
            {"name": one.name, "problem": one.problem, **(figures([one.pair]).as_data() if one.pair else {})}
            for one in engines
        ],
        "total": figures(known).as_data() if known else None,
        "warnings": warnings,
    }


def _live(engines: EngineReader, title: str, interval_s: float) -> int:
    from rich.console import Console
    from rich.live import Live

    # The stream of commands escapes what rich sends to a terminal. The page itself is made of printable lines.
    terminal = open(sys.stdout.fileno(), "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    console, view = Console(file=terminal, highlight=False, force_terminal=True), View()
    found: list[WatchedEngine] = []

    def drawn() -> Text:
        width, height = console.size
        return page(found, engines.warnings, view, title=title, width=width, height=height)

    screen = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with contextlib.suppress(KeyboardInterrupt), _keys() as keys, screen as live:
        next_s = time.monotonic()
        while True:
            if not view.is_paused and time.monotonic() >= next_s:
                found = engines.read()
                next_s = max(next_s + interval_s, time.monotonic())
            live.update(drawn(), refresh=True)
            for key in _pressed(keys, max(0.05, min(interval_s, next_s - time.monotonic()))):
                if key in QUIT:
                    return 0
                view.press(key)
    return 0


def _pressed(descriptor: int, seconds: float) -> str:
    """Return the keys that were pressed, at the latest after this time; q if the terminal is gone."""
    poll = select.poll()  # `select.select` fails at descriptors above 1,023
    poll.register(descriptor, select.POLLIN)
    return os.read(descriptor, KEY_BYTES).decode(errors="replace") or "q" if poll.poll(1e3 * seconds) else ""


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Let each key arrive at once and without an echo; restore the terminal at the end."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
