"""report.html: one file whose policy allows its own scripts and style, and no network.

Scripts and the style sheet are allowed by their hashes. `style` attributes are allowed because the chart library
positions its tooltips with them; they cannot run code. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.show import cell_tables
from kvbm_cli.bench.show import sections as sections
from kvbm_cli.bench.show.elements import Markup, anchor, element, join, json_for_script, prose, string
from kvbm_cli.bench.show.figures import CellView, Figure, Report, figures_of
from kvbm_cli.bench.show.load_figures import costs, ladder, pareto, parts_of_time, time_models, timeline
from kvbm_cli.system.filesystem import write_atomically

FOLDER = Path(__file__).resolve().parent
WITHOUT_SCRIPTS = "The charts of this report require scripts. All numbers are also in the tables below."
LIBRARY = FOLDER / "vendor" / "echarts.min.js"
FILE_NAME = "report.html"


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
    body = element(
        "main",
        sections.header(report),
        element("p", WITHOUT_SCRIPTS, class_="notice"),
        sections.key_numbers(report),
        _overview(report, figures),
        _cells(report, figures),
        _about(report),
    )
    scripts, style = page_files()
    data = {"arms": report.arms(), "charts": figures.charts}
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(scripts, style)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", sections.title(report)),
        element("style", Markup(style)),
    )
    last = join(
        element("script", json_for_script(data), type="application/json", id="data"),
        [element("script", Markup(script)) for script in scripts],
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body, last), lang='en')}\n"


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
    drawn = [figures.add(figure) for figure in (ladder(report), pareto(report))]
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
        cell_tables.comparisons(cell, shown=string(view.report.summary.get("explanation"))),
        cell_tables.latencies(cell),
        element("div", drawn, class_="figures") if view.answered else element("p", "No request was answered."),
        cell_tables.prompt_sources(cell),
        cell_tables.load(cell),
        time_models(cell),
        costs(view),
        element("h3", "Plan"),
        cell_tables.plan(cell) or element("p", "The summary has no plan of this workload."),
        class_="cell",
        id=anchor(index),
        data_name=cell["name"],
    )


def _about(report: Report) -> Markup:
    return join(
        element("section", element("h2", "Arms and runs"), sections.arms(report), sections.order(report)),
        element("section", element("h2", "Machine and versions"), sections.machine(report.summary)),
        element("section", element("h2", "How to reproduce"), sections.reproduce(report)),
        element(
            "footer",
            "Charts: Apache ECharts 6.1.0, The Apache Software Foundation, Apache License 2.0. "
            "This file requires no network.",
        ),
    )


def build_report(directory: BenchDirectory, results: Results, summary: dict[str, Any]) -> Path:
    """Write report.html atomically and return its path. EnvironmentProblem if it cannot be written."""
    path = directory.path / FILE_NAME
    content = page(Report.of(directory, results, summary))
    try:
        write_atomically(path, content)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None
    return path
