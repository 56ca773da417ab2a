"""Whole experiments against mock engines: real HTTP, real files, modelled times, and caches that were not empty."""

import json
from contextlib import closing

import pytest
from bench_rig import (
    REQUESTS,
    STEADY_WORKLOAD,
    WORKLOAD,
    MockEngines,
    SilentProgress,
    in_turn,
    lines_of,
    run,
    setup_of,
    timed,
    without_sampler,  # noqa: F401
)

from kvbm.errors import EngineError, UsageError
from kvbm_cli.bench.experiment import run_experiment
from kvbm_cli.bench.judge.answers import warm_start
from kvbm_cli.bench.judge.compared import utilisation_of
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Measurement, RequestRecord
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan
from kvbm_cli.bench.workload.schema import Schedule, Unique
from kvbm_cli.bench.workload.script import TextWriter, TokenWriter

ARMS = ["baseline", "kvbm", "floor"]
fast = pytest.mark.usefixtures("without_sampler")


def cell_plan(tmp_path, name="plan"):
    return Plan.from_json(json.loads((tmp_path / "run" / "cells" / "small" / f"{name}.json").read_text()))


@fast
def test_with_a_shared_tier_a_first_engine_gets_all_requests_and_the_next_one_is_not_emptied(tmp_path):
    engines = MockEngines()
    engines.with_next = {"kvbm"}
    run(tmp_path, engines, in_turn())
    assert engines.started == ["recording", "baseline", "kvbm", "kvbm again", "floor"]
    _, baseline, measured, first, _ = engines.ended
    assert len(first.bodies) == len(baseline.bodies) - 1, "all requests without the warm-up"
    assert [body["prompt"] for body in measured.bodies] == [body["prompt"] for body in baseline.bodies]
    assert (baseline.resets, first.resets, measured.resets) == (1, 0, 0)


@timed
def test_a_cache_in_g2_makes_later_turns_faster(tmp_path):
    engines = MockEngines.steady()
    summary, progress = run(tmp_path, engines, STEADY_WORKLOAD)
    assert engines.started == ["recording", *ARMS]
    assert engines.most_at_once == 3
    assert summary["verdict"] == "faster", summary["explanation"]
    assert summary["outputs_equal"] is True
    assert summary["ttft_speedup"] > 1.5
    (cell,) = summary["cells"]
    arms = cell["arms"]
    assert arms["baseline"]["prompt_tokens"]["g2"] == 0
    assert arms["kvbm"]["prompt_tokens"]["g2"] > 600
    assert arms["kvbm"]["prompt_tokens"]["computed"] == arms["floor"]["prompt_tokens"]["computed"]
    assert arms["floor"]["prompt_tokens"]["g1"] >= 3 * 432
    for name in ARMS:
        by_metrics = arms[name]["prompt_tokens_by_metrics"]
        counted = {tier: count for tier, count in by_metrics.items() if count is not None}
        assert counted.items() <= arms[name]["prompt_tokens"].items()
        assert len(counted) >= 3
    assert len(progress.records) == 4 * REQUESTS
    assert cell["plan"]["interval_s"] == STEADY_WORKLOAD.schedule.interval_s
    assert cell["comparisons"][0]["has_loads"] is True
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    samples = {f"runs/small.1.{arm}/server-metrics.jsonl" for arm in ARMS}
    assert files - {".lock"} == {"plan.json", "cells/small/plan.json", "requests.jsonl", "runs.jsonl", *samples}


@fast
def test_arms_in_turn_run_one_after_the_other_in_alternating_order(tmp_path):
    engines = MockEngines()
    summary, progress = run(tmp_path, engines, in_turn(pairs=2))
    order = engines.started
    assert order[0] == "recording"
    assert order[3] == "floor"
    assert order[1:3] == order[5:3:-1]
    assert sorted(order[1:3]) == ["baseline", "kvbm"]
    assert engines.most_at_once == 1
    assert [record["run"] for record in lines_of(tmp_path)] == [
        f"small.{pair}.{arm}" for pair, arm in zip((1, 1, 1, 2, 2), order[1:], strict=True) for _ in range(REQUESTS)
    ]
    assert [line["position"] for line in lines_of(tmp_path, "runs.jsonl")] == [1, 2, 3, 4, 5]
    assert summary["ttft_speedup_paired"]["runs"] == 2
    assert summary["ttft_speedup_paired"]["pairs"] == 6
    assert summary["cells"][0]["comparisons"][0]["noise"]["source"].startswith("baseline, pair")
    assert len(progress.records) == 6 * REQUESTS


