"""`kvbm bench` on a stand-in for TensorRT-LLM that streams tokens and has a cache: from the profile to the verdict."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from terminal import Outcome, kvbm_here
from test_serve_trtllm import home  # noqa: F401

from kvbm.engines.model_tokenizer import model_tokenizer
from kvbm_cli.bench import command
from kvbm_cli.bench.judge.verdict import VerdictLimits

SPEED = {"base_ms": 30.0, "computed_token_ms": 0.3, "token_ms": 1.0}
PATIENT = VerdictLimits(lateness_ms=2000.0, client_cpu_share=2.0, collapse_utilisation=1.1, collapse_queue_share=1.1)
CONVERSATIONS = {
    "name": "small",
    "users": 4,
    "turns": 3,
    "system_tokens": 32,
    "history_tokens": 320,
    "question_tokens": 16,
    "answer_tokens": 6,
    "schedule": {"arms": "interleaved", "interval_s": 0.3, "pairs": 2},
}
G1_TOKENS = 640  # of the four conversations, it holds one
IN_TURN = "arms ran in turn although `schedule.arms` is `interleaved`"
UNREPORTED = "not tested, because the server of TensorRT-LLM does not report it: the tier that prompt tokens came from"


@pytest.fixture
def bench_home(home, monkeypatch):  # noqa: F811
    """With a workload, and with a tokenizer in which each letter is a token. A busy machine makes no run invalid."""
    monkeypatch.setattr(command, "DEFAULT_LIMITS", PATIENT)
    (home / "small.yaml").write_text(yaml.safe_dump(CONVERSATIONS))
    letters = {chr(number): number for number in range(32, 127)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": letters, "unk_token": "?"},
    }
    (home / "qwen" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return home


def bench(home: Path, *words: str) -> tuple[Outcome, dict[str, Any]]:  # noqa: F811
    outcome = kvbm_here(
        *("bench", "--profile", "./mine.yaml", "--compare", "baseline", "--workload", "./small.yaml"),
        *("--set", f"engine.arguments.kv_cache_config.max_tokens={G1_TOKENS}"),
        *("--set", "engine.arguments.max_seq_len=512", "--pressure", "none", "--output", "out", "--json", *words),
        home=home,
        FAKE_TRTLLM_STREAMS=json.dumps(SPEED),
    )
    return outcome, json.loads(outcome.stdout) if outcome.stdout else {}


def records_of(home: Path) -> list[dict[str, Any]]:  # noqa: F811
    return [json.loads(line) for line in (home / "out" / "requests.jsonl").read_text().splitlines()]


def test_arms_run_in_turn_with_token_ids_and_end_with_a_verdict(bench_home):
    outcome, summary = bench(bench_home)
    assert outcome.exit_code == 0, outcome
    assert summary["verdict"] == "faster", summary["explanation"]
    (cell,) = summary["cells"]
    assert (cell["interleaved"], cell["pairs_done"]) == (False, 2)
    assert cell["comparisons"][0]["outputs"]["verdict"] == "equal"
    assert cell["comparisons"][0]["has_loads"] is True
    counters = [run["kvbm_counters"] for run in cell["arms"]["kvbm"]["server"]]
    assert all(one["kvbm_onboard_blocks_h2d"] > 0 for one in counters)
    assert all(run["kvbm_counters"] == {} for run in cell["arms"]["baseline"]["server"])
    assert cell["arms"]["floor"]["ttft_ms"]["p50"] < cell["arms"]["baseline"]["ttft_ms"]["p50"]
    tokens = cell["arms"]["kvbm"]["prompt_tokens"]
    assert (tokens["g1"], tokens["g2"]) == (None, None)
    assert tokens["computed"] < cell["arms"]["baseline"]["prompt_tokens"]["computed"]
    assert [one for one in summary["caveats"] if one.startswith(UNREPORTED)]
    assert [one for one in summary["caveats"] if IN_TURN in one]
    assert any("sends no logprobs, so only tokens were compared" in one for one in cell["caveats"])
    assert not any("no metrics" in one or "prompts were text" in one for one in cell["caveats"])
    plan = json.loads((bench_home / "out" / "cells" / "small" / "plan.json").read_text())
    assert {type(part) for part in plan["contents"]} == {list}
    lengths = [request["prompt_tokens"] for request in plan["requests"]]
    assert {record["prompt_tokens"] for record in records_of(bench_home)} == set(lengths)
    report = (bench_home / "out" / "report.html").read_text()
    assert "Not tested, because the server of TensorRT-LLM does not report it" in report


def test_without_a_tokenizer_prompts_are_text(bench_home):
    (bench_home / "qwen" / "tokenizer.json").unlink()
    outcome, summary = bench(bench_home, "--pairs", "1")
    assert (outcome.exit_code, summary["verdict"]) == (0, "faster"), summary["explanation"]
    (cell,) = summary["cells"]
    assert any(caveat.startswith("prompts were text of about the given lengths") for caveat in cell["caveats"])
    plan = json.loads((bench_home / "out" / "cells" / "small" / "plan.json").read_text())
    assert {type(part) for part in plan["contents"]} == {str}
    assert {record["text"] == "" for record in records_of(bench_home)} == {False}


def test_every_plan_is_made_with_an_empty_cache(bench_home):
    """A second workload with the same prompts would find them in the engine that recorded the first."""
    small = {**CONVERSATIONS, "turns": 2, "history": "canned", "schedule": {"pairs": 1}}
    (bench_home / "small.yaml").write_text(yaml.safe_dump(small))
    (bench_home / "again.yaml").write_text(yaml.safe_dump({**small, "name": "again"}))
    outcome, _ = bench(bench_home, "--workload", "./again.yaml")
    assert outcome.exit_code in (0, 13), outcome
    plans = [json.loads((bench_home / "out" / "cells" / name / "plan.json").read_text()) for name in ("small", "again")]
    first, second = (plan["launches"]["interval_s"] for plan in plans)
    assert second == pytest.approx(first, rel=0.2)
    log = (bench_home / "out" / "runs" / "recording" / "engine.log").read_text()
    assert log.count("options ") == 2


def test_the_dry_run_counts_the_starts(bench_home):
    outcome, plan = bench(bench_home, "--dry-run")
    assert outcome.exit_code == 0, outcome.stderr
    assert plan["starts"] == 1 + 5
    assert [len(group["arms"]) for group in plan["cells"][0]["order"]] == [1] * 5


def test_the_tokenizer_of_the_model_counts_without_special_tokens(bench_home):
    tokenize = model_tokenizer(str(bench_home / "qwen"))
    assert tokenize is not None
    assert tokenize("a b") == [97, 32, 98]
    assert model_tokenizer("no/such-model") is None
