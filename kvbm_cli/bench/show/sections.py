"""Sections of the report around its cells: first the verdict, the key numbers and the caveats, last how it was made."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from kvbm_cli.bench.show.elements import (
    ReportTable,
    anchor,
    at,
    count,
    day,
    decimal,
    interval,
    listing,
    mapping,
    markup,
    median_interval,
    number,
    percent,
    prose,
    ratio,
    sentence_case,
    string,
    strings,
)
from kvbm_cli.bench.show.figures import Report

VERDICTS = {
    "faster": "Faster",
    "same": "No difference beyond 5%",
    "inconclusive": "Inconclusive",
    "slower": "Slower",
    "invalid": "Invalid",
    "wrong": "Wrong answers",
    "measured": "Measured, nothing to compare with",
}
UNUSABLE = ("invalid", "wrong")
LONG_SENTENCE = 110
NO_CAVEATS = "The run found no caveat."


def title(report: Report) -> str:
    verdict = string(report.summary.get("verdict")) or "unknown"
    what = compared(report.summary) or string(at(report.summary, "profile", "name"))
    return f"{VERDICTS.get(verdict, verdict)}: {what or 'benchmark'} - kvbm bench"


def header(report: Report) -> dict[str, Any]:
    """Verdict, sentence and what was compared: the first screen."""
    summary = report.summary
    verdict = string(summary.get("verdict")) or "unknown"
    sentence = string(summary.get("explanation")) or "The summary has no explanation."
    details = [
        f"profile {name}" if (name := string(at(summary, "profile", "name"))) else None,
        compared(summary),
        day(number(at(summary, "machine", "time_unix_s"))),
        None if summary.get("complete") else "incomplete: the run was interrupted",
    ]
    return {
        "badge": VERDICTS.get(verdict, verdict),
        "style_of_badge": f" {verdict}" if verdict in VERDICTS else "",
        "headings": [{"text": prose(sentence_case(sentence)), "is_long": len(sentence) > LONG_SENTENCE}],
        "details": " · ".join(detail for detail in details if detail),
    }


def compared(summary: dict[str, Any]) -> str | None:
    measured, reference = (string(at(summary, "compared", name)) for name in ("measured", "reference"))
    return f"{measured} against {reference}" if measured and reference else None


def key_numbers(report: Report) -> dict[str, Any]:
    """Return the gains, each with its interval, then the caveats in the same size."""
    summary = report.summary
    every = [(cell, one) for cell in summary["cells"] for one in listing(cell.get("comparisons"))]
    if len(every) > 1:
        found = [fact for cell, one in every if (fact := _speedup(one, f"{cell['name']}, {_names(one)}: "))]
    else:
        found = _key_numbers(summary) + [fact for cell, _ in every for fact in _medians(cell, summary)]
    verdicts = [one.get("verdict") for _, one in every] if len(every) > 1 else [summary.get("verdict")]
    is_unusable = all(verdict in UNUSABLE for verdict in verdicts)
    notes = [prose(sentence_case(note)) for note in [*caveats_in(summary), *report.notes]] or [prose(NO_CAVEATS)]
    given = [reason for reason in strings(summary.get("reasons")) if reason != summary.get("explanation")]
    return {
        "reasons": [prose(sentence_case(reason)) for reason in given],
        "hint": string(summary.get("hint")),
        "is_unusable": is_unusable,
        "gains": found,
        "notes": notes,
    }


def _fact(value: str, what: str) -> Markup:
    return markup("<strong>{}</strong> {}", value, what)


def _key_numbers(headline: dict[str, Any]) -> list[Markup]:
    share = mapping(headline.get("share_of_possible_gain"))
    found = [fact] if (fact := _speedup(headline, "")) else []
    if quotient := ratio(headline.get("ttft_speedup")):
        found.append(_fact(f"{quotient}×", "ratio of the median times to first token"))
    if share.get("is_noise") is True:
        found.append(_fact("All", "of the possible gain, within the noise of this run"))
    elif gain := percent(share.get("value")):
        ends = interval(share.get("interval_95"), percent)
        found.append(_fact(gain, f"of the possible gain ({_ends(ends)})"))
    equal = headline.get("outputs_equal")
    if isinstance(equal, bool):
        found.append(_fact("Equal" if equal else "Different", "outputs in the compared arms"))
    return found


def _names(comparison: dict[str, Any]) -> str:
    usable = "" if comparison.get("verdict") not in UNUSABLE else f" ({comparison['verdict']})"
    return f"{comparison.get('measured')} against {comparison.get('reference')}{usable}"


def _speedup(comparison: dict[str, Any], place: str) -> Markup | None:
    """Return the paired ratio with its interval, and of how many samples."""
    paired = mapping(comparison.get("ttft_speedup_paired"))
    mean, ends = ratio(paired.get("geometric_mean")), interval(paired.get("interval_95"))
    if mean is None:
        return None
    sizes = [_counted(paired[name], name) for name in ("pairs", "sessions", "runs") if count(paired.get(name))]
    counted = f"; {', '.join(sizes)}" if sizes else ""
    counted += "; it does not cover differences between runs" if paired.get("covers_runs") is False else ""
    what = "speed-up of the time to first token, geometric mean of pairs"
    return _fact(f"{mean}×", f"{place}{what} ({_ends(ends)}{counted})")


def _counted(amount: Any, names: str) -> str:
    return f"{count(amount)} {names.removesuffix('s') if amount == 1 else names}"


def _ends(ends: str | None) -> str:
    return "no interval: too few samples" if ends is None else f"95% interval {ends}"


def _medians(cell: dict[str, Any], headline: dict[str, Any]) -> list[Markup]:
    """Median TTFT of the two compared arms, for a run of one cell."""
    found = []
    for role in ("measured", "reference"):
        arm = string(at(headline, "compared", role))
        times = at(cell, "arms", arm or "", "ttft_ms")
        if arm and (median := decimal(at(times, "p50"))):
            ends = median_interval(cell, arm)
            found.append(_fact(f"{median} ms", f"median time to first token with {arm} ({_ends(ends)})"))
    return found


def caveats_in(summary: Mapping[str, Any]) -> list[str]:
    """Those of the run, then those of the cells, with the name of the cell if there are several."""
    cells = summary["cells"]
    own = [
        caveat if len(cells) == 1 else f"{cell['name']}: {caveat}"
        for cell in cells
        for caveat in strings(cell.get("caveats"))
    ]
    return list(dict.fromkeys([*strings(summary.get("caveats")), *own]))


def overview(report: Report) -> ReportTable | None:
    """One row per comparison of every cell, for runs of several cells."""
    cells = report.cells()
    if len(cells) < 2:
        return None
    rows = []
    for index, cell in enumerate(cells):
        link = markup('<a href="#{}">{}</a>', anchor(index), cell["name"])
        for found in listing(cell.get("comparisons")) or [{}]:
            rows.append(
                (
                    link,
                    " against ".join(
                        str(found[role]) for role in ("measured", "reference") if isinstance(found.get(role), str)
                    )
                    or None,
                    string(found.get("verdict")),
                    ratio(at(found, "ttft_speedup_paired", "geometric_mean")),
                    interval(at(found, "ttft_speedup_paired", "interval_95")),
                    count(cell.get("pairs_done")),
                )
            )
    header = ("Workload", "Comparison", "Verdict", "Speed-up", "95% interval", "Pairs of runs")
    return ReportTable("Results by workload", header, rows, names=3)


def arms(report: Report) -> ReportTable | None:
    rows = [
        (name, string(at(arm, "kind")), string(at(arm, "profile")) or _address(arm), _differences(arm))
        for name, arm in report.summary["arms"].items()
    ]
    header = ("Arm", "Kind", "Profile or address", "Keys that differ from the measured profile")
    return ReportTable("Arms", header, rows, names=4) if rows else None


def _address(arm: Any) -> str | None:
    """Return the URL without user and password."""
    url = string(at(arm, "url"))
    return None if url is None else re.sub(r"//[^/@]*@", "//", url)


def _differences(arm: Any) -> str | None:
    return ", ".join(mapping(at(arm, "differences"))) or None


def order(report: Report) -> ReportTable | None:
    """Return the runs in the order in which they were completed."""
    rows = [
        (
            run.run,
            count(run.facts.get("position")),
            decimal(run.facts.get("startup_s")),
            decimal(run.facts.get("duration_s")),
            percent(run.client.get("cpu_share")),
            "yes" if run.facts.get("engine_ended") else "no",
        )
        for run in report.results.runs
    ]
    header = (
        "Run",
        "Position in its pair",
        "Start of the engine, s",
        "Duration, s",
        "Client CPU",
        "Engine ended early",
    )
    return ReportTable("Runs, in order of completion", header, rows) if rows else None


def machine(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the machine and the versions, every value as the summary has it."""
    return [*_values(summary.get("machine")), *_values(summary.get("versions"))]


def _values(data: Any) -> list[tuple[str, str]]:
    return [
        ("measured at", day(number(value)) or "") if name == "time_unix_s" else (name.replace("_", " "), str(value))
        for name, value in mapping(data).items()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool)
    ]


def reproduce(report: Report) -> dict[str, Any]:
    """Return the command of an equal run."""
    command = strings(report.summary.get("command"))
    digests = [f"{cell['name']}: {found}" for cell in report.cells() if (found := string(at(cell, "plan", "digest")))]
    return {"command": shlex.join(command), "digests": digests}
