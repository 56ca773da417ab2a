"""report.html: one file whose policy allows its own scripts and style, and no network.

Scripts and the style sheet are allowed by their hashes. `style` attributes are allowed because the chart library
positions its tooltips with them; they cannot run code. Equal input gives equal bytes. report.html.j2 has the sentences
and tables of the page, from the names in summary.json.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.show.elements import at, caveats_in, day, render, string, strings, versus
from kvbm_cli.bench.show.figures import UNUSABLE, CellView, Figure, Report, by_source, by_turn, ecdf
from kvbm_cli.bench.show.load_figures import ladder, pareto, parts_of_time, timeline
from kvbm_cli.system.filesystem import write_atomically

FOLDER = Path(__file__).resolve().parent
WITHOUT_SCRIPTS = "The charts of this report require scripts. All numbers are also in the tables below."
LIBRARY = FOLDER / "vendor" / "echarts.min.js"
FILE_NAME = "report.html"
VERDICTS = {
    "faster": "Faster",
    "same": "No difference beyond 5%",
    "inconclusive": "Inconclusive",
    "slower": "Slower",
    "invalid": "Invalid",
    "wrong": "Wrong answers",
    "measured": "Measured, nothing to compare with",
}


def page(report: Report) -> str:
    """Return the whole document."""
    summary, cells = report.summary, report.cells()
    comparisons = [one for cell in cells for one in cell["comparisons"]]
    compared = versus(summary["compared"]) if summary.get("compared") else None
    profile = string(at(summary, "profile", "name"))
    badge = VERDICTS[summary["verdict"]]
    scripts, style = page_files()
    return render(
        "bench/show/report.html.j2",
        title=f"{badge}: {compared or profile or 'benchmark'} - kvbm bench",
        policy=policy(scripts, style),
        style=style,
        scripts=scripts,
        arms=report.arms(),
        without_scripts=WITHOUT_SCRIPTS,
        summary=summary,
        badge=badge,
        details=[
            profile and f"profile {profile}",
            compared,
            day(at(summary, "machine", "time_unix_s")),
            None if summary.get("complete") else "incomplete: the run was interrupted",
        ],
        several=len(comparisons) > 1,
        unusable=UNUSABLE,
        is_unusable=all(one["verdict"] in UNUSABLE for one in (comparisons if comparisons[1:] else [summary])),
        notes=[*caveats_in(summary), *report.notes],
        gain_figures=[one for one in (ladder(report), *pareto(report)) if one is not None],
        cells=cells,
        figures={cell["name"]: _figures(CellView.of(report, cell)) for cell in cells},
        runs=report.results.runs,
        command=shlex.join(strings(summary.get("command"))),
    )


def _figures(view: CellView) -> list[Figure]:
    makers = (by_turn, by_source, ecdf, parts_of_time, timeline) if view.answered else ()
    return [figure for make in makers if (figure := make(view)) is not None]


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


def build_report(directory: BenchDirectory, results: Results, summary: dict[str, Any]) -> Path:
    """Write report.html atomically and return its path. EnvironmentProblem if it cannot be written."""
    return write_page(directory.path / FILE_NAME, page(Report(summary, results, directory.notes)))


def write_page(path: Path, content: str) -> Path:
    """Write a page atomically and return its path. EnvironmentProblem if it cannot be written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None
    return path
