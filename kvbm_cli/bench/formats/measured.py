"""What the exported files are made of: the requests of one arm in one cell, over all its completed runs.

Requests of a run that did not complete are left out. If a run was repeated after an interruption, the last record of
each of its requests counts. Times of a record are milliseconds from the start of its run; `seconds` places them on one
axis that begins with the first run of the cell and arm.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, UsageError, reason_of

Record = Mapping[str, Any]
TIERS = ("g1", "g2", "g3", "computed")


@dataclass(frozen=True, slots=True)
class Measured:
    """`runs` are lines of runs.jsonl, in order of time. `records` maps the name of each run to its requests, by index.

    `workload` is the definition of the workload, empty if unknown. `slo_ms` maps `ttft`, `tpot`, `e2e` to limits.
    """

    arm: str
    cell: str
    runs: tuple[Record, ...]
    records: Mapping[str, tuple[Record, ...]]
    model: str = "unknown"
    seed: int | None = None
    kvbm_version: str | None = None
    pressure: float | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    slo_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def requests(self) -> list[Record]:
        """All requests, run by run."""
        return [record for run in self.runs for record in self.records[run["run"]]]

    @property
    def succeeded(self) -> list[Record]:
        return [record for record in self.requests if record["status"] == "ok"]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.requests if record["status"] != "ok"]

    @property
    def duration_s(self) -> float:
        """The time under load: the sum over the runs."""
        return sum(float(run["duration_s"]) for run in self.runs)

    @property
    def started_unix_s(self) -> float:
        return float(self.runs[0]["started_unix_s"])

    @property
    def concurrency(self) -> int | None:
        """Sessions in flight in a closed loop; `None` in an open loop, or if unknown."""
        value = (self.workload.get("schedule") or {}).get("concurrency")
        return None if value is None else int(value)

    @property
    def offered_rate(self) -> float | None:
        """Intended launches per second, of the first run; all runs of a cell have the same plan."""
        launches = [float(record["intended_ms"]) for record in self.records[self.runs[0]["run"]]]
        if len(launches) < 2 or max(launches) == min(launches):
            return None
        return (len(launches) - 1) / (max(launches) - min(launches)) * 1e3

    def unix_s(self, record: Record, stamp_ms: float) -> float:
        run = next(run for run in self.runs if run["run"] == record["run"])
        return float(run["started_unix_s"]) + stamp_ms / 1e3

    def facts(self) -> dict[str, Any]:
        """Our own facts, under names that no other tool uses. Only what is known; values are no containers."""
        engine = self.runs[0].get("engine") or {}
        given = {
            "version": self.kvbm_version,
            "arm": self.arm,
            "cell": self.cell,
            "workload": self.workload.get("name", self.cell),
            "pressure": self.pressure,
            "runs": len(self.runs),
            "block_size": engine.get("block_size"),
            "g1_blocks": engine.get("g1_blocks"),
            **{f"prompt_tokens_{tier}": total_of(self.succeeded, f"{tier}_tokens") for tier in TIERS},
        }
        return {f"kvbm_{name}": value for name, value in given.items() if value is not None}


def total_of(records: list[Record], name: str) -> int | None:
    """Sum of a number of tokens; `None` if the server did not report it for one of the records."""
    values = [record.get(name) for record in records]
    return None if None in values else sum(int(value) for value in values if value is not None)


def output_tokens(record: Record) -> int:
    """Tokens of the answer; counted by the chunks if the server sent no usage."""
    if record.get("output_tokens") is not None:
        return int(record["output_tokens"])
    return int(record.get("first_chunk_tokens") or 0) + len(record.get("token_gaps_ms") or ())


def launch_ms(record: Record) -> float:
    """The launch; the intended one if the request failed before it."""
    launched = record.get("launched_ms")
    return float(record["intended_ms"] if launched is None else launched)


def read(directory: Path) -> list[Measured]:
    """One value per arm and cell of the run directory. UsageError names the file and line that is wrong."""
    runs = list(_lines(directory / "runs.jsonl", ("run", "arm", "cell", "started_unix_s", "duration_s")))
    runs_of: dict[tuple[str, str], dict[str, Record]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: run["started_unix_s"]):
        runs_of[run["arm"], run["cell"]][run["run"]] = run
    records: dict[str, dict[int, Record]] = defaultdict(dict)
    for record in _lines(directory / "requests.jsonl", ("run", "index", "status", "intended_ms")):
        records[record["run"]][record["index"]] = record
    plan = _object(directory / "plan.json")
    summary = _object(directory / "summary.json")
    return [
        _measured(arm, cell, tuple(chosen.values()), records, plan, summary)
        for (arm, cell), chosen in sorted(runs_of.items())
    ]


def _measured(
    arm: str,
    cell: str,
    runs: tuple[Record, ...],
    records: Mapping[str, Mapping[int, Record]],
    plan: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> Measured:
    chosen = {run["run"]: tuple(one for _, one in sorted(records.get(run["run"], {}).items())) for run in runs}
    known: Mapping[str, Any] = next((one for one in summary.get("cells", ()) if one["name"] == cell), {})
    workload = known.get("workload") or {}
    return Measured(
        arm,
        cell,
        runs,
        chosen,
        model=_model(plan),
        seed=plan.get("seed"),
        kvbm_version=(summary.get("versions") or {}).get("kvbm"),
        pressure=known.get("pressure"),
        workload=workload,
        slo_ms=limits(workload.get("slo")),
    )


def _model(plan: Mapping[str, Any]) -> str:
    """The name of the model; of a path its last part, because exports name no directory of this machine."""
    name = str(plan.get("model") or "unknown")
    return Path(name).name if name.startswith(("/", "~", ".")) else name


def limits(slo: str | None) -> dict[str, float]:
    """`ttft:500,tpot:50` as a mapping, in milliseconds."""
    return {name: float(value) for name, _, value in (part.partition(":") for part in (slo or "").split(",") if part)}


def _lines(path: Path, required: tuple[str, ...]) -> Iterator[Record]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            raise UsageError(f"{path}, line {number}: not JSON: {line[:80]!r}") from None
        missing = [name for name in required if not isinstance(value, dict) or value.get(name) is None]
        if missing:
            raise UsageError(f"{path}, line {number}: no `{missing[0]}` in {line[:80]!r}")
        yield value


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty without the file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: a JSON object is required")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {reason_of(error)}") from None
