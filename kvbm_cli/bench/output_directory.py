"""The files of one run. A record is written as soon as its request ends, so an interrupted run keeps its records.

plan.json            the expanded schedule: every token, every launch time, and a digest of both
requests.jsonl       one line per request of every arm, errors included
<arm>/engine.log     the output of the engine
<arm>/metrics-before.txt, metrics-after.txt   the engine's counters around the measured requests
summary.json         the result; `"complete": false` marks a run that was interrupted
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, UsageError, reason_of
from kvbm_cli.system.filesystem import write_atomically

DEFAULT_PARENT = Path("kvbm-runs")


class OutputDirectory:
    """Owns the directory of one run and its open file; `close()` closes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._requests = (path / "requests.jsonl").open("a", encoding="utf-8", buffering=1)

    @classmethod
    def create(cls, path: Path | None) -> OutputDirectory:
        """Create the directory; without `path` it is named after the time. UsageError if it is not empty."""
        path = path or _named_after_now(DEFAULT_PARENT)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"`--output {path}` is not empty: name a new or empty directory")
            return cls(path)
        except OSError as error:
            raise cannot_write(path, error) from None

    def arm(self, name: str) -> Path:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def append_request(self, record: dict[str, Any]) -> None:
        self._requests.write(json.dumps(record, separators=(",", ":")) + "\n")

    def write_json(self, name: str, content: dict[str, Any], *, indent: int | None = 2) -> None:
        """Write the file atomically."""
        write_atomically(self.path / name, json.dumps(content, indent=indent) + "\n")

    def close(self) -> None:
        self._requests.close()


def cannot_write(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(f"cannot write to {path}: {reason_of(error)}")


def _named_after_now(parent: Path) -> Path:
    stem = time.strftime("%Y-%m-%dT%H-%M-%S")
    candidates = (parent / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())
