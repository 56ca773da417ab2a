"""report.html of `--find-limit`: the sentence that compares the arms, their limits, and every probe.

It is made from limit.json and probes.jsonl, so that `kvbm bench report DIR` makes it again.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.judge.limit import Bounds, Condition, parse_conditions, shown_limit
from kvbm_cli.bench.result.directory import LIMIT, PROBES, BenchDirectory
from kvbm_cli.bench.show import sections
from kvbm_cli.bench.show.elements import (
    ReportTable,
    at,
    count,
    day,
    decimal,
    number,
    percent,
    prose,
    sentence_case,
    string,
    strings,
)
from kvbm_cli.bench.show.figures import ARM_STYLES, Figure
from kvbm_cli.bench.show.page import FigureList, document, write_page

NO_CAVEATS = "The search found no caveat."


def build_limit_report(path: Path) -> Path:
    """Write report.html of a search, and return its path. UsageError if a file of it is missing or damaged."""
    directory = BenchDirectory(path)  # without the notes of those who have read other files
    found, probes = directory.read_json(LIMIT), list(directory.lines(PROBES))
    try:
        content = limit_page(found, probes, directory.notes)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{directory.path} has no result of `--find-limit` that can be read: {error!r}") from None
    return write_page(directory, content)


def limit_page(found: Mapping[str, Any], probes: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Return the whole document."""
    figures = FigureList()
    arms = [one["arm"] for one in found["arms"]]
    conditions = parse_conditions(",".join(found["limits"]))
    return document(
        "bench/show/limit.html.j2",
        f"{_badge(found)}: {', '.join(found['limits'])} - kvbm bench",
        arms,
        figures,
        **_header(found),
        **_results(found, notes),
        probes=figures.add(_probes(condition, arms, probes) for condition in conditions),
        machine=sections.machine(dict(found)),
        command=shlex.join(strings(found.get("command"))),
    )


def _badge(found: Mapping[str, Any]) -> str:
    return "Limit found" if all(one["is_known"] for one in found["arms"]) else "Limit not known"


def _header(found: Mapping[str, Any]) -> dict[str, Any]:
    sentences = [one["sentence"] for one in found["ratios"]] or [
        f"{one['arm']} under {', '.join(found['limits'])}: {_limit(one)} requests/s" for one in found["arms"]
    ]
    details = [
        f"profile {name}" if (name := string(at(found.get("profile"), "name"))) else None,
        f"workload {found['workload']}",
        day(number(at(found.get("machine"), "time_unix_s"))),
    ]
    return {
        "badge": _badge(found),
        "headings": [{"text": sentence_case(sentence), "is_long": False} for sentence in sentences],
        "details": " · ".join(detail for detail in details if detail),
    }


def _limit(arm: Mapping[str, Any]) -> str:
    rates = arm["requests_per_s"]
    bounds = Bounds(rates["low"], math.inf if rates["high"] is None else rates["high"])
    return shown_limit(bounds, arm["doubt"])


def _results(found: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    rows = [
        (
            one["arm"],
            _limit(one),
            count(one["probes"]),
            count(one["answers"]["compared"]),
            count(one["answers"]["different"]),
        )
        for one in found["arms"]
    ]
    header = ("Arm", "Requests/s, highest that holds to lowest that fails", "Probes", "Answers compared", "Different")
    caveats = [prose(sentence_case(note)) for note in [*strings(found.get("notes")), *notes]] or [prose(NO_CAVEATS)]
    return {"limits": ReportTable("Limits by arm", header, rows, names=2), "notes": caveats}


def _probes(condition: Condition, arms: Sequence[str], probes: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the share of every probe that exceeds one limit, over its rate."""
    points = {
        arm: [(one["rate"], one["exceeded"][str(condition)]) for one in probes if one["arm"] == arm] for arm in arms
    }
    rows = [
        (
            one["arm"],
            one["outcome"],
            decimal(one["rate"]),
            count(one["requests"]),
            percent(one["exceeded"][str(condition)]),
        )
        for one in probes
    ]
    title, allowed = f"Share over the limit {condition}, by rate", 1 - condition.percent / 100
    spans = [
        f"{arm}: " + ", ".join(f"{percent(share)} at {decimal(rate)} requests/s" for rate, share in sorted(own))
        for arm, own in points.items()
    ]
    return Figure(
        kind="limit",
        title=title,
        note=f"A mark per probe. The line is the share that the limit allows, {percent(allowed)}. A probe holds if the "
        "95% intervals of all its shares are below their lines, and fails if one is above.",
        description=f"Scatter chart. {'; '.join(spans)}.",
        legends=[[(f"mark arm-{number % ARM_STYLES}", arm) for number, arm in enumerate(arms)]],
        data={
            "allowed": round(allowed, 4),
            "lines": [{"arm": number, "points": sorted(points[arm])} for number, arm in enumerate(arms)],
        },
        table=ReportTable(title, ("Arm", "Outcome", "Requests/s", "Requests", "Over the limit"), rows, names=2),
    )
