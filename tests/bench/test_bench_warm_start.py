"""A cache that was not empty at the start of a run is noticed, in whatever order an engine ran the requests."""

import json
from collections.abc import Sequence

import pytest

from kvbm_cli.bench.judge.answers import warm_start
from kvbm_cli.bench.judge.compared import utilisation_of
from kvbm_cli.bench.result.results import Measurement, RequestRecord
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan
from kvbm_cli.bench.workload.script import TextWriter, TokenWriter

TOKENS = TokenWriter(lambda text: [ord(character) for character in text], seed=1)
SAME = {"timestamp": 0, "input_length": 128, "output_length": 8, "hash_ids": list(range(8))}
HALF = {**SAME, "hash_ids": [0, 1, 2, 3, 4, 15, 16, 17]}
MESSAGES = {"timestamp": 0, "messages": [{"role": "user", "content": "a" * 400}], "output_length": 8}
WRITERS = {"tokens": TOKENS, "text": TextWriter(4.0)}


def plan_of(tmp_path, lines, writer=TOKENS) -> Plan:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    script = trace_script(path, TraceFormat(block_tokens=16), writer, seed=0)
    return Plan.make(script, Launches(), Dialect("m"), request_timeout_s=60)


def found(plan: Plan, *cached: int, launched_ms: Sequence[float] = (0, 0, 0)) -> str | None:
    """What is found of a run whose requests take 10 ms and have these cached tokens."""
    records = tuple(
        RequestRecord(
            *("r", "kvbm", "t", 1, one.index, one.session, one.turn, one.phase.value, 0.0),
            launched_ms=start_ms,
            first_token_ms=start_ms + 10,
            prompt_tokens=128,
            cached_tokens=count,
        )
        for one, count, start_ms in zip(plan.requests, cached, launched_ms, strict=False)
    )
    return warm_start(Measurement("r", "kvbm", 1, {}, records), plan)


@pytest.mark.parametrize("writer", WRITERS)
def test_requests_of_one_time_may_run_in_any_order(tmp_path, writer):
    plan = plan_of(tmp_path, [SAME, SAME], WRITERS[writer])
    assert found(plan, 112, 0) is None
    assert found(plan, 0, 112) is None


def test_request_that_was_launched_before_another_had_a_token_may_overtake_it(tmp_path):
    plan = plan_of(tmp_path, [SAME, SAME])
    assert found(plan, 112, 0, launched_ms=(0, 9)) is None
    message = found(plan, 112, 0, launched_ms=(0, 11))
    assert message == (
        "the cache was not empty at the start of r: turn 1 of session 0 found 112 of its 128 prompt tokens there, "
        "and at most half were sent before"
    )


def test_tokens_beyond_the_longest_common_prefix_were_not_sent(tmp_path):
    plan = plan_of(tmp_path, [SAME, HALF])
    assert found(plan, 80, 0) is None
    message = found(plan, 112, 0)
    assert message.endswith("found 112 of its 128 prompt tokens there, and at most 62% were sent before")


def test_fixed_bodies_are_compared_by_their_messages(tmp_path):
    other = {**MESSAGES, "output_length": 9}
    assert found(plan_of(tmp_path, [MESSAGES, other]), 112, 0) is None
    different = {**MESSAGES, "messages": [{"role": "user", "content": "b" * 400}]}
    assert found(plan_of(tmp_path, [MESSAGES, different]), 112, 0) is not None


def test_a_request_alone_that_finds_its_prompt_shows_a_warm_cache(tmp_path):
    assert found(plan_of(tmp_path, [SAME]), 112) is not None
    assert found(plan_of(tmp_path, [SAME]), 70) is None


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
