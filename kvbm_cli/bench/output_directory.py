"""The files of one run. Rows are appended as requests end, so that an interrupted run keeps what it has seen.

plan.json            the expanded schedule: every token, every launch time, and a digest of both
requests.jsonl       one line per request of every arm, errors included
<arm>/engine.log     what the engine printed
<arm>/metrics-before.txt, metrics-after.txt   the engine's counters around the measured requests
summary.json         the result; `"complete": false` marks a run that was interrupted
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.system.filesystem import write_atomically

DEFAULT_PARENT = Path("kvbm-runs")


class OutputDirectory:
    """Owns one directory from the first byte; closed by `close()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._requests = (path / "requests.jsonl").open("a", encoding="utf-8", buffering=1)

    @classmethod
    def create(cls, path: Path | None) -> OutputDirectory:
        """A new or empty directory; without `path` one named after the time. UsageError if anything is in it."""
        path = path or _named_after_now(DEFAULT_PARENT)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"{path} is not empty, and a run never writes into another one's results")
            return cls(path)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write to {path}: {(error.strerror or str(error)).lower()}") from None

    def arm(self, name: str) -> Path:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def append_request(self, row: dict[str, Any]) -> None:
        self._requests.write(json.dumps(row, separators=(",", ":")) + "\n")

    def write_json(self, name: str, content: dict[str, Any], *, indent: int | None = 2) -> None:
        """Whole or not at all: written beside and renamed."""
        write_atomically(self.path / name, json.dumps(content, indent=indent) + "\n")

    def close(self) -> None:
        self._requests.close()


def _named_after_now(parent: Path) -> Path:
    stem = time.strftime("%Y-%m-%dT%H-%M-%S")
    candidates = (parent / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())
