"""Which runs of an experiment have not ended, from plan.json and runs.jsonl."""

from __future__ import annotations

from kvbm_cli.bench.experiment import SMALLEST_PAIRS
from kvbm_cli.bench.records.bench_directory import run_name
from kvbm_cli.bench.records.results import CellResult, Results
from kvbm_cli.bench.verdicts.compared import is_cell_tight


def planned_runs(results: Results) -> list[str]:
    return [run for cell in results.cells for _, run in _order(cell)]


def missing_runs(results: Results) -> list[str]:
    """Planned runs without a result, except those that a tight interval made superfluous."""
    return [run for cell in results.cells for run in _missing(results, cell)]


def _missing(results: Results, cell: CellResult) -> list[str]:
    done = {run.run for run in cell.runs}
    missing = [(pair, run) for pair, run in _order(cell) if run not in done]
    first = min((pair for pair, _ in missing), default=None)
    if first is not None and first == cell.pairs_done + 1 > SMALLEST_PAIRS and _is_tight(results, cell):
        return []
    return [run for _, run in missing]


def _order(cell: CellResult) -> list[tuple[int, str]]:
    """Return the pair and the name of every run, as `kvbm bench` makes them."""
    order = cell.definition["order"]
    return [(group["pair"], run_name(cell.name, group["pair"], arm)) for group in order for arm in group["arms"]]


def _is_tight(results: Results, cell: CellResult) -> bool:
    measured, references = results.plan["measured"], results.plan["references"]
    return is_cell_tight(cell, measured=measured, reference=references[0] if references else measured)
