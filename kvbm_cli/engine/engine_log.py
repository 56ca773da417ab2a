"""The end of an engine's log. EngineLog reads it for the phase of a start and for the report of a failure."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvbm_cli.engine.refused_flag import without_usage
from kvbm_cli.terminal.printable import without_colours

TAIL_LINES = 12
TAIL_BYTES = 32768
LONGEST_LINE = 300
MOST_EXAMINED = 4000  # characters of a line: some patterns take quadratic time


def end_of(path: Path, most_bytes: int, *, start: int = 0) -> str:
    """Return the end of a log as text: at most `most_bytes`, none before byte `start`. Empty if it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(start, os.fstat(log.fileno()).st_size - most_bytes))
            return log.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class EngineLog:
    """The file `path` from byte `start` on. Earlier bytes come from an earlier engine. The file may be unreadable."""

    path: Path
    start: int

    def lines(self) -> list[str]:
        """Return the last non-empty lines, none if the file cannot be read."""
        text = without_colours(end_of(self.path, TAIL_BYTES, start=self.start))
        return [line[:MOST_EXAMINED].rstrip() for line in text.splitlines() if line.strip()]

    def from_here(self) -> EngineLog:
        """Return the same log from its current end on."""
        try:
            return EngineLog(self.path, self.path.stat().st_size)
        except OSError:
            return EngineLog(self.path, 0)

    def phase(self) -> str | None:
        """Return the last line that describes a phase of the start."""
        return next(filter(None, map(readable_phase, reversed(self.lines()))), None)

    def silent_s(self) -> float:
        """Return seconds since the last write, 0 if unknown."""
        try:
            return max(0.0, time.time() - self.path.stat().st_mtime)
        except OSError:
            return 0.0

    def tail(self, *, without: Collection[str] = ()) -> str:
        """Return the last lines, and the first error shortly before them: several processes may end with long output.

        Omits the lines in `without`, which are already part of the error.
        """
        lines = [line for line in without_usage(self.lines()) if line not in without]
        shown, before = lines[-TAIL_LINES:], lines[:-TAIL_LINES]
        error = next(filter(_EXCEPTION.search, before), None) or next(filter(_ERROR.search, before), None)
        report = [f"  {self.path}, last lines:" if lines else f"  {self.path} is empty"]
        report += [f"    {line}" for line in shown]
        return "\n".join(report + ([f"  first error before them:\n    {error[:LONGEST_LINE]}"] if error else []))


_EXCEPTION = re.compile(r"\bERROR\b.*\] ?([A-Za-z_]+\.)*[A-Za-z_]+(Error|Exception): ")
_ERROR = re.compile(r"\bERROR\b|^([A-Za-z_]+\.)*[A-Za-z_]+(Error|Exception): ")
_LOG_PREFIX = re.compile(
    r"(\(\S+ pid=\d+\) )?((DEBUG|INFO) [\d-]+ [\d:.]+ \[[^\]]*:\d+\] ?)?(\d\d:\d\d:\d\d )?(kvbm: )?"
)
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROGRESS_BAR = re.compile(r"\s*\|.*it/s\]$")
_WORDS = re.compile(r"[A-Za-z]\w+ \w")
_NOT_A_PHASE = re.compile(r"\s|WARNING|ERROR|\[?[WE]\d{4} |/|.*Warning: |.*\w\(")


def readable_phase(line: str) -> str | None:
    """Return a log line without its prefix (process, level, time, place) as a phase of the start, None if it is none.

    Warnings, their continuation lines and drawings are not phases.
    """
    text = _PROGRESS_BAR.sub("", _LOG_PREFIX.sub("", _TERMINAL_CODE.sub("", line), count=1))
    return text if _WORDS.search(text) and not _NOT_A_PHASE.match(text) else None
