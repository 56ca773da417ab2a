"""`kvbm bench report DIR`: computes the result again from the records, also of an interrupted experiment."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_rig import MockEngines, in_turn, measure
from experiments import SIX, SURROUNDINGS, made, rewrite_lines, summary_in
from terminal import assert_entry, filtered

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.result.directory import REQUESTS, RUNS, SUMMARY, BenchDirectory
from kvbm_cli.bench.result.results import RequestRecord, Results
from kvbm_cli.bench.setup import missing_runs, planned_runs
from kvbm_cli.bench.summary import interrupted_summary
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan
from kvbm_cli.bench.workload.script import TokenWriter

FILES = ("report.html", "exports/kvbm/small/vllm-bench.json", "exports/baseline/small/vllm-bench.json")


def missing_in(path):
    return missing_runs(Results.read(BenchDirectory.open(path)))


def test_a_repeated_report_writes_the_same_files(tmp_path, capsys):
    path = made(tmp_path / "a")
    contents = []
    for as_json in (True, False):
        command.report(path, as_json=as_json)
        contents.append({name: (path / name).read_bytes() for name in FILES})
    assert contents[0] == contents[1]


def other_token(record: RequestRecord) -> None:
    if record.arm == "kvbm" and record.index == 7:
        record.token_ids[5] = 99


def with_another_token(path: Path) -> None:
    lines = [json.loads(line) for line in (path / REQUESTS).read_text().splitlines()]
    number = next(row for row, line in enumerate(lines, 1) if line["arm"] == "kvbm" and line["turn"] == 2)
    rewrite_lines(path / REQUESTS, number, token_ids=[9] * 6)


def without(*names: str) -> Callable[[Path], None]:
    def removed(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return removed


def with_half_a_last_run(path: Path) -> None:
    lines = (path / RUNS).read_text().splitlines()
    (path / RUNS).write_text("\n".join(lines[:-1]) + '\n{"run": "small.1.')


def as_interrupted(path: Path) -> None:
    (path / SUMMARY).write_text(json.dumps(interrupted_summary("interrupted", SURROUNDINGS)))


ONCE = {"workloads": [in_turn(SIX)]}
TWO = [in_turn(SIX, pairs=pairs).model_copy(update={"name": name}) for pairs, name in ((1, "one"), (2, "two"))]
# How an experiment is made, and what then happens to its directory.
CASES: dict[str, tuple[dict[str, Any], Callable[[Path], None]]] = {
    "a whole experiment": ({}, without()),
    "a slower one": ({"times": {"kvbm": 900.0}}, without()),
    "arms at the same time": ({"workloads": [SIX]}, without()),
    "the records decide and not the old summary": ({}, with_another_token),
    "without a summary the surroundings are unknown": ({}, without(SUMMARY)),
    "an interruption after the first of two cells": ({"workloads": TWO, "last_run": "one.1.floor"}, as_interrupted),
    "wrong outputs are a result of an incomplete experiment": (
        *({"change": other_token, "last_run": "small.1.floor"}, without()),
    ),
    "the baseline alone has no result yet": ({"times": {"kvbm": None, "floor": None}, **ONCE}, without()),
    "the measured arm alone has no result yet": ({"times": {"baseline": None, "floor": None}, **ONCE}, without()),
    "no run has ended": (ONCE, without(REQUESTS, RUNS)),
    "records of a run that has not ended do not count": (ONCE, with_half_a_last_run),
    "brackets in names are text": ({"workloads": [in_turn(SIX.model_copy(update={"name": "[x]"}))]}, without()),
}
SHOWN = ("complete", "verdict", "explanation", "reasons", "hint", "ttft_speedup", "outputs_equal", "caveats")


@pytest.mark.parametrize("name", CASES)
def test_report(tmp_path, capsys, monkeypatch, name):
    """The exit code, the page on a narrow terminal, and what the summary says of the whole and knows of the machine."""
    monkeypatch.setenv("COLUMNS", "60")
    changes, damage = CASES[name]
    damage(path := made(tmp_path / "a", **changes))
    exit_code = command.report(path, as_json=False)
    page, summary = capsys.readouterr().out, summary_in(path)
    assert "…" not in page
    assert summary["complete"] or "incomplete" in (path / "report.html").read_text()
    assert summary["machine"] == (None if name.startswith("without a summary") else SURROUNDINGS["machine"])
    lines = [f"{key}: {json.dumps(summary[key], ensure_ascii=False)}\n" for key in SHOWN]
    assert_entry("bench/reports", name, filtered(f"exit code: {exit_code}\n{page}{''.join(lines)}"), names=CASES)
    before = (path / SUMMARY).read_bytes()
    assert command.report(path, as_json=True) == exit_code
    assert ((path / SUMMARY).read_bytes(), json.loads(capsys.readouterr().out)) == (before, summary)


@pytest.mark.parametrize("launches", [Launches(interval_s=0.5, burstiness=1), Launches(concurrency=2, think_s=1.5)])
def test_a_trace_of_the_requests_replays_the_same_bodies_at_the_same_times(tmp_path, capsys, launches):
    path, file = made(tmp_path / "a", launches=launches), tmp_path / "t.jsonl"
    command.report(path, replay=file, as_json=True)
    plan = Results.read(BenchDirectory.open(path)).cells[0].plan
    script = trace_script(file, TraceFormat(), TokenWriter(lambda text: list(text.encode()), seed=0), seed=0)
    again = Plan.make(script, Launches(concurrency=launches.concurrency), Dialect("m"), request_timeout_s=1.0)
    for one, other in zip(again.requests, plan.requests, strict=True):
        assert json.loads(one.encode()) == {**json.loads(other.encode()), "model": "m"}
        assert (one.intended_s, one.after, one.delay_s) == (other.intended_s, other.after, other.delay_s)
    with pytest.raises(UsageError, match="already exists"):
        command.report(path, replay=file, as_json=True)


@pytest.mark.parametrize(
    ("last_pair", "noise", "missing"),
    [
        (6, 3.0, 0),
        (5, 1.0, 0),  # the interval is tight: pair 6 was not necessary
        (5, 3.0, 2),
        (4, 1.0, 4),
        (1, 1.0, 10),
    ],
)
def test_pairs_after_a_tight_interval_are_not_missing(tmp_path, last_pair, noise, missing):
    def change(record):
        if record.arm == "kvbm" and record.turn == 2 and record.session % 2:
            record.first_token_ms += (noise - 1) * 40

    path = made(tmp_path / "a", workloads=[in_turn(SIX, pairs=6)], change=change)
    lines = (path / "runs.jsonl").read_text().splitlines()
    ended = [line for line in lines if json.loads(line)["pair"] <= last_pair]
    (path / "runs.jsonl").write_text("\n".join(ended) + "\n")
    assert len(planned_runs(Results.read(BenchDirectory.open(path)))) == 13
    assert len(missing_in(path)) == missing


def test_a_pair_that_has_begun_is_missing_its_other_arm_whatever_the_interval(tmp_path):
    path = made(tmp_path / "a", workloads=[in_turn(SIX, pairs=6)])  # five pairs are tight
    lines = (path / "runs.jsonl").read_text().splitlines()
    (path / "runs.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert missing_in(path) == [json.loads(lines[-1])["run"]]


@pytest.mark.parametrize(("name", "text"), [("requests.jsonl", "3\n"), ("runs.jsonl", "{]\n{}\n")])
def test_damaged_files_are_refused_and_nothing_is_written(tmp_path, name, text):
    path = made(tmp_path / "a")
    (path / name).write_text(text)
    with pytest.raises(UsageError, match=str(path / name)):
        command.report(path, as_json=True)
    assert not (path / "report.html").exists()


def test_a_directory_that_cannot_be_written_is_named_after_the_result(tmp_path, capsys):
    path = made(tmp_path / "a")
    (path / "exports").write_text("in the way")
    with pytest.raises(EnvironmentProblem, match=f"cannot write to {path / 'exports'}") as caught:
        command.report(path, as_json=True)
    assert caught.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "faster"


def test_resuming_with_other_options_leaves_the_summary(tmp_path):
    path = made(tmp_path / "run")
    before = (path / "summary.json").read_bytes()
    with pytest.raises(UsageError, match="was made by another command"):
        measure(tmp_path, MockEngines(), in_turn(SIX, pairs=7), resume=True)
    assert (path / "summary.json").read_bytes() == before
