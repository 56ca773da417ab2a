"""`kvbm logs`: prints the log of a run's engine, and with `--follow` new lines until the run ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from kvbm.errors import EnvironmentProblem
from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.runs.status import log_paths
from kvbm_cli.terminal.printable import printable, without_colours

POLL_S = 0.2
CHUNK_BYTES = 1 << 16


def show_logs(reference: str | None, *, follow: bool, line_count: int | None) -> None:
    """Prints logs, of several engines with their names as prefixes. Raises UsageError for an ambiguous reference."""
    run = Runs.of_user().one(reference)
    paths = log_paths(run)
    width = max(map(len, paths)) if len(paths) > 1 else 0
    tails = [_Tail(path, f"{name:<{width}} | " if width else "", line_count) for name, path in paths.items()]
    if not any(tail.is_there for tail in tails) and not run.is_living:
        raise EnvironmentProblem(f"the log of `{run.facts.name}` was removed: `{tails[-1].path}`")
    _print(tails)
    while follow and run.is_living:
        time.sleep(POLL_S)
        run = run.again()  # before the files are read for the last time
        _print(tails)
    for tail in tails:
        tail.finish()


def _print(tails: Iterable[_Tail]) -> None:
    for tail in tails:
        tail.print_new()


class _Tail:
    """Reads one file from its last lines on. The file of an engine that starts later may not exist yet."""

    def __init__(self, path: Path, prefix: str, line_count: int | None) -> None:
        self.path = path
        self._prefix = prefix
        self._line_count = line_count
        self._file: BinaryIO | None = None
        self._rest = b""

    @property
    def is_there(self) -> bool:
        return self.path.is_file()

    def print_new(self) -> None:
        if self._file is None:
            if not self.is_there:
                return
            self._file = self.path.open("rb")
            if self._line_count is not None:
                self._file.seek(start_of_last_lines(self._file, self._line_count))
        while chunk := self._file.read(CHUNK_BYTES):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            self._write(whole)

    def finish(self) -> None:
        """Prints an incomplete last line too."""
        if self._rest:
            self._write([self._rest])
        if self._file is not None:
            self._file.close()

    def _write(self, lines: Iterable[bytes]) -> None:
        """Writes printable text: an engine may write anything, also what a client sent. Redrawn lines are separate."""
        texts = (without_colours(line.decode(errors="backslashreplace")) for line in lines)
        shown = (piece for text in texts for piece in (text.rstrip("\r").split("\r")))
        sys.stdout.write("".join(f"{self._prefix}{printable(piece)}\n" for piece in shown))
        sys.stdout.flush()


def start_of_last_lines(file: BinaryIO, line_count: int) -> int:
    """Returns the offset of the last `line_count` lines. Reads only these lines."""
    end = file.seek(0, os.SEEK_END)
    if line_count == 0:
        return end
    position, text = end, b""
    while position > 0 and text.rstrip(b"\n").count(b"\n") < line_count:
        step = min(CHUNK_BYTES, position)
        position = file.seek(position - step)
        text = file.read(step) + text
    kept = text.rstrip(b"\n").rsplit(b"\n", line_count)
    return end - len(text) + (len(kept[0]) + 1 if len(kept) > line_count else 0)
