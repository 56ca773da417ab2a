"""Reads the directory of a run: the summary, one point per request, and the samples of the server.

A missing server-metrics.jsonl is normal. A last line without its newline is left from an interruption and is ignored,
with a note. Everything else that cannot be read is a UsageError with file, line and value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, UsageError, reason_of
from kvbm_cli.bench.show.elements import at, listing, mapping, number

FORMAT = 2
TIERS = ("g1", "g2", "g3", "g4", "computed")
TIMES = ("launched_ms", "ttft_ms", "ttft_from_launch_ms", "end_to_end_ms", "lateness_ms")


@dataclass(frozen=True, slots=True)
class RequestPoint:
    """What the report needs of one request. `tokens` are prompt tokens by source, without unknown sources."""

    run: str
    arm: str
    cell: str
    pair: int
    index: int
    turn: int
    phase: str
    is_ok: bool
    tokens: dict[str, float]
    cached_tokens: float | None
    launched_ms: float | None
    ttft_ms: float | None
    ttft_from_launch_ms: float | None
    end_to_end_ms: float | None
    lateness_ms: float | None


@dataclass(frozen=True, slots=True)
class RunData:
    """`samples` has the lines of server-metrics.jsonl by run. `notes` are what the reader must know of the files.

    The summary of an interrupted run has no arms and cells. Its arms are then in plan.json, and `planned` has the
    definitions of its cells by name.
    """

    summary: dict[str, Any]
    planned: dict[str, dict[str, Any]]
    points: list[RequestPoint]
    runs: list[dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]
    notes: list[str]

    def arms(self) -> list[str]:
        """Every arm, in the order of the summary."""
        return list(dict.fromkeys([*self.summary["arms"], *(point.arm for point in self.points)]))

    def cells(self) -> list[dict[str, Any]]:
        """Return the cells of the summary, then those that only have requests, as after an interruption."""
        known = {cell["name"]: cell for cell in self.summary["cells"]}
        names = dict.fromkeys(point.cell for point in self.points if point.cell not in known)
        return [*known.values(), *({**self.planned.get(name, {}), "name": name} for name in names)]


def read_run(directory: Path) -> RunData:
    """UsageError unless the directory holds a run in a format that this version knows."""
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise UsageError(f"`{directory}` {problem}", hint="name the directory that `kvbm bench` printed")
    summary = _summary(directory / "summary.json")
    plan = {} if summary["arms"] else _plan(directory / "plan.json")
    summary["arms"] = summary["arms"] or mapping(plan.get("arms"))
    planned = {str(at(cell, "name")): mapping(cell) for cell in listing(plan.get("cells"))}
    notes: list[str] = []
    runs = [row for _, row in _lines(directory / "runs.jsonl", notes)]
    for row, run in enumerate(runs, start=1):
        _required(directory / "runs.jsonl", row, run, ("run", str), ("arm", str), ("cell", str), ("pair", int))
    points = _points(directory / "requests.jsonl", notes)
    completed = {run["run"] for run in runs}
    if completed:
        points = [point for point in points if point.run in completed]
    samples = {name: _samples(directory, name, notes) for name in completed}
    return RunData(summary, planned, points, runs, {name: found for name, found in samples.items() if found}, notes)


def _summary(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise UsageError(f"`{file.parent}` is not the directory of a benchmark run: it has no summary.json")
    content = _json(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise UsageError(
            f"`{file}`: `format` is {_shown(found)}, and this version of kvbm reads {FORMAT}",
            hint="repeat the measurement with this version, or use the version that wrote the file",
        )
    content = {"cells": [], "arms": {}, **content}
    if not isinstance(content["arms"], dict):
        raise UsageError(
            f"`{file}`: `arms` is {_shown(content['arms'])}; an object by the names of the arms is required"
        )
    if not isinstance(content["cells"], list):
        raise UsageError(f"`{file}`: `cells` is {_shown(content['cells'])}; a list is required")
    for cell in content["cells"]:
        if not isinstance(cell, dict) or not isinstance(cell.get("name"), str):
            raise UsageError(f"`{file}`: `cells` has {_shown(cell)}; an object with a `name` is required")
    return content


def _plan(file: Path) -> dict[str, Any]:
    return mapping(_json(file)) if file.exists() else {}


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise UsageError(f"`{file}` is not valid JSON: line {error.lineno}: {error.msg}") from None


def _points(file: Path, notes: list[str]) -> list[RequestPoint]:
    """One point per request, in the order of the file. Of two lines for one request, the later one counts."""
    found: dict[tuple[str, int], RequestPoint] = {}
    for line, row in _lines(file, notes):
        point = _point(file, line, row)
        found[point.run, point.index] = point
    return list(found.values())


def _point(file: Path, line: int, row: dict[str, Any]) -> RequestPoint:
    _required(file, line, row, ("run", str), ("arm", str), ("cell", str), ("pair", int), ("index", int), ("turn", int))
    values = {name: _optional(file, line, row, name) for name in TIMES}
    tokens = {tier: _optional(file, line, row, f"{tier}_tokens") for tier in TIERS}
    return RequestPoint(
        run=row["run"],
        arm=row["arm"],
        cell=row["cell"],
        pair=row["pair"],
        index=row["index"],
        turn=row["turn"],
        phase=str(row.get("phase")),
        is_ok=row.get("status") == "ok",
        tokens={tier: amount for tier, amount in tokens.items() if amount is not None},
        cached_tokens=_optional(file, line, row, "cached_tokens"),
        **values,
    )


def _required(file: Path, line: int, row: dict[str, Any], *fields: tuple[str, type]) -> None:
    for name, kind in fields:
        if not isinstance(row.get(name), kind) or isinstance(row.get(name), bool):
            what = "a string" if kind is str else "an integer"
            raise UsageError(f"`{file}` line {line}: `{name}` is {_shown(row.get(name))}; {what} is required")


def _optional(file: Path, line: int, row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is not None and number(value) is None:
        raise UsageError(f"`{file}` line {line}: `{name}` is {_shown(value)}; a number or null is required")
    return number(value)


def _samples(directory: Path, run: str, notes: list[str]) -> list[dict[str, Any]]:
    if run in (".", "..") or "/" in run or "\0" in run:
        raise UsageError(f"`{directory / 'runs.jsonl'}`: {_shown(run)} is not the name of a run")
    file = directory / "runs" / run / "server-metrics.jsonl"
    rows = []
    for line, row in _lines(file, notes, is_optional=True):
        if _optional(file, line, row, "t_ms") is None:
            raise UsageError(f"`{file}` line {line}: `t_ms` is {_shown(row.get('t_ms'))}; a number is required")
        rows.append(row)
    return rows


def _lines(file: Path, notes: list[str], *, is_optional: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with one on each line, with line numbers."""
    if not file.exists():
        if not is_optional:
            notes.append(f"{file.name} is missing: the report has no data of it")
        return
    lines = _text(file).split("\n")
    for line, content in enumerate(lines, start=1):
        if not content:
            continue
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            if line == len(lines):
                notes.append(f"the last line of {file.name} is incomplete and was ignored")
                return
            raise UsageError(f"`{file}` line {line} is not valid JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise UsageError(f"`{file}` line {line}: {_shown(row)} is not an object")
        yield line, row


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{file}` is not UTF-8: byte {error.start}") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read `{file}`: {reason_of(error)}") from None


def _shown(value: object) -> str:
    dumped = json.dumps(value)
    return dumped if len(dumped) <= 60 else f"{dumped[:57]}..."
