"""report.html: one file whose policy allows its own scripts and style, and no network.

Scripts and the style sheet are allowed by their hashes. `style` attributes are allowed because the chart library
positions its tooltips with them; they cannot run code. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import TIERS, Results
from kvbm_cli.bench.show import sections
from kvbm_cli.bench.show.elements import (
    Markup,
    anchor,
    at,
    bullets,
    count,
    decimal,
    element,
    facts,
    interval,
    join,
    json_for_script,
    listing,
    mapping,
    median_interval,
    milliseconds,
    number,
    percent,
    prose,
    ratio,
    sentence_case,
    string,
    table,
    with_interval,
)
from kvbm_cli.bench.show.figures import CellView, Figure, Report, figures_of
from kvbm_cli.bench.show.load_figures import costs, ladder, pareto, parts_of_time, time_models, timeline
from kvbm_cli.system.filesystem import write_atomically

FOLDER = Path(__file__).resolve().parent
WITHOUT_SCRIPTS = "The charts of this report require scripts. All numbers are also in the tables below."
LIBRARY = FOLDER / "vendor" / "echarts.min.js"
FILE_NAME = "report.html"
ARMS_RUN = {True: "at the same time", False: "one after the other"}
PHASES = {"steady": "the steady phase", "fill": "the phase that fills the caches", "all": "all requests"}


class FigureList:
    """Collects the data of the charts in the order of the page."""

    def __init__(self) -> None:
        self.charts: list[dict[str, Any]] = []

    def add(self, figure: Figure | None) -> Markup | None:
        """Return the element of the figure; the script finds its data by its number."""
        if figure is None:
            return None
        self.charts.append({"kind": figure.kind, **figure.data})
        return element(
            "figure",
            element("figcaption", element("h3", figure.title), element("p", prose(figure.note), class_="muted")),
            figure.legend,
            element("div", class_="chart", role="img", aria_label=figure.description, data_chart=len(self.charts) - 1),
            element("p", figure.description, class_="description"),
            element("details", element("summary", "Data"), figure.table, open=True),
            class_=figure.kind,
        )


def page(report: Report) -> str:
    """Return the whole document."""
    figures = FigureList()
    body = join(
        sections.header(report),
        element("p", WITHOUT_SCRIPTS, class_="notice"),
        sections.key_numbers(report),
        _overview(report, figures),
        _cells(report, figures),
        _about(report),
    )
    return document(sections.title(report), body, report.arms(), figures)


def document(title: str, body: Markup, arms: Sequence[str], figures: FigureList) -> str:
    """Return the page around its body. The colours of `arms` follow from their order."""
    scripts, style = page_files()
    data = {"arms": list(arms), "charts": figures.charts}
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(scripts, style)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    last = join(
        element("script", json_for_script(data), type="application/json", id="data"),
        [element("script", Markup(script)) for script in scripts],
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', element('main', body), last), lang='en')}\n"


def page_files() -> tuple[list[str], str]:
    """Return the scripts of the page, in the order in which they run, and its style sheet."""
    files = (LIBRARY, FOLDER / "report.js", FOLDER / "report.css")
    library, script, style = (file.read_text(encoding="utf-8") for file in files)
    return [library, script], style


def policy(scripts: list[str], style: str) -> str:
    """Return the content security policy: no network, and no script but these."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src-elem {_hash(style)}",
            "style-src-attr 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _overview(report: Report, figures: FigureList) -> Markup | None:
    found = sections.overview(report)
    if found is None:
        return None
    drawn = [figures.add(figure) for figure in (ladder(report), *pareto(report))]
    return element("section", element("h2", "All workloads"), found, drawn)


def _cells(report: Report, figures: FigureList) -> Markup:
    """One section per cell. The script shows a selector if there are several; without it, all are visible."""
    cells = report.cells()
    parts = [_cell(CellView.of(report, cell), index, figures) for index, cell in enumerate(cells)]
    return element("div", parts, class_="cells")