@fast
def test_all_arms_send_the_same_bytes_at_the_same_intended_times_with_room_for_all(tmp_path):
    engines = MockEngines()
    run(tmp_path, engines)
    plan = cell_plan(tmp_path)
    assert [(room.tokens, room.sessions) for room in engines.rooms[1:]] == [(plan.total_tokens, 3)] * 3
    assert engines.rooms[0].tokens >= plan.total_tokens
    by_arm = {name: [record for record in lines_of(tmp_path) if record["arm"] == name] for name in ARMS}
    for of_arm in by_arm.values():
        of_arm.sort(key=lambda record: record["index"])
        assert [record["intended_ms"] / 1e3 for record in of_arm] == [one.intended_s for one in plan.requests]
        assert [record["prompt_tokens"] for record in of_arm] == [one.prompt_tokens for one in plan.requests]
        assert [record["token_ids"] for record in of_arm] == [record["token_ids"] for record in by_arm["baseline"]]
        assert [record["phase"] for record in of_arm] == ["cold"] * 3 + ["steady"] * 3


@timed
@fast
def test_without_an_interval_the_cold_prompts_of_the_recording_fix_it(tmp_path):
    workload = WORKLOAD.model_copy(update={"schedule": Schedule(arms="interleaved", target_utilisation=0.8, pairs=1)})
    _, progress = run(tmp_path, MockEngines.steady(), workload)
    cold_s = [record.end_to_end_ms / 1e3 for record in progress.records[:3]]
    mean = sum(one.prompt_tokens for one in cell_plan(tmp_path).requests) / REQUESTS
    assert cell_plan(tmp_path).launches.interval_s == pytest.approx(max(cold_s) / 448 * mean / 0.8, rel=0.15)


@timed
@fast
def test_without_a_recording_five_cold_requests_fix_the_interval(tmp_path):
    workload = Unique(name="small", kind="unique", requests=8, prompt_tokens=200, answer_tokens=2)
    schedule = Schedule(arms="interleaved", target_utilisation=0.5, pairs=1)
    engines = MockEngines(recording=MockEngines.steady().options["recording"])
    run(tmp_path, engines, workload.model_copy(update={"schedule": schedule}))
    assert cell_plan(tmp_path).launches.interval_s == pytest.approx((60 + 0.4 * 200 + 2) / 1e3 / 0.5, rel=0.3)


@fast
def test_a_closed_loop_keeps_its_sessions_in_flight(tmp_path):
    workload = WORKLOAD.model_copy(update={"schedule": Schedule(concurrency=2, pairs=1)})
    summary, _ = run(tmp_path, MockEngines(), workload)
    by_key = {(one["run"], one["session"], one["turn"]): one for one in lines_of(tmp_path)}
    assert len(by_key) == 3 * REQUESTS
    for (run_name, session, turn), record in by_key.items():
        if turn == 2:
            assert record["launched_ms"] >= by_key[run_name, session, 1]["end_ms"]
    assert summary["cells"][0]["plan"]["concurrency"] == 2


@fast
def test_several_workloads_share_one_recording_engine(tmp_path):
    other = Unique(name="alone", kind="unique", requests=2, prompt_tokens=50, answer_tokens=2)
    other = other.model_copy(update={"schedule": WORKLOAD.schedule})
    engines = MockEngines()
    summary, _ = run(tmp_path, engines, WORKLOAD, other)
    assert engines.started == ["recording", *ARMS, *ARMS]
    assert [cell["name"] for cell in summary["cells"]] == ["small", "alone"]
    assert summary["cells"][1]["plan"]["primary"] == "all"
    assert len(lines_of(tmp_path)) == 3 * (REQUESTS + 2)


