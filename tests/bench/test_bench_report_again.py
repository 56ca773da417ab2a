"""`kvbm bench report DIR`: computes the result again from the records, also of an interrupted experiment."""

import json

import pytest
from bench_rig import MockEngines, in_turn, measure
from experiments import SIX, SURROUNDINGS, made, rewrite_lines, summary_in

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.setup import missing_runs, planned_runs
from kvbm_cli.bench.summary import interrupted_summary
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan
from kvbm_cli.bench.workload.script import TokenWriter

FILES = ("report.html", "exports/kvbm/small/vllm-bench.json", "exports/baseline/small/profile_export.jsonl")


def missing_in(path):
    return missing_runs(Results.read(BenchDirectory.open(path)))


def test_the_summary_has_the_same_bytes_and_all_files_follow(tmp_path, capsys):
    path = made(tmp_path / "a")
    before = (path / "summary.json").read_bytes()
    assert command.report(path, as_json=True) == 0
    assert (path / "summary.json").read_bytes() == before
    assert json.loads(capsys.readouterr().out) == summary_in(path)
    written = {name: (path / name).read_bytes() for name in FILES}
    command.report(path, as_json=False)
    assert "faster: " in capsys.readouterr().out
    assert (path / "summary.json").read_bytes() == before
    assert {name: (path / name).read_bytes() for name in FILES} == written


@pytest.mark.parametrize(("later_ms", "exit_code"), [(400.0, 0), (900.0, 10)])
def test_the_exit_code_is_that_of_the_verdict(tmp_path, capsys, later_ms, exit_code):
    assert command.report(made(tmp_path / "a", times={"kvbm": later_ms}), as_json=True) == exit_code


def test_brackets_in_names_are_text_and_40_columns_lose_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    command.report(made(tmp_path / "a", workloads=[in_turn(SIX.model_copy(update={"name": "[x]"}))]), as_json=False)
    page = capsys.readouterr().out
    assert "[x]" in page
    assert "…" not in page


def test_the_records_decide_and_not_the_old_summary(tmp_path, capsys):
    path = made(tmp_path / "a")
    lines = [json.loads(line) for line in (path / "requests.jsonl").read_text().splitlines()]
    number = next(row for row, line in enumerate(lines, 1) if line["arm"] == "kvbm" and line["turn"] == 2)
    rewrite_lines(path / "requests.jsonl", number, token_ids=[9] * 6)
    assert command.report(path, as_json=True) == 12
    assert summary_in(path)["verdict"] == "wrong"
    assert summary_in(path)["caveats"] == ["a caveat"]
    assert summary_in(path)["machine"] == SURROUNDINGS["machine"]


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


@pytest.mark.parametrize("pairs", [1, 2])
def test_an_interrupted_experiment_has_the_runs_that_have_ended_and_is_incomplete(tmp_path, capsys, pairs):
    workloads = [in_turn(SIX, pairs=pairs).model_copy(update={"name": name}) for name in ("one", "two")]
    path = made(tmp_path / "a", workloads=workloads, last_run="one.1.floor")
    (path / "summary.json").write_text(json.dumps(interrupted_summary("interrupted", SURROUNDINGS)))
    assert command.report(path, as_json=True) == 11
    first = capsys.readouterr().out
    summary = json.loads(first)
    assert (summary["complete"], summary["verdict"]) == (False, "invalid")
    planned, missing = (6, 3) if pairs == 1 else (10, 7)
    reason = f"incomplete: {missing} of {planned} runs have not ended"
    assert summary["explanation"].startswith(f"{reason}; so far faster: ")
    assert summary["reasons"] == [reason]
    assert "--resume" in summary["hint"]
    assert [cell["name"] for cell in summary["cells"]] == ["one"]
    assert summary["cells"][0]["comparisons"][0]["verdict"] == "faster"
    assert summary["machine"] == SURROUNDINGS["machine"]
    assert command.report(path, as_json=True) == 11
    assert capsys.readouterr().out == first
    assert "incomplete" in (path / "report.html").read_text()
    command.report(path, as_json=False)
    assert f"invalid: {reason}" in capsys.readouterr().out


