"""Whole runs against mock engines: what they report at /metrics leads to the cause. Limits on load are wide, except
where the load is the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench_rig import PATIENT, MockEngines, measure, summary_of

from kvbm_cli.bench.judge.verdict import VerdictLimits
from kvbm_cli.bench.workload.schema import Conversations, Schedule, Unique, Workload

SCHEDULE = Schedule(arms="interleaved", interval_s=0.1, pairs=1)
TALK = Conversations(
    name="talk",
    users=6,
    turns=2,
    system_tokens=32,
    history_tokens=400,
    question_tokens=16,
    answer_tokens=4,
    history="canned",
    schedule=SCHEDULE,
    request_timeout_s=5.0,
)
ONCE = Unique(name="once", kind="unique", requests=12, prompt_tokens=400, answer_tokens=4, schedule=SCHEDULE)


def causes(
    tmp_path: Any, engines: MockEngines, workload: Workload = TALK, limits: VerdictLimits = PATIENT
) -> dict[str, dict[str, Any]]:
    measure(tmp_path, engines, workload, limits=limits)
    (comparison,) = summary_of(tmp_path)["cells"][0]["comparisons"]
    return {why["cause"]: why for why in comparison["why_not"]}


def test_a_run_that_pays_gets_no_reasons(tmp_path, capsys):
    slower = {name: replace(options, computed_token_ms=0.25) for name, options in MockEngines().options.items()}
    workload = TALK.model_copy(update={"schedule": SCHEDULE.model_copy(update={"interval_s": 0.2})})
    assert causes(tmp_path, MockEngines(**slower), workload) == {}
    assert summary_of(tmp_path)["verdict"] == "faster"


def test_a_g1_that_holds_everything(tmp_path, capsys):
    engines = MockEngines().changed("baseline", g1_blocks=10_000).changed("kvbm", g1_blocks=10_000)
    found = causes(tmp_path, engines)
    assert next(iter(found)) == "fits-g1"
    assert "fits into G1 (160,000 tokens)" in found["fits-g1"]["text"]


def test_prompts_that_never_repeat(tmp_path, capsys):
    assert next(iter(causes(tmp_path, MockEngines(), ONCE))) == "no-reuse"


def test_a_g2_that_is_smaller_than_the_working_set(tmp_path, capsys):
    """The terminal prints the reason below the verdict."""
    measure(tmp_path, MockEngines().changed("kvbm", g2_blocks=70), TALK, as_json=False)
    shown = capsys.readouterr().out
    assert "\nwhy kvbm was not faster than baseline:\n  1. G2 is too small: it holds 1,120 tokens, G1 960" in shown


def test_loads_that_take_three_times_as_long_as_computing(tmp_path, capsys):
    assert list(causes(tmp_path, MockEngines().changed("kvbm", g2_token_ms=0.3))) == ["host-slower"]


def test_requests_that_come_faster_than_the_engine_answers(tmp_path, capsys):
    fast = TALK.model_copy(update={"schedule": SCHEDULE.model_copy(update={"interval_s": 0.01})})
    found = causes(tmp_path, MockEngines(), fast, VerdictLimits())
    assert "overloaded" in found
    assert "so `--rate " in found["overloaded"]["text"]
