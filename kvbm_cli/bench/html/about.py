"""How the numbers were made: arms, runs, machine, versions, and the command that repeats the run."""

from __future__ import annotations

import shlex
from typing import Any

from kvbm_cli.bench.html.markup import Markup, bullets, element, facts, join, table
from kvbm_cli.bench.html.numbers import at, count, decimal, mapping, number, percent, string
from kvbm_cli.bench.html.run_data import RunData
from kvbm_cli.bench.html.wording import day


def arms(run_data: RunData) -> Markup | None:
    rows = [
        (name, string(at(arm, "kind")), string(at(arm, "profile")) or string(at(arm, "url")))
        for name, arm in run_data.summary["arms"].items()
    ]
    return table("Arms", ("Arm", "Kind", "Profile or address"), rows, names=3) if rows else None


def order(run_data: RunData) -> Markup | None:
    """The runs in the order in which they were completed."""
    rows = [
        (
            str(run["run"]),
            count(run.get("position")),
            decimal(run.get("startup_s")),
            decimal(run.get("duration_s")),
            percent(at(run, "client", "cpu_share")),
            "yes" if run.get("engine_ended") else "no",
        )
        for run in run_data.runs
    ]
    header = (
        "Run",
        "Position in its pair",
        "Start of the engine, s",
        "Duration, s",
        "Client CPU",
        "Engine ended early",
    )
    return table("Runs, in order of completion", header, rows) if rows else None


def machine(summary: dict[str, Any]) -> Markup:
    """The machine and the versions, every value as the summary has it."""
    rows = [*_values(summary.get("machine")), *_values(summary.get("versions"))]
    return facts(rows) if rows else element("p", "The summary does not name the machine.")


def _values(data: Any) -> list[tuple[str, str]]:
    return [
        ("measured at", day(number(value)) or "") if name == "time_unix_s" else (name.replace("_", " "), str(value))
        for name, value in mapping(data).items()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool)
    ]


def reproduce(run_data: RunData) -> Markup:
    """The command of an equal run, from the names in the summary."""
    summary = run_data.summary
    command = ["kvbm", "bench"]
    if name := string(at(summary, "profile", "name")):
        command += ["--profile", name]
    for arm, what in summary["arms"].items():
        kind = at(what, "kind")
        if kind in ("baseline", "profile", "url"):
            command += [
                "--compare",
                string(at(what, "url")) or string(at(what, "profile") if kind == "profile" else arm) or arm,
            ]
    cells = summary["cells"]
    for flag, values in (
        ("--workload", [string(at(cell, "workload", "name")) for cell in cells]),
        ("--pressure", [None if (p := number(cell.get("pressure"))) is None else f"{p:g}" for cell in cells]),
        ("--pairs", [count(max((number(cell.get("pairs_done")) or 0 for cell in cells), default=0) or None)]),
    ):
        for value in dict.fromkeys(value for value in values if value):
            command += [flag, value]
    digests = [f"{cell['name']}: {d}" for cell in cells if (d := string(at(cell, "plan", "digest")))]
    return join(
        element("pre", element("code", " ".join(map(shlex.quote, command)))),
        element(
            "p",
            "In the directory of the run, plan.json and cells/ have every token and launch time. requests.jsonl has "
            "every request. Equal plans have equal digests.",
        ),
        bullets(digests) if digests else None,
    )
