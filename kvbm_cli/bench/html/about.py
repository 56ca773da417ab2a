"""How the numbers were made: arms, runs, machine, versions, and the command that repeats the run."""

from __future__ import annotations

import re
import shlex
from typing import Any

from kvbm_cli.bench.html.markup import Markup, bullets, element, facts, join, table
from kvbm_cli.bench.html.numbers import at, count, decimal, mapping, number, percent, string, strings
from kvbm_cli.bench.html.run_data import RunData
from kvbm_cli.bench.html.wording import day


def arms(run_data: RunData) -> Markup | None:
    rows = [
        (name, string(at(arm, "kind")), string(at(arm, "profile")) or _address(arm), _differences(arm))
        for name, arm in run_data.summary["arms"].items()
    ]
    header = ("Arm", "Kind", "Profile or address", "Keys that differ from the measured profile")
    return table("Arms", header, rows, names=4) if rows else None


def _address(arm: Any) -> str | None:
    """Return the URL without user and password."""
    url = string(at(arm, "url"))
    return None if url is None else re.sub(r"//[^/@]*@", "//", url)


def _differences(arm: Any) -> str | None:
    return ", ".join(mapping(at(arm, "differences"))) or None


def order(run_data: RunData) -> Markup | None:
    """Return the runs in the order in which they were completed."""
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
    """Return the machine and the versions, every value as the summary has it."""
    rows = [*_values(summary.get("machine")), *_values(summary.get("versions"))]
    return facts(rows) if rows else element("p", "The summary does not name the machine.")


def _values(data: Any) -> list[tuple[str, str]]:
    return [
        ("measured at", day(number(value)) or "") if name == "time_unix_s" else (name.replace("_", " "), str(value))
        for name, value in mapping(data).items()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool)
    ]


def reproduce(run_data: RunData) -> Markup:
    """Return the command of an equal run, or if the summary lacks it, one from the names in the summary."""
    command = strings(run_data.summary.get("command")) or _command(run_data)
    digests = [f"{cell['name']}: {found}" for cell in run_data.cells() if (found := string(at(cell, "plan", "digest")))]
    return join(
        element("pre", element("code", " ".join(map(shlex.quote, command)))),
        element(
            "p",
            "The command repeats the run if the profile and the workloads are unchanged. In the directory of the run, "
            "plan.json and cells/ have every token and launch time. requests.jsonl has every request. Equal plans have "
            "equal digests.",
        ),
        join(element("p", "Digests of the plans:"), bullets(digests)) if digests else None,
    )


def _command(run_data: RunData) -> list[str]:
    summary = run_data.summary
    profile, cells = string(at(summary, "profile", "name")), run_data.cells()
    compared = [_compared(name, arm, profile) for name, arm in summary["arms"].items()]
    pressures = [f"{amount:g}" for cell in cells if (amount := number(cell.get("pressure"))) is not None]
    pairs = [f"{amount:.0f}" for cell in cells if (amount := number(cell.get("pairs"))) is not None]
    options: list[tuple[str, list[str | None]]] = [
        ("--profile", [profile]),
        ("--compare", compared),
        ("--workload", [string(at(cell, "workload", "name")) for cell in cells]),
        ("--pressure", [",".join(dict.fromkeys(pressures)) or None]),
        ("--pairs", [*pairs] if len(set(pairs)) == 1 else []),
    ]
    words = [[flag, value] for flag, values in options for value in dict.fromkeys(values) if value]
    return ["kvbm", "bench", *(word for pair in words for word in pair)]


def _compared(name: str, arm: Any, profile: str | None) -> str | None:
    """Return what `--compare` takes for the arm; `None` for arms that need no option."""
    kind, own = at(arm, "kind"), string(at(arm, "profile"))
    if kind == "url":
        return f"{name}={_address(arm)}"
    if kind == "baseline":
        return "baseline" if own in (None, profile) else f"baseline:{own}"
    return own if kind == "profile" else None
