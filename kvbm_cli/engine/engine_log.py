"""EngineLog: what an engine prints, read for what a start is at and for the story of one that failed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 12
TAIL_BYTES = 16384
LONGEST_LINE = 300


@dataclass(frozen=True, slots=True)
class EngineLog:
    """The file `path` from the byte `start` on: what lies before it is of an earlier engine."""

    path: Path
    start: int

    def lines(self) -> list[str]:
        """The last lines that say something; none when somebody has removed the file."""
        try:
            with self.path.open("rb") as log:
                log.seek(max(self.start, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()]

    def from_here(self) -> EngineLog:
        """The same file, from its present end on."""
        try:
            return EngineLog(self.path, self.path.stat().st_size)
        except FileNotFoundError:
            return EngineLog(self.path, 0)

    def phase(self) -> str | None:
        """The last line in words for what a starting engine is at."""
        return next(filter(None, map(readable_phase, reversed(self.lines()))), None)

    def silent_s(self) -> float:
        """Seconds since anything was written, 0 where nobody can tell."""
        try:
            return max(0.0, time.time() - self.path.stat().st_mtime)
        except FileNotFoundError:
            return 0.0

    def tail(self, *, told: Collection[str] = ()) -> str:
        """The last lines, and the first error shortly before them: what several processes say at their end is long.

        Lines that are `told` already are left out.
        """
        lines = [line for line in self.lines() if line not in told]
        shown = lines[-TAIL_LINES:]
        error = next(filter(_ERROR.search, lines[:-TAIL_LINES]), None)
        report = [f"  {self.path}, last lines:" if lines else f"  {self.path} is empty"]
        report += [f"    {line}" for line in shown]
        return "\n".join(report + ([f"  first error before them:\n    {error[:LONGEST_LINE]}"] if error else []))


_ERROR = re.compile(r"\bERROR\b|^([A-Za-z_]+\.)*[A-Za-z_]+(Error|Exception): ")
_LOG_PREFIX = re.compile(
    r"(\(\S+ pid=\d+\) )?((DEBUG|INFO) [\d-]+ [\d:.]+ \[[^\]]*:\d+\] ?)?(\d\d:\d\d:\d\d )?(kvbm: )?"
)
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROGRESS_BAR = re.compile(r"\s*\|.*it/s\]$")
_WORDS = re.compile(r"[A-Za-z]\w+ \w")
_NOT_A_PHASE = re.compile(r"\s|WARNING|ERROR|\[?[WE]\d{4} |/|.*Warning: |.*\w\(")


def readable_phase(line: str) -> str | None:
    """A log line as words for what a starting engine is at, without who wrote it, when and where; None if it has none.

    Warnings, their continuation lines and drawings say nothing of how far the start is.
    """
    text = _PROGRESS_BAR.sub("", _LOG_PREFIX.sub("", _TERMINAL_CODE.sub("", line), count=1))
    return text if _WORDS.search(text) and not _NOT_A_PHASE.match(text) else None