def _cell(view: CellView, index: int, figures: FigureList) -> Markup:
    cell = view.cell
    drawn = [figures.add(figure) for figure in (*figures_of(view), parts_of_time(view), timeline(view))]
    return element(
        "section",
        element("h2", cell["name"]),
        _comparisons(cell, shown=string(view.report.summary.get("explanation"))),
        _latencies(cell),
        element("div", drawn, class_="figures") if view.answered else element("p", "No request was answered."),
        _prompt_sources(cell),
        _load(cell),
        time_models(cell),
        costs(view),
        element("h3", "Plan"),
        _plan(cell) or element("p", "The summary has no plan of this workload."),
        class_="cell",
        id=anchor(index),
        data_name=cell["name"],
    )


def _comparisons(cell: dict[str, Any], *, shown: str | None) -> list[Markup]:
    """Every comparison of a cell: its sentence unless the page has it already, evidence, and why there is no gain."""
    return [_comparison(found, shown) for found in listing(cell.get("comparisons")) if isinstance(found, dict)]


def _comparison(found: dict[str, Any], shown: str | None) -> Markup:
    names = f"{found.get('measured')} against {found.get('reference')}"
    why = [
        item["text"]
        for item in listing(found.get("why_not"))
        if isinstance(item, dict) and isinstance(item.get("text"), str)
    ]
    rows = [
        (
            name,
            *(milliseconds(at(row, role, "value")) for role in ("reference", "measured", "difference")),
            interval(at(row, "difference", "interval_95"), milliseconds),
        )
        for name, row in mapping(found.get("ttft_percentiles")).items()
        if number(at(row, "difference", "value")) is not None
    ]
    caption = f"Time to first token, {names}, in ms"
    heads = ("Percentile", str(found.get("reference")), str(found.get("measured")), "Difference", "95% interval")
    return join(
        element("h3", f"{names}: {string(found.get('verdict')) or 'no verdict'}"),
        element("p", prose(sentence_case(sentence)))
        if (sentence := string(found.get("explanation"))) not in (None, shown)
        else None,
        facts(_evidence(found)),
        join(
            element("p", "Why there is no gain, most likely first:"),
            bullets(prose(sentence_case(cause)) for cause in why),
        )
        if why
        else None,
        table(caption, heads, rows) if rows else None,
    )