def test_wrong_outputs_are_a_result_of_an_incomplete_experiment(tmp_path, capsys):
    def change(record):
        if record.arm == "kvbm" and record.index == 7:
            record.token_ids[5] = 99

    assert command.report(made(tmp_path / "a", change=change, last_run="small.1.floor"), as_json=True) == 12
    summary = summary_in(tmp_path / "a")
    assert (summary["complete"], summary["verdict"], len(summary["reasons"])) == (False, "wrong", 2)


@pytest.mark.parametrize("arm", ["baseline", "kvbm"])
def test_one_arm_of_two_has_no_result_yet(tmp_path, capsys, arm):
    times = {**dict.fromkeys(("baseline", "kvbm", "floor")), arm: 40.0}
    path = made(tmp_path / "a", times=times, workloads=[in_turn(SIX)])
    assert command.report(path, as_json=False) == 11
    summary = summary_in(path)
    assert summary["explanation"] == "incomplete: 2 of 3 runs have not ended"
    assert list(summary["cells"][0]["arms"]) == [arm]
    assert summary["cells"][0]["comparisons"] == []


def test_no_run_has_ended(tmp_path, capsys):
    path = made(tmp_path / "a", workloads=[in_turn(SIX)])
    for name in ("requests.jsonl", "runs.jsonl"):
        (path / name).unlink()
    assert command.report(path, as_json=False) == 11
    summary = summary_in(path)
    assert summary["explanation"] == "incomplete: 3 of 3 runs have not ended"
    assert (summary["cells"], summary["ttft_speedup"], summary["outputs_equal"]) == ([], None, None)
    assert "incomplete" in (path / "report.html").read_text()


def test_records_of_a_run_that_has_not_ended_do_not_count(tmp_path, capsys):
    path = made(tmp_path / "a", workloads=[in_turn(SIX)])
    lines = (path / "runs.jsonl").read_text().splitlines()
    (path / "runs.jsonl").write_text("\n".join(lines[:-1]) + '\n{"run": "small.1.')
    command.report(path, as_json=True)
    assert summary_in(path)["complete"] is False
    assert "floor" not in summary_in(path)["cells"][0]["arms"]


@pytest.mark.parametrize(
    ("last_pair", "noise", "missing"),
    [
        (4, 3.0, 0),
        (3, 1.0, 0),  # the interval is tight: pair 4 was not necessary
        (3, 3.0, 2),
        (2, 1.0, 4),
        (1, 1.0, 6),
    ],
)
def test_pairs_after_a_tight_interval_are_not_missing(tmp_path, last_pair, noise, missing):
    def change(record):
        if record.arm == "kvbm" and record.turn == 2 and record.session % 2:
            record.first_token_ms += (noise - 1) * 40

    path = made(tmp_path / "a", workloads=[in_turn(SIX, pairs=4)], change=change)
    lines = (path / "runs.jsonl").read_text().splitlines()
    ended = [line for line in lines if json.loads(line)["pair"] <= last_pair]
    (path / "runs.jsonl").write_text("\n".join(ended) + "\n")
    assert len(planned_runs(Results.read(BenchDirectory.open(path)))) == 9
    assert len(missing_in(path)) == missing


def test_a_pair_that_has_begun_is_missing_its_other_arm_whatever_the_interval(tmp_path):
    path = made(tmp_path / "a", workloads=[in_turn(SIX, pairs=4)])  # three pairs are tight
    lines = (path / "runs.jsonl").read_text().splitlines()
    (path / "runs.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert missing_in(path) == [json.loads(lines[-1])["run"]]


def test_without_a_summary_the_surroundings_are_unknown_and_a_caveat_says_so(tmp_path, capsys):
    path = made(tmp_path / "a")
    (path / "summary.json").unlink()
    assert command.report(path, as_json=False) == 0
    summary = summary_in(path)
    assert (summary["complete"], summary["verdict"]) == (True, "faster")
    assert (summary["machine"], summary["versions"], summary["profile"]) == (None, None, None)
    assert summary["caveats"] == ["summary.json was missing: the profile, the machine and the versions are unknown"]
    before = (path / "summary.json").read_bytes()
    command.report(path, as_json=False)
    assert (path / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "text"), [("requests.jsonl", "3\n"), ("runs/small.1.kvbm/server-metrics.jsonl", "{]\n{}\n")]
)
def test_damaged_files_are_refused_and_nothing_is_written(tmp_path, name, text):
    path = made(tmp_path / "a")
    (path / name).parent.mkdir(parents=True, exist_ok=True)
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
