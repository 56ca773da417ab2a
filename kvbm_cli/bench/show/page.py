"""report.html: one file whose policy allows its own scripts and style, and no network.

Scripts and the style sheet are allowed by their hashes. `style` attributes are allowed because the chart library
positions its tooltips with them; they cannot run code. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import TIERS, Results
from kvbm_cli.bench.show import sections
from kvbm_cli.bench.show.elements import (
    ReportTable,
    anchor,
    at,
    count,
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
    render,
    sentence_case,
    string,
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

    def add(self, figures: Iterable[Figure | None]) -> list[tuple[int, Figure]]:
        """Return the figures with their numbers, by which the script finds their data."""
        known = [figure for figure in figures if figure is not None]
        numbered = list(enumerate(known, start=len(self.charts)))
        self.charts += [{"kind": figure.kind, **figure.data} for figure in known]
        return numbered


def page(report: Report) -> str:
    """Return the whole document."""
    figures, overview = FigureList(), sections.overview(report)
    gains = (ladder(report), *pareto(report)) if overview else ()
    return document(
        "bench/show/report.html.j2",
        sections.title(report),
        report.arms(),
        figures,
        **sections.header(report),
        **sections.key_numbers(report),
        overview=overview,
        overview_figures=figures.add(gains),
        cells=[_cell(CellView.of(report, cell), index, figures) for index, cell in enumerate(report.cells())],
        arm_table=sections.arms(report),
        order=sections.order(report),
        machine=sections.machine(report.summary),
        **sections.reproduce(report),
    )


def document(template: str, title: str, arms: Sequence[str], figures: FigureList, **values: Any) -> str:
    """Return the page of a template. The colours of `arms` follow from their order."""
    scripts, style = page_files()
    return render(
        template,
        title=title,
        policy=policy(scripts, style),
        style=style,
        scripts=scripts,
        charts={"arms": list(arms), "charts": figures.charts},
        without_scripts=WITHOUT_SCRIPTS,
        **values,
    )


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


def _cell(view: CellView, index: int, figures: FigureList) -> dict[str, Any]:
    """Values of a cell's section. The script shows a selector for several; without scripts, all are visible."""
    cell = view.cell
    drawn = figures.add((*figures_of(view), parts_of_time(view), timeline(view)))
    return {
        "name": cell["name"],
        "anchor": anchor(index),
        "comparisons": _comparisons(cell, shown=string(view.report.summary.get("explanation"))),
        "latencies": _latencies(cell),
        "is_answered": bool(view.answered),
        "figures": drawn,
        "tables": (_prompt_sources(cell), _load(cell), time_models(cell), costs(view)),
        "plan": _plan(cell),
    }


def _comparisons(cell: dict[str, Any], *, shown: str | None) -> list[dict[str, Any]]:
    """Every comparison of a cell: its sentence unless the page has it already, evidence, and why there is no gain."""
    return [_comparison(found, shown) for found in listing(cell.get("comparisons")) if isinstance(found, dict)]


def _comparison(found: dict[str, Any], shown: str | None) -> dict[str, Any]:
    names = f"{found.get('measured')} against {found.get('reference')}"
    why = [
        item["text"]
        for item in listing(found.get("why_not"))
        if isinstance(item, dict) and isinstance(item.get("text"), str)
    ]
    rows = [
        (
            name,
            *(decimal(at(row, role, "value")) for role in ("reference", "measured", "difference")),
            interval(at(row, "difference", "interval_95"), decimal),
        )
        for name, row in mapping(found.get("ttft_percentiles")).items()
        if number(at(row, "difference", "value")) is not None
    ]
    caption = f"Time to first token, {names}, in ms"
    heads = ("Percentile", str(found.get("reference")), str(found.get("measured")), "Difference", "95% interval")
    sentence = string(found.get("explanation"))
    return {
        "title": f"{names}: {string(found.get('verdict')) or 'no verdict'}",
        "sentence": None if sentence in (None, shown) else sentence_case(str(sentence)),
        "evidence": _evidence(found),
        "why": [prose(sentence_case(cause)) for cause in why],
        "percentiles": ReportTable(caption, heads, rows) if rows else None,
    }


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


def _latencies(cell: dict[str, Any]) -> ReportTable | None:
    """Percentiles of every arm; those that the sample size does not carry are dashes."""
    arms = mapping(cell.get("arms"))
    rows = [
        (
            arm,
            with_interval(decimal(at(own, "ttft_ms", "p50")), median_interval(cell, arm)),
            *(decimal(at(own, "ttft_ms", name)) for name in ("p90", "p99")),
            *(decimal(at(own, metric, "p50")) for metric in ("itl_ms", "tpot_ms", "end_to_end_ms")),
            count(own.get("requests")),
            count(own.get("errors")),
        )
        for arm, own in arms.items()
        if isinstance(own, dict)
    ]
    header = ("Arm", "TTFT p50 (95% interval)", "TTFT p90", "TTFT p99", "ITL p50", "TPOT p50", "End to end p50")
    caption = "Latency by arm, in ms; a dash: too few samples or unknown"
    return ReportTable(caption, (*header, "Requests", "Errors"), rows) if rows else None


def _prompt_sources(cell: dict[str, Any]) -> ReportTable | None:
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
    return ReportTable(caption, ("Arm", "Share", *heads), rows, names=2) if rows else None


def _bar(amounts: dict[str, float], whole: float) -> Markup:
    piece = '<span class="tier-{}" style="width:{}%"></span>'
    pieces = Markup().join(markup(piece, tier, f"{amount / whole * 100:.1f}") for tier, amount in amounts.items())
    return markup('<span class="bar" aria-hidden="true">{}</span>', pieces)


def _part(amount: float | None, whole: float) -> str | None:
    return None if amount is None else f"{count(amount)} ({percent(amount / whole)})"


def _load(cell: dict[str, Any]) -> ReportTable | None:
    """Throughput, load and the client's health of every arm."""
    rows = [
        (
            arm,
            decimal(at(own, "throughput", "requests_per_s")),
            count(at(own, "throughput", "prompt_tokens_per_s")),
            decimal(at(own, "throughput", "output_tokens_per_s")),
            with_interval(percent(at(own, "goodput", "share")), interval(at(own, "goodput", "interval_95"), percent)),
            percent(own.get("utilisation")),
            decimal(own.get("queue_wait_ms")),
            decimal(at(own, "client", "lateness_ms", "p90")),
            percent(at(own, "client", "cpu_share")),
        )
        for arm, own in mapping(cell.get("arms")).items()
        if isinstance(own, dict)
    ]
    header = ("Arm", "Requests/s", "Prompt tokens/s", "Output tokens/s", "Goodput", "Busy", "Queue, mean ms")
    return ReportTable("Load by arm", (*header, "Client late, p90 ms", "Client CPU"), rows) if rows else None


def _plan(cell: dict[str, Any]) -> list[tuple[str, str]]:
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
    return [(name, value) for name, value in rows if value is not None]


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
