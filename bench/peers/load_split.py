"""Splits the time to first token into its parts, from the trace of `traced_loads.py`."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Each part ends at its moment and begins at the one before it. A G1 hit has only those without a star.
PARTS = {
    "arrived": "client to scheduler",
    "ordered": "match, allocation and order*",
    "bound": "order to worker*",
    "began": "worker to first copying thread*",
    "copied": "copy, until the last thread ends*",
    "reported": "end of copy to report in the scheduler*",
    "scheduled": "report to the step that computes",
    "computed": "step that computes",
    "answered": "step to client",
}


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of each part of one request, steps before the one that computes it, CPU time and cores of the copies."""

    parts: Mapping[str, float]
    steps_before: int
    copy_cpu_s: float
    copy_cores: tuple[int, ...]


def read(directory: Path) -> list[dict[str, Any]]:
    """All moments of all processes of a server, in order."""
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda moment: moment["at"])


def split(moments: Iterable[Mapping[str, Any]], sent_at: float, ttft_s: float) -> Split:
    """Split the one request that was sent at that time."""
    end = sent_at + ttft_s
    inside = [moment for moment in moments if sent_at <= moment["at"] <= end]
    arrived = first(inside, "arrived", sent_at)
    scheduled = next(m for m in inside if m["moment"] == "ordered" and m["tokens"].get(arrived["id"]))
    times = {"sent": sent_at, "arrived": arrived["at"]}
    reported = [m for m in inside if m["moment"] == "reported" and arrived["id"] in m["ids"]]
    copies = [m for m in inside if m["moment"] == "copied"]
    if reported:
        times["ordered"] = first(inside, "ordered", arrived["at"])["at"]
        times["bound"] = first(inside, "bound", times["ordered"])["at"]
        times["began"] = min(copy["began"] for copy in copies)
        times["copied"] = max(copy["at"] for copy in copies)
        times["reported"] = reported[0]["at"]
    times["scheduled"] = scheduled["at"]
    times["computed"] = first(inside, "ended", scheduled["at"])["at"]
    times["answered"] = end
    orders = [m for m in inside if m["moment"] == "ordered" and m["at"] < scheduled["at"]]
    return Split(
        parts={name: times[name] - times[before] for before, name in itertools.pairwise(times)},
        steps_before=len(orders),
        copy_cpu_s=sum(copy["cpu_s"] for copy in copies),
        copy_cores=tuple(sorted(copy["core"] for copy in copies)),
    )


def first(moments: Iterable[Mapping[str, Any]], name: str, after: float) -> Mapping[str, Any]:
    return next(moment for moment in moments if moment["moment"] == name and moment["at"] >= after)


def medians(splits: Iterable[Split]) -> dict[str, float]:
    found = list(splits)
    return {
        name: round(statistics.median(split.parts[name] for split in found) * 1000, 2)
        for name in PARTS
        if all(name in split.parts for split in found)
    }
