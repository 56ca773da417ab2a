"""The sentences and tables of the report, from the summary. What the summary does not have is left out."""

from __future__ import annotations

import shlex
import time
from typing import Any

from kvbm_cli.bench.html.markup import Markup, bullets, element, facts, join, prose, table, text
from kvbm_cli.bench.html.numbers import (
    at,
    count,
    decimal,
    interval,
    listing,
    mapping,
    milliseconds,
    number,
    percent,
    ratio,
    string,
    strings,
    with_interval,
)
from kvbm_cli.bench.html.run_data import TIERS, RunData

VERDICTS = {
    "faster": "Faster",
    "same": "No significant difference",
    "slower": "Slower",
    "invalid": "Invalid",
    "wrong": "Wrong answers",
}
NO_CAVEATS = "The run found no caveat."


def header(run_data: RunData) -> Markup:
    """Verdict, sentence and what was compared: the first screen."""
    summary = run_data.summary
    verdict = string(summary.get("verdict")) or "unknown"
    sentence = string(summary.get("explanation")) or "The summary has no explanation."
    details = [
        f"profile {name}" if (name := string(at(summary, "profile", "name"))) else None,
        compared(summary),
        _day(number(at(summary, "machine", "time_unix_s"))),
        None if summary.get("complete") else "incomplete: the run was interrupted",
    ]
    badge = element("p", VERDICTS.get(verdict, verdict), class_=f"badge {verdict if verdict in VERDICTS else ''}")
    return element(
        "header",
        element("p", "kvbm bench", class_="kicker"),
        badge,
        element("h1", prose(sentence_case(sentence))),
        element("p", " · ".join(detail for detail in details if detail), class_="muted"),
    )


def sentence_case(sentence: str) -> str:
    """Starts with a capital letter, unless the first word is a name such as `kvbm` or `p99`, and ends with a stop."""
    first = sentence.partition(" ")[0].rstrip(",:;")
    start = sentence[:1].upper() if first.isalpha() and first != "kvbm" else sentence[:1]
    return start + sentence[1:] + ("" if sentence.endswith((".", "!", "?")) else ".")


def compared(summary: dict[str, Any]) -> str | None:
    measured, reference = (string(at(summary, "headline", "compared", name)) for name in ("measured", "reference"))
    return f"{measured} against {reference}" if measured and reference else None


def _day(unix_s: float | None) -> str | None:
    return None if unix_s is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def key_numbers(run_data: RunData) -> Markup:
    """The gains, each with its interval, then the caveats in the same size."""
    summary = run_data.summary
    found = list(_key_numbers(mapping(summary.get("headline"))))
    if len(run_data.summary["cells"]) == 1:
        found += _medians(run_data.summary["cells"][0], mapping(summary.get("headline")))
    gains = bullets(found, class_="plain") if found else element("p", "The run has no result.")
    notes = [prose(sentence_case(note)) for note in [*_caveats(run_data), *run_data.notes]] or [text(NO_CAVEATS)]
    reasons = [prose(sentence_case(reason)) for reason in strings(summary.get("reasons"))]
    hint = string(summary.get("hint"))
    return element(
        "section",
        join(element("h2", "Why the result cannot be used"), bullets(reasons, class_="plain")) if reasons else None,
        element("p", "What to do: ", prose(hint)) if hint else None,
        element("h2", "Results"),
        gains,
        element("h2", "Caveats"),
        bullets(notes, class_="plain"),
        class_="results",
    )


def _fact(value: str, what: str) -> Markup:
    return join(element("strong", value), f" {what}")


def _key_numbers(headline: dict[str, Any]) -> list[Markup]:
    paired, share = mapping(headline.get("ttft_speedup_paired")), mapping(headline.get("share_of_possible_gain"))
    found: list[Markup] = []
    if mean := ratio(paired.get("geometric_mean")):
        ends = interval(paired.get("interval_95"))
        sizes = [
            f"{count(paired.get(name))} {name}" for name in ("pairs", "sessions", "runs") if count(paired.get(name))
        ]
        counted = f"; {', '.join(sizes)}" if sizes else ""
        found.append(
            _fact(f"{mean}×", f"speed-up of the time to first token, geometric mean of pairs ({_ends(ends)}{counted})")
        )
    if quotient := ratio(headline.get("ttft_speedup")):
        found.append(_fact(f"{quotient}×", "ratio of the median times to first token"))
    if gain := percent(share.get("value")):
        ends = interval(share.get("interval_95"), percent)
        found.append(_fact(gain, f"of the possible gain ({_ends(ends)})"))
    equal = headline.get("outputs_equal")
    if isinstance(equal, bool):
        found.append(_fact("Equal" if equal else "Different", "outputs in the compared arms"))
    return found


def _ends(ends: str | None) -> str:
    return "no interval: too few samples" if ends is None else f"95% interval {ends}"


