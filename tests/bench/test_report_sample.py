"""The sample that the tests of report.html use has the fields of a real experiment."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench_rig import in_turn
from made_experiments import SIX, made
from report_sample import write_sample

from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results

WHOLE = {  # file -> places that both have, with the same keys
    "plan.json": ((), ("cells", 0), ("arms", "kvbm")),
    "runs.jsonl": ((),),
    "requests.jsonl": ((),),
    "summary.json": (
        (),
        ("arms", "kvbm"),
        ("cells", 0),
        ("cells", 0, "plan"),
        ("cells", 0, "arms", "kvbm"),
        ("cells", 0, "arms", "kvbm", "client"),
        ("cells", 0, "arms", "kvbm", "ttft_ms"),
        ("cells", 0, "arms", "kvbm", "turns", 0),
        ("cells", 0, "comparisons", 0),
        ("cells", 0, "comparisons", 0, "outputs"),
        ("cells", 0, "comparisons", 0, "ttft_speedup_paired"),
        ("cells", 0, "comparisons", 0, "share_of_possible_gain"),
    ),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    real = made(tmp_path_factory.mktemp("real") / "run", workloads=[in_turn(SIX, pairs=2)])
    sample = tmp_path_factory.mktemp("sample")
    write_sample(sample, pressures=(None,), sessions=6, turns=3, pairs=2)
    return real, sample


@pytest.mark.parametrize(("file", "place"), [(file, place) for file, places in WHOLE.items() for place in places])
def test_the_sample_has_the_keys_of_a_real_experiment(both, file, place):
    real, sample = (
        _at(
            json.loads((path / file).read_text().splitlines()[0])
            if file.endswith("l")
            else json.loads((path / file).read_text()),
            place,
        )
        for path in both
    )
    assert sorted(sample) == sorted(real)


def test_the_sample_can_be_read_as_results(both):
    (cell,) = Results.read(BenchDirectory.open(both[1])).cells
    assert (cell.pairs_done, cell.arms, len(cell.runs[0].records)) == (2, ["baseline", "kvbm", "floor"], 18)


def _at(content: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        content = content[step]
    return content