@fast
def test_several_references_are_compared_one_by_one(tmp_path):
    engines = MockEngines.steady().renamed(**{"demo": "kvbm", "demo-disk": "baseline"})
    summary, _ = run(tmp_path, engines, STEADY_WORKLOAD, compare=("baseline", "demo-disk"))
    assert engines.started == ["recording", "baseline", "demo", "demo-disk", "floor"]
    assert engines.most_at_once == 4
    assert [(one["measured"], one["reference"]) for one in summary["cells"][0]["comparisons"]] == [
        ("demo", "baseline"),
        ("demo", "demo-disk"),
    ]
    assert summary["compared"]["measured"] == "demo"
    shares = [one["share_of_possible_gain"] for one in summary["cells"][0]["comparisons"]]
    assert shares[1] is None


@fast
def test_an_engine_that_ends_makes_the_run_invalid_and_the_other_arms_go_on(tmp_path):
    summary, _ = run(tmp_path, MockEngines().changed("kvbm", faults={2: "end"}))
    assert summary["verdict"] == "invalid"
    arms = summary["cells"][0]["arms"]
    assert arms["kvbm"]["engine_ended"] is True
    assert arms["kvbm"]["errors"] >= 3
    assert arms["kvbm"]["requests"] == REQUESTS
    assert arms["floor"]["errors"] == 0


@fast
def test_an_engine_that_answers_no_warm_up_is_an_error_that_names_it(tmp_path):
    with pytest.raises(EngineError, match="the warm-up request failed: HTTP 500"):
        run(tmp_path, MockEngines().changed("baseline", faults={0: "http_500"}))
    assert lines_of(tmp_path) == []


def stopped(tmp_path, monkeypatch, *, is_tight, pairs):
    """Runs with a rule of its own for what is tight."""
    setup = setup_of(in_turn(pairs=pairs, interval_s=0.02))
    asked = []

    def rule(cell, **_):
        asked.append(sum(len(run.records) for run in cell.runs))
        return is_tight

    monkeypatch.setattr("kvbm_cli.bench.setup.is_cell_tight", rule)
    engines, progress = MockEngines(), SilentProgress()
    with closing(BenchDirectory.create(tmp_path / "run")) as directory:
        run_experiment(setup, engines, directory, progress)
    return engines, asked, progress


@fast
def test_a_tight_interval_stops_after_two_pairs_and_never_earlier(tmp_path, monkeypatch):
    engines, asked, progress = stopped(tmp_path, monkeypatch, is_tight=True, pairs=5)
    assert len(engines.started) == 1 + 2 + 1 + 2
    assert asked == [5 * REQUESTS]
    assert progress.phases[-1] == "small: the interval is tight after 2 pairs"


@pytest.mark.soak
@fast
def test_all_pairs_run_while_the_interval_is_wide(tmp_path, monkeypatch):
    engines, asked, _ = stopped(tmp_path, monkeypatch, is_tight=False, pairs=4)
    assert len(engines.started) == 1 + 1 + 4 * 2
    assert asked == [5 * REQUESTS, 7 * REQUESTS]


@pytest.mark.soak
@pytest.mark.slow
@timed
@fast
def test_the_rule_of_the_command_looks_at_the_compared_arms(tmp_path):
    """Equal engines are tight after two pairs; the page shows it."""
    even = MockEngines.steady().options["floor"]
    engines = MockEngines(recording=even, baseline=even, kvbm=even, floor=even)
    summary, progress = run(tmp_path, engines, in_turn(pairs=6, interval_s=0.25))
    assert summary["cells"][0]["stopped_early"] is True
    assert summary["cells"][0]["pairs_done"] < 6
    assert "the interval is tight" in progress.phases[-1]


def test_a_directory_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(UsageError, match="is not empty") as caught:
        BenchDirectory.create(tmp_path)
    assert caught.value.hint is None
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UsageError, match="is not empty") as caught:
        BenchDirectory.create(tmp_path)
    assert caught.value.hint == f"`--resume {tmp_path}` continues it"


