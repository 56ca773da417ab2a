"""Whole runs against mock engines: real HTTP, real files, modelled times."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from bench_rig import PATIENT, SLOW_G2_TOKEN_MS, STEADY_S, STEADY_WORKLOAD, WORKLOAD, MockEngines, SilentProgress
from kvbm_cli.bench.output_directory import OutputDirectory
from kvbm_cli.profile.workload import Schedule

from kvbm.errors import EngineError, UsageError
from kvbm_cli.bench.comparison import AGAINST_BASELINE
from kvbm_cli.bench.experiment import run_experiment
from kvbm_cli.bench.summary import summarise

ARMS = AGAINST_BASELINE.arms


def run(tmp_path, engines, workload=WORKLOAD):
    progress = SilentProgress()
    with closing(OutputDirectory.create(tmp_path / "run")) as directory:
        experiment = run_experiment(workload, engines, directory, progress)
    return experiment, summarise(experiment, surroundings={}, limits=PATIENT), progress


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]


def test_a_cache_in_g2_makes_later_turns_faster(tmp_path):
    engines = MockEngines.steady()
    experiment, summary, progress = run(tmp_path, engines, STEADY_WORKLOAD)
    assert engines.started == ["recording", "baseline", "kvbm", "floor"]
    assert summary["verdict"] == "faster"
    assert summary["outputs_equal"] is True
    assert summary["ttft_speedup"] > 1.5
    assert summary["arms"]["baseline"]["prompt_tokens"]["g2"] == 0
    assert summary["arms"]["kvbm"]["prompt_tokens"]["g2"] > 600
    assert summary["arms"]["kvbm"]["prompt_tokens"]["computed"] == summary["arms"]["floor"]["prompt_tokens"]["computed"]
    assert summary["arms"]["floor"]["prompt_tokens"]["g1"] >= 3 * 432
    for name in ARMS:
        assert summary["arms"][name]["prompt_tokens"] == summary["arms"][name]["prompt_tokens_by_metrics"]
    assert len(progress.records) == 4 * WORKLOAD.request_count
    assert experiment.plan.interval_s == STEADY_S


@pytest.mark.parametrize("arms", ["interleaved", "in_turn"])
def test_arms_run_together_or_one_after_the_other(tmp_path, arms):
    schedule = Schedule(interval_s=STEADY_S, arms=arms)
    engines = MockEngines.steady()
    _, summary, progress = run(tmp_path, engines, WORKLOAD.model_copy(update={"schedule": schedule}))
    assert engines.started == ["recording", "baseline", "kvbm", "floor"]
    assert engines.most_at_once == (3 if arms == "interleaved" else 1)
    assert summary["verdict"] == "faster"
    assert summary["arms"]["kvbm"]["prompt_tokens"]["g2"] > 600
    measured = [record.arm for record in progress.records if record.arm != "recording"]
    assert (measured[:6] == ["baseline"] * 6) == (arms == "in_turn")


def test_all_arms_send_the_same_bytes_at_the_same_intended_times(tmp_path):
    run(tmp_path, MockEngines())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    by_arm = {name: [record for record in records(tmp_path) if record["arm"] == name] for name in ARMS}
    for of_arm in by_arm.values():
        of_arm.sort(key=lambda record: record["index"])
        assert [record["intended_ms"] / 1e3 for record in of_arm] == [one["intended_s"] for one in plan["requests"]]
        assert [record["prompt_tokens"] for record in of_arm] == [one["prompt_tokens"] for one in plan["requests"]]
        assert [record["token_ids"] for record in of_arm] == [record["token_ids"] for record in by_arm["baseline"]]


def test_the_run_directory_holds_plan_requests_and_counters(tmp_path):
    run(tmp_path, MockEngines())
    files = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file())
    snapshots = [f"{arm}/metrics-{when}.txt" for arm in sorted(ARMS) for when in ("after", "before")]
    assert files == [*snapshots, "plan.json", "requests.jsonl"]
    assert len(records(tmp_path)) == 3 * WORKLOAD.request_count


def test_without_an_interval_the_cold_prompts_fix_it(tmp_path):
    workload = WORKLOAD.model_copy(update={"schedule": Schedule(target_utilisation=0.8), "turns": 1})
    experiment, _, _ = run(tmp_path, MockEngines(), workload)
    cold_ms = experiment.recording.cold_ms
    assert len(cold_ms) == 3
    assert experiment.plan.interval_s == pytest.approx(sorted(cold_ms)[1] / 1e3 / 0.8, rel=0.5)


def test_time_left_is_that_of_the_work_where_a_baseline_cannot_keep_up_with_the_schedule(tmp_path):
    class Expecting(SilentProgress):
        def phase(self, text, *, expected_s=None, remaining_s=None):
            expected[text] = expected_s

    expected = {}
    workload = WORKLOAD.model_copy(update={"schedule": Schedule(interval_s=0.001)})
    with closing(OutputDirectory.create(tmp_path / "run")) as directory:
        experiment = run_experiment(workload, MockEngines(), directory, Expecting())
    assert expected["kvbm: 6 requests"] == experiment.plan.duration_s == 0.006
    assert expected["baseline: 6 requests"] >= 6 * min(experiment.recording.cold_ms) / 1e3
    assert expected["kvbm: starting the engine"] == experiment.recording.ready_s > 0


def test_an_answer_that_differs_is_wrong(tmp_path):
    _, summary, _ = run(tmp_path, MockEngines().changed("kvbm", faults={4: "wrong"}))
    assert (summary["verdict"], summary["outputs_equal"]) == ("wrong", False)
    assert summary["different_answers"]["kvbm"] == [[1, 2]]


def test_an_answer_with_the_right_tokens_and_other_probabilities_is_wrong(tmp_path):
    _, summary, _ = run(tmp_path, MockEngines().changed("kvbm", faults={4: "improbable"}))
    assert (summary["verdict"], summary["outputs_equal"]) == ("wrong", False)
    assert summary["different_answers"]["kvbm"] == []


def test_a_cache_slower_than_computing_is_slower(tmp_path):
    _, summary, _ = run(tmp_path, MockEngines.steady().changed("kvbm", g2_token_ms=SLOW_G2_TOKEN_MS), STEADY_WORKLOAD)
    assert summary["verdict"] == "slower"
    assert summary["ttft_speedup"] < 0.9


def test_a_block_manager_that_brings_nothing_is_invalid(tmp_path):
    _, summary, _ = run(tmp_path, MockEngines().changed("kvbm", g2_blocks=0))
    assert summary["verdict"] == "invalid"
    assert summary["reasons"] == ["no prompt token came from G2, so the block manager was not tested"]


@pytest.mark.parametrize("fault", ["http_500", "break_off", "error_event"])
def test_failed_requests_are_records_and_make_the_run_invalid(tmp_path, fault):
    _, summary, _ = run(tmp_path, MockEngines().changed("kvbm", faults={4: fault}))
    assert summary["verdict"] == "invalid"
    assert summary["arms"]["kvbm"]["errors"] == 1
    failed = [record for record in records(tmp_path) if record["status"] == "error"]
    assert [(record["arm"], record["user"], record["turn"]) for record in failed] == [("kvbm", 1, 2)]


def test_an_engine_that_ends_makes_the_run_invalid_and_the_other_arms_go_on(tmp_path):
    _, summary, _ = run(tmp_path, MockEngines().changed("kvbm", faults={2: "end"}))
    assert summary["verdict"] == "invalid"
    assert summary["arms"]["kvbm"]["engine"]["ended_early"] is True
    assert summary["arms"]["kvbm"]["errors"] >= 3
    assert summary["arms"]["floor"]["errors"] == 0


def test_without_counters_the_usage_is_enough(tmp_path):
    engines = MockEngines.steady()
    for arm in ("baseline", "kvbm", "floor"):
        engines = engines.changed(arm, has_metrics=False)
    _, summary, _ = run(tmp_path, engines, STEADY_WORKLOAD)
    assert summary["verdict"] == "faster"
    assert summary["arms"]["baseline"]["queue_wait_ms"] is None


def test_a_recording_that_fails_says_which_request(tmp_path):
    engines = MockEngines().changed("recording", faults={1: "http_400"})
    with pytest.raises(EngineError, match="recording turn 1 of user 1 failed: HTTP 400"):
        run(tmp_path, engines)


def test_a_directory_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(UsageError, match="is not empty"):
        OutputDirectory.create(tmp_path)


def test_an_empty_directory_is_used_and_the_default_one_is_named_after_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    OutputDirectory.create(tmp_path).close()
    first, second = OutputDirectory.create(None), OutputDirectory.create(None)
    first.close()
    second.close()
    assert first.path != second.path
    assert first.path.parent.name == "kvbm-runs"
