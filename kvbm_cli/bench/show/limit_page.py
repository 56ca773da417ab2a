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
from kvbm_cli.bench.show.elements import ReportTable, at, count, day, decimal, percent, string, strings
from kvbm_cli.bench.show.figures import ARM_STYLES, Figure
from kvbm_cli.bench.show.page import FILE_NAME, document, write_page


def build_limit_report(path: Path) -> Path:
    """Write report.html of a search, and return its path. UsageError if a file of it is missing or damaged."""
    from jinja2 import UndefinedError

    directory = BenchDirectory(path)  # without the notes of those who have read other files
    found, probes = directory.read_json(LIMIT), list(directory.lines(PROBES))
    try:
        content = limit_page(found, probes, directory.notes)
    except (KeyError, TypeError, ValueError, UndefinedError) as error:
        raise UsageError(f"{directory.path} has no result of `--find-limit` that can be read: {error!r}") from None
    return write_page(path / FILE_NAME, content)


def limit_page(found: Mapping[str, Any], probes: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Return the whole document."""
    arms = [one["arm"] for one in found["arms"]]
    limits = ", ".join(found["limits"])
    badge = "Limit found" if all(one["is_known"] for one in found["arms"]) else "Limit not known"
    profile = string(at(found.get("profile"), "name"))
    return document(
        "bench/show/limit.html.j2",
        f"{badge}: {limits} - kvbm bench",
        arms,
        found=found,
        badge=badge,
        headings=[one["sentence"] for one in found["ratios"]]
        or [f"{one['arm']} under {limits}: {_limit(one)} requests/s" for one in found["arms"]],
        details=[
            profile and f"profile {profile}",
            f"workload {found['workload']}",
            day(at(found.get("machine"), "time_unix_s")),
        ],
        limit_of=_limit,
        notes=[*strings(found.get("notes")), *notes],
        figures=[_probes(condition, arms, probes) for condition in parse_conditions(limits)],
        command=shlex.join(strings(found.get("command"))),
    )


def _limit(arm: Mapping[str, Any]) -> str:
    rates = arm["requests_per_s"]
    bounds = Bounds(rates["low"], math.inf if rates["high"] is None else rates["high"])
    return shown_limit(bounds, arm["doubt"])


def _probes(condition: Condition, arms: Sequence[str], probes: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the share of every probe that exceeds one limit, over its rate."""
    found = [(one, one["exceeded"][str(condition)]) for one in probes]
    points = {arm: sorted((one["rate"], share) for one, share in found if one["arm"] == arm) for arm in arms}
    rows = [
        (one["arm"], one["outcome"], decimal(one["rate"]), count(one["requests"]), percent(share))
        for one, share in found
    ]
    allowed = 1 - condition.percent / 100
    return Figure(
        kind="limit",
        note=f"A mark per probe. The line is the share that the limit allows, {percent(allowed)}. A probe holds if the "
        "95% intervals of all its shares are below their lines, and fails if one is above.",
        legends=[[(f"mark arm-{number % ARM_STYLES}", arm) for number, arm in enumerate(arms)]],
        data={
            "allowed": round(allowed, 4),
            "lines": [{"arm": number, "points": points[arm]} for number, arm in enumerate(arms)],
        },
        table=ReportTable(
            f"Share over the limit {condition}, by rate",
            ("Arm", "Outcome", "Requests/s", "Requests", "Over the limit"),
            rows,
            names=2,
        ),
    )