def _medians(cell: dict[str, Any], headline: dict[str, Any]) -> list[Markup]:
    """Median TTFT of the two compared arms, for a run of one cell."""
    found = []
    for role in ("measured", "reference"):
        arm = string(at(headline, "compared", role))
        times = at(cell, "arms", arm or "", "ttft_ms")
        if arm and (median := milliseconds(at(times, "p50"))):
            ends = interval(at(times, "p50_interval_95"), milliseconds)
            found.append(_fact(f"{median} ms", f"median time to first token with {arm} ({_ends(ends)})"))
    return found


def _caveats(run_data: RunData) -> list[str]:
    """Those of the run, then those of the cells, with the name of the cell if there are several."""
    cells = run_data.cells()
    own = [
        caveat if len(cells) == 1 else f"{cell['name']}: {caveat}"
        for cell in cells
        for caveat in strings(cell.get("caveats"))
    ]
    return list(dict.fromkeys([*strings(run_data.summary.get("caveats")), *own]))


def overview(run_data: RunData) -> Markup | None:
    """One row per comparison of every cell, for runs of several cells."""
    cells = run_data.cells()
    if len(cells) < 2:
        return None
    rows = []
    for index, cell in enumerate(cells):
        link = element("a", cell["name"], href=f"#{anchor(index)}")
        for found in listing(cell.get("comparisons")) or [{}]:
            rows.append(
                (
                    link,
                    " against ".join(
                        str(found[role]) for role in ("measured", "reference") if isinstance(found.get(role), str)
                    )
                    or None,
                    _verdict(found),
                    ratio(at(found, "ttft_speedup_paired", "geometric_mean")),
                    interval(at(found, "ttft_speedup_paired", "interval_95")),
                    count(cell.get("pairs_done")),
                )
            )
    header = ("Workload", "Comparison", "Verdict", "Speed-up", "95% interval", "Pairs of runs")
    return table("Results by workload", header, rows, names=3)


def _verdict(found: dict[str, Any]) -> str | None:
    return string(found.get("verdict"))


def anchor(index: int) -> str:
    return f"cell-{index + 1}"


def comparisons(cell: dict[str, Any]) -> list[Markup]:
    """Every comparison of a cell: its sentence, its evidence, and why there is no gain."""
    return [_comparison(found) for found in listing(cell.get("comparisons")) if isinstance(found, dict)]


def _comparison(found: dict[str, Any]) -> Markup:
    names = f"{found.get('measured')} against {found.get('reference')}"
    why = [
        f"{item['text']} (profile key `{item['key']}`)" if string(item.get("key")) else item["text"]
        for item in listing(found.get("why_not"))
        if isinstance(item, dict) and isinstance(item.get("text"), str)
    ]
    percentiles = mapping(found.get("ttft_percentiles"))
    rows = [
        (
            name,
            *(milliseconds(at(row, role)) for role in ("reference", "measured", "difference")),
            interval(at(row, "interval_95"), milliseconds),
        )
        for name, row in percentiles.items()
        if number(at(row, "difference")) is not None
    ]
    caption = f"Time to first token, {names}, in ms"
    heads = ("Percentile", str(found.get("reference")), str(found.get("measured")), "Difference", "95% interval")
    return join(
        element("h3", f"{names}: {_verdict(found) or 'no verdict'}"),
        element("p", prose(sentence_case(sentence))) if (sentence := string(found.get("explanation"))) else None,
        facts(_evidence(found)),
        join(
            element("p", "Causes of a small gain, most likely first:"),
            bullets(prose(sentence_case(cause)) for cause in why),
        )
        if why
        else None,
        table(caption, heads, rows) if rows else None,
    )


def _evidence(found: dict[str, Any]) -> list[tuple[str, str]]:
    paired, noise, share = (mapping(found.get(k)) for k in ("ttft_speedup_paired", "noise", "share_of_possible_gain"))
    outputs, transfers = mapping(found.get("outputs")), mapping(found.get("transfers"))
    rows = [
        ("Speed-up", with_interval(ratio(paired.get("geometric_mean")), interval(paired.get("interval_95")))),
        ("Noise", with_interval(ratio(noise.get("ratio")), interval(noise.get("interval_95")))),
        (
            "Share of the possible gain",
            with_interval(percent(share.get("value")), interval(share.get("interval_95"), percent)),
        ),
        ("Answers compared", count(outputs.get("compared"))),
        ("Different answers", count(outputs.get("different"))),
        ("Different answers without kvbm", count(outputs.get("different_without_kvbm"))),
        ("Largest difference of log-probabilities", _scientific(outputs.get("largest_logprob_difference"))),
        ("Tokens from G2", count(transfers.get("g2_tokens"))),
        ("Transfers", {True: "proven", False: "not proven"}.get(transfers.get("proven"))),  # type: ignore[arg-type]
    ]
    return [(name, value) for name, value in rows if value is not None]