def test_an_empty_directory_is_used_and_the_default_one_is_named_after_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    BenchDirectory.create(tmp_path).close()
    first, second = BenchDirectory.create(None), BenchDirectory.create(None)
    assert first.path != second.path
    assert first.path.parent.name == "kvbm-runs"


TOKENS, TEXT = TokenWriter(lambda text: [ord(character) for character in text], seed=1), TextWriter(4.0)
SAME = {"timestamp": 0, "input_length": 128, "output_length": 8, "hash_ids": list(range(8))}
HALF = {**SAME, "hash_ids": [0, 1, 2, 3, 4, 15, 16, 17]}
MESSAGES = {"timestamp": 0, "messages": [{"role": "user", "content": "a" * 400}], "output_length": 8}
OTHER = {**MESSAGES, "messages": [{"role": "user", "content": "b" * 400}]}
FOUND = "found 112 of its 128 prompt tokens there, and at most {} were sent before"


@pytest.mark.parametrize(
    ("lines", "writer", "cached", "launched_ms", "found"),
    [
        # Requests of one time may run in any order.
        ([SAME, SAME], TOKENS, (112, 0), (0, 0), None),
        ([SAME, SAME], TOKENS, (0, 112), (0, 0), None),
        ([SAME, SAME], TEXT, (112, 0), (0, 0), None),
        ([SAME, SAME], TEXT, (0, 112), (0, 0), None),
        # So may one that was launched before another had a token, after 10 ms.
        ([SAME, SAME], TOKENS, (112, 0), (0, 9), None),
        ([SAME, SAME], TOKENS, (112, 0), (0, 11), FOUND.format("half")),
        # Tokens beyond the longest common prefix were not sent, nor those of other messages.
        ([SAME, HALF], TOKENS, (80, 0), (0, 0), None),
        ([SAME, HALF], TOKENS, (112, 0), (0, 0), FOUND.format("62%")),
        ([MESSAGES, {**MESSAGES, "output_length": 9}], TOKENS, (112, 0), (0, 0), None),
        ([MESSAGES, OTHER], TOKENS, (112, 0), (0, 0), FOUND.format("half")),
        ([SAME], TOKENS, (112,), (0,), FOUND.format("half")),
        ([SAME], TOKENS, (70,), (0,), None),
    ],
)
def test_a_cache_that_was_not_empty_is_found(tmp_path, lines, writer, cached, launched_ms, found):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    script = trace_script(path, TraceFormat(block_tokens=16), writer, seed=0)
    plan = Plan.make(script, Launches(), Dialect("m"), request_timeout_s=60)
    records = tuple(
        RequestRecord(
            *("r", "kvbm", "t", 1, one.index, one.session, one.turn, one.phase.value, 0.0),
            launched_ms=start_ms,
            first_token_ms=start_ms + 10,
            prompt_tokens=128,
            cached_tokens=count,
        )
        for one, count, start_ms in zip(plan.requests, cached, launched_ms, strict=True)
    )
    message = f"the cache was not empty at the start of r: turn 1 of session 0 {found}"
    assert warm_start(Measurement("r", "kvbm", 1, {}, records), plan) == (message if found else None)


def test_a_burst_has_no_rate_that_an_engine_could_keep_up_with():
    def busy(*times: tuple[float, float]) -> float | None:
        records = [
            RequestRecord("r", "kvbm", "t", 1, index, index, 1, "cold", 0.0, launched_ms=start_ms, end_ms=end_ms)
            for index, (start_ms, end_ms) in enumerate(times)
        ]
        return utilisation_of(Measurement("r", "kvbm", 1, {}, tuple(records)))

    assert busy((0, 100)) is None
    assert busy((0, 100), (0, 200)) is None
    assert busy((0, 100), (99, 200)) is None
    assert busy((0, 100), (100, 200)) == 1.0
    assert busy((0, 100), (300, 400)) == 0.5
    assert busy() is None
