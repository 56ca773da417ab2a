"""docs/reference/statistics.md shows the numbers of bench/results/bench-statistics.json."""

import json
from pathlib import Path

from kvbm_cli.bench.judge.paired import LEAST_COUNTS, LEAST_COUNTS_FOR_INTERVAL

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/statistics.md").read_text()
RESULT = json.loads((ROOT / "bench/results/bench-statistics.json").read_text())
USUAL = {"sessions": 12, "turns": 5, "effect_deviation": 0.0, "slow_share": 0.0}


def rows_of(**wanted):
    found = [row for row in RESULT["rows"] if {**row, **wanted} == row]
    assert found, wanted
    return found


def table_rows():
    for runs in (1, 2, 3, 5):
        for deviation in (0.01, 0.02, 0.03, 0.05):
            (equal,) = rows_of(speedup=1.0, runs=runs, run_deviation=deviation, **USUAL)
            (faster,) = rows_of(speedup=1.1, runs=runs, run_deviation=deviation, **USUAL)
            yield (
                f"| {runs} | {deviation:.0%} | {equal['coverage']:.1%} | {equal['coverage_of_plain_bootstrap']:.1%} "
                f"| {equal['faster'] + equal['slower']:.1%} | {faster['faster']:.1%} |"
            )


def test_page_has_every_row_of_the_simulation():
    assert [row for row in table_rows() if row not in PAGE] == []


def test_page_has_the_numbers_of_early_stopping():
    for row in RESULT["early_stop"]:
        numbers = (row["run_deviation"], row["coverage"], row["mean_runs"], row["false_alarms"])
        assert "| {:.0%} | {:.1%} | {:.1f} | {:.1%} |".format(*numbers) in PAGE


def test_page_has_the_sample_sizes():
    for percent, least in LEAST_COUNTS.items():
        assert f"| p{percent} | {least} requests | {LEAST_COUNTS_FOR_INTERVAL[percent]} requests |" in PAGE