def _evidence(found: dict[str, Any]) -> list[tuple[str, str]]:
    paired, noise, share = (mapping(found.get(k)) for k in ("ttft_speedup_paired", "noise", "share_of_possible_gain"))
    outputs = mapping(found.get("outputs"))
    loads = {True: "proven", False: "none found"}
    rows = [
        ("Speed-up", with_interval(ratio(paired.get("geometric_mean")), interval(paired.get("interval_95")))),
        (
            "Noise, the same arm twice",
            with_interval(ratio(noise.get("ratio")), interval([noise.get("low"), noise.get("high")])),
        ),
        ("Noise from", string(noise.get("source"))),
        (
            "Share of the possible gain",
            "all, within the noise"
            if share.get("is_noise") is True
            else with_interval(percent(share.get("value")), interval(share.get("interval_95"), percent)),
        ),
        ("Outputs", string(outputs.get("verdict"))),
        ("Outputs, reason", string(outputs.get("reason"))),
        ("Answers compared", count(outputs.get("compared"))),
        ("Different answers", count(outputs.get("different"))),
        ("Different answers without kvbm", _control(outputs)),
        ("Largest difference of log-probabilities", _scientific(outputs.get("largest_logprob_difference"))),
        ("Loads from host memory or disk", loads.get(found["has_loads"]) if "has_loads" in found else None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _control(outputs: dict[str, Any]) -> str | None:
    """How many answers differ between runs without kvbm, of how many."""
    different, compared = count(outputs.get("control_different")), number(outputs.get("control_compared"))
    return None if different is None or not compared else f"{different} of {count(compared)}"


def _scientific(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else f"{amount:.2g}"


def _latencies(cell: dict[str, Any]) -> Markup | None:
    """Percentiles of every arm; those that the sample size does not carry are dashes."""
    arms = mapping(cell.get("arms"))
    rows = [
        (
            arm,
            with_interval(milliseconds(at(own, "ttft_ms", "p50")), median_interval(cell, arm)),
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


def _prompt_sources(cell: dict[str, Any]) -> Markup | None:
    """Where the prompt tokens of every arm came from, with a bar."""
    rows = []
    arms = mapping(cell.get("arms"))
    tiers = [
        tier for tier in TIERS if tier != "g4" or any(number(at(own, "prompt_tokens", tier)) for own in arms.values())
    ]
    for arm, own in arms.items():
        tokens = {tier: number(at(own, "prompt_tokens", tier)) for tier in tiers}
        known = {tier: amount for tier, amount in tokens.items() if amount}
        whole = sum(known.values())
        if whole:
            rows.append((arm, _bar(known, whole), *(_part(tokens[tier], whole) for tier in tiers)))
    caption = "Prompt tokens by source"
    heads = [tier.capitalize() for tier in tiers]
    return table(caption, ("Arm", "Share", *heads), rows, names=2) if rows else None


def _bar(amounts: dict[str, float], whole: float) -> Markup:
    pieces = [
        element("span", class_=f"tier-{tier}", style=f"width:{amount / whole * 100:.1f}%")
        for tier, amount in amounts.items()
    ]
    return element("span", pieces, class_="bar", aria_hidden="true")


def _part(amount: float | None, whole: float) -> str | None:
    return None if amount is None else f"{count(amount)} ({percent(amount / whole)})"


def _load(cell: dict[str, Any]) -> Markup | None:
    """Throughput, load and the client's health of every arm."""
    rows = [
        (
            arm,
            decimal(at(own, "throughput", "requests_per_s")),
            count(at(own, "throughput", "prompt_tokens_per_s")),
            decimal(at(own, "throughput", "output_tokens_per_s")),
            with_interval(percent(at(own, "goodput", "share")), interval(at(own, "goodput", "interval_95"), percent)),
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


def _plan(cell: dict[str, Any]) -> Markup | None:
    """Return what was sent: the workload and its plan."""
    g1, working_set = number(cell.get("g1_tokens")), number(cell.get("working_set_tokens"))
    rows = [
        ("Workload", string(at(cell, "workload", "name"))),
        ("Kind", string(at(cell, "workload", "kind"))),
        ("Pressure", decimal(cell.get("pressure"))),
        ("Working set, tokens", count(working_set)),
        ("G1, tokens", count(g1)),
        ("Requests per run", count(at(cell, "plan", "requests"))),
        ("Sessions", count(at(cell, "plan", "sessions"))),
        ("Turns", count(at(cell, "plan", "turns"))),
        ("Seconds between launches", decimal(at(cell, "plan", "interval_s"))),
        ("Seconds between launches at the end", decimal(at(cell, "plan", "ramp_to_s"))),
        ("Burstiness of launches", decimal(at(cell, "plan", "burstiness"))),
        ("Sessions at a time", count(at(cell, "plan", "concurrency"))),
        ("Result is about", PHASES.get(str(at(cell, "plan", "primary")))),
        ("Duration of a run, s", decimal(at(cell, "plan", "duration_s"))),
        ("Arms run", ARMS_RUN[cell["interleaved"] is True] if "interleaved" in cell else None),
        ("Pairs of runs", count(cell.get("pairs_done"))),
        ("Stopped early", "yes" if cell.get("stopped_early") is True else None),
        ("Plan digest", (string(at(cell, "plan", "digest")) or "")[:12] or None),
    ]
    known = [(name, value) for name, value in rows if value is not None]
    return facts(known) if known else None


def _about(report: Report) -> Markup:
    return join(
        element("section", element("h2", "Arms and runs"), sections.arms(report), sections.order(report)),
        element("section", element("h2", "Machine and versions"), sections.machine(report.summary)),
        element("section", element("h2", "How to reproduce"), sections.reproduce(report)),
        footer(),
    )


def footer() -> Markup:
    return element(
        "footer",
        "Charts: Apache ECharts 6.1.0, The Apache Software Foundation, Apache License 2.0. "
        "This file requires no network.",
    )


def build_report(directory: BenchDirectory, results: Results, summary: dict[str, Any]) -> Path:
    """Write report.html atomically and return its path. EnvironmentProblem if it cannot be written."""
    return write_page(directory, page(Report.of(directory, results, summary)))


def write_page(directory: BenchDirectory, content: str) -> Path:
    path = directory.path / FILE_NAME
    try:
        write_atomically(path, content)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None
    return path