def _scientific(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else f"{amount:.2g}"


def latencies(cell: dict[str, Any]) -> Markup | None:
    """Percentiles of every arm; those that the sample size does not carry are dashes."""
    arms = mapping(cell.get("arms"))
    rows = [
        (
            arm,
            with_interval(
                milliseconds(at(own, "ttft_ms", "p50")), interval(at(own, "ttft_ms", "p50_interval_95"), milliseconds)
            ),
            *(milliseconds(at(own, "ttft_ms", name)) for name in ("p90", "p99")),
            *(milliseconds(at(own, metric, "p50")) for metric in ("itl_ms", "tpot_ms", "end_to_end_ms")),
            count(own.get("requests")),
            count(own.get("errors")),
        )
        for arm, own in arms.items()
        if isinstance(own, dict)
    ]
    header = ("Arm", "TTFT p50 (95% interval)", "TTFT p90", "TTFT p99", "ITL p50", "TPOT p50", "End to end p50")
    caption = "Latency by arm, in ms; a dash: too few samples or unknown"
    return table(caption, (*header, "Requests", "Errors"), rows) if rows else None


def prompt_sources(cell: dict[str, Any]) -> Markup | None:
    """Where the prompt tokens of every arm came from, with a bar."""
    rows = []
    for arm, own in mapping(cell.get("arms")).items():
        tokens = {tier: number(at(own, "prompt_tokens", tier)) for tier in TIERS}
        known = {tier: amount for tier, amount in tokens.items() if amount}
        whole = sum(known.values())
        if whole:
            rows.append((arm, _bar(known, whole), *(_part(tokens[tier], whole) for tier in TIERS)))
    caption = "Prompt tokens by source"
    return table(caption, ("Arm", "Share", "G1", "G2", "G3", "Computed"), rows, names=2) if rows else None


def _bar(amounts: dict[str, float], whole: float) -> Markup:
    pieces = [
        element("span", class_=f"tier-{tier}", style=f"width:{amount / whole * 100:.1f}%")
        for tier, amount in amounts.items()
    ]
    return element("span", pieces, class_="bar", aria_hidden="true")


def _part(amount: float | None, whole: float) -> str | None:
    return None if amount is None else f"{count(amount)} ({percent(amount / whole)})"


def load(cell: dict[str, Any]) -> Markup | None:
    """Throughput, load and the client's health of every arm."""
    rows = [
        (
            arm,
            decimal(at(own, "throughput", "requests_per_s")),
            count(at(own, "throughput", "prompt_tokens_per_s")),
            decimal(at(own, "throughput", "output_tokens_per_s")),
            percent(at(own, "goodput", "share")),
            percent(own.get("utilisation")),
            milliseconds(own.get("queue_wait_ms")),
            milliseconds(at(own, "client", "lateness_ms", "p90")),
            percent(at(own, "client", "cpu_share")),
        )
        for arm, own in mapping(cell.get("arms")).items()
        if isinstance(own, dict)
    ]
    header = ("Arm", "Requests/s", "Prompt tokens/s", "Output tokens/s", "Goodput", "Busy", "Queue, mean ms")
    return table("Load by arm", (*header, "Client late, p90 ms", "Client CPU"), rows) if rows else None


def plan(cell: dict[str, Any]) -> Markup | None:
    """What was sent: the workload and its plan."""
    g1, working_set = number(cell.get("g1_tokens")), number(cell.get("working_set_tokens"))
    rows = [
        ("Workload", string(at(cell, "workload", "name"))),
        ("Kind", string(at(cell, "workload", "kind"))),
        ("Pressure", decimal(cell.get("pressure"))),
        ("Working set, tokens", count(working_set)),
        ("G1, tokens", count(g1)),
        ("Requests per run", count(at(cell, "plan", "requests"))),
        ("Duration of a run, s", decimal(at(cell, "plan", "duration_s"))),
        ("Schedule", string(at(cell, "plan", "schedule"))),
        ("Pairs of runs", count(cell.get("pairs_done"))),
        ("Stopped early", "yes" if cell.get("stopped_early") is True else None),
        ("Plan digest", string(at(cell, "plan", "digest"))),
    ]
    known = [(name, value) for name, value in rows if value is not None]
    return facts(known) if known else None


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
        ("measured at", _day(number(value)) or "") if name == "time_unix_s" else (name.replace("_", " "), str(value))
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
            "In the directory of the run, plan.json and cells/ have every token and launch time, and requests.jsonl has "
            "every request. Equal plans have equal digests.",
        ),
        bullets(digests) if digests else None,
    )


def title(run_data: RunData) -> Markup:
    verdict = string(run_data.summary.get("verdict")) or "unknown"
    what = compared(run_data.summary) or string(at(run_data.summary, "profile", "name"))
    return text(f"{VERDICTS.get(verdict, verdict)}: {what or 'benchmark'} - kvbm bench")
