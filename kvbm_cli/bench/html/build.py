"""Writes report.html into the directory of a run, for `kvbm bench` and `kvbm bench report DIR`."""

from __future__ import annotations

from pathlib import Path

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.html.page import page
from kvbm_cli.bench.html.run_data import read_run
from kvbm_cli.system.filesystem import write_atomically

FILE_NAME = "report.html"


def build_report(directory: Path) -> Path:
    """Write the report atomically and return its path. UsageError for a directory that is not a readable run."""
    path = directory / FILE_NAME
    content = page(read_run(directory))
    try:
        write_atomically(path, content)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None
    return path
