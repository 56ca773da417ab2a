from __future__ import annotations

import asyncio
import json

import pytest
from bench_rig import WORKLOAD
from mock_engine import MockEngine, Options, answer_to

from kvbm_cli.bench.client import EventSplitter, Target, drive, open_session, send
from kvbm_cli.bench.request_record import RequestRecord
from kvbm_cli.bench.schedule import Plan, RecordedAnswer, Script

SHORT = WORKLOAD.model_copy(update={"request_timeout_s": 0.5})


def make_plan(workload=WORKLOAD, interval_s=0.02) -> Plan:
    script = Script.write(workload, lambda text: list(text.encode()))
    answers: list[list[RecordedAnswer]] = [[] for _ in range(workload.users)]
    for turn in range(1, workload.turns + 1):
        for user in range(workload.users):
            prompt = script.prompt(user, turn, answers[user])
            answers[user].append(RecordedAnswer(tuple(answer_to(prompt, workload.answer_tokens))))
    return Plan.make(workload, script, model="mock", answers=answers, interval_s=interval_s)


def drive_mock(options: Options, *, plan: Plan | None = None):
    plan = plan or make_plan()
    seen: list[RequestRecord] = []
    with MockEngine(options) as engine:
        target = Target("kvbm", engine.base_url, 0.0, engine.has_ended)
        result = asyncio.run(drive(plan, [target], on_record=seen.append))
    assert sorted(record.index for record in seen) == list(range(len(plan.requests)))
    return plan, result


def first_record(fault: str, workload=WORKLOAD) -> RequestRecord:
    """The record of a request that meets this fault. One that follows must not be disturbed by it."""
    plan = make_plan(workload)

    async def twice(base_url: str) -> list[RequestRecord]:
        async with open_session() as session:
            return [
                await send(session, base_url, request, workload=workload, arm="kvbm") for request in plan.requests[:2]
            ]

    with MockEngine(Options(faults={0: fault}, computed_token_ms=0.01)) as engine:
        record, following = asyncio.run(twice(engine.base_url))
    assert following.error is None
    return record


def test_a_good_record_has_times_tokens_and_their_sources():
    plan, result = drive_mock(Options(g2_blocks=1000, g1_blocks=1, computed_token_ms=0.01))
    assert [record.key for record in result.records["kvbm"]] == [request.key for request in plan.requests]
    for record, request in zip(result.records["kvbm"], plan.requests, strict=True):
        assert record.error is None
        assert record.http_status == 200
        assert record.token_ids == list(request.answer.token_ids)
        assert record.logprobs == [-0.5] * WORKLOAD.answer_tokens
        assert record.prompt_tokens == request.prompt_tokens
        assert record.lateness_ms is not None
        assert record.lateness_ms >= 0
        assert record.ttft_ms == pytest.approx(record.lateness_ms + record.ttft_from_launch_ms)
        assert record.end_to_end_ms >= record.ttft_ms
        assert len(record.token_gaps_ms) == WORKLOAD.answer_tokens - 1
    later = [record for record in result.records["kvbm"] if record.turn == 2]
    assert all(record.g2_tokens > 400 and record.g1_tokens == 16 and record.computed_tokens < 50 for record in later)
    assert 0 < result.client_cpu_share < 2


def test_launches_follow_the_schedule_and_never_wait_for_an_answer():
    plan = make_plan(SHORT, interval_s=0.03)
    _, result = drive_mock(Options(faults={0: "stall"}), plan=plan)
    assert result.records["kvbm"][0].error == "no complete answer within 0.5 s"
    for record, request in zip(result.records["kvbm"], plan.requests, strict=True):
        assert record.launched_ms >= request.intended_s * 1e3
        assert record.launched_ms < 500
    assert all(record.is_ok for record in result.records["kvbm"][1:])


def test_arms_are_launched_one_offset_after_the_other_and_fail_alone():
    """One engine ends; the other answers everything, at its own times."""
    plan = make_plan(interval_s=0.1)
    seen: list[RequestRecord] = []
    with MockEngine(Options(faults={1: "end"})) as first, MockEngine(Options()) as second:
        targets = [
            Target("first", first.base_url, 0.0, first.has_ended),
            Target("second", second.base_url, 0.05, second.has_ended),
        ]
        result = asyncio.run(drive(plan, targets, on_record=seen.append))
    assert [record.index for record in result.records["second"]] == list(range(6))
    assert all(record.is_ok for record in result.records["second"])
    assert [record.is_ok for record in result.records["first"]][:2] == [True, False]
    assert len(result.records["first"]) == 6
    for record in result.records["second"]:
        assert record.intended_ms == plan.requests[record.index].intended_s * 1e3
    ends = [(record.arm, record.index) for record in seen if record.index == 0]
    assert ends == [("first", 0), ("second", 0)]


def test_queueing_counts_into_the_time_to_first_token():
    """Open loop: when six requests arrive at once, the last one waits for all others."""
    _, result = drive_mock(Options(base_ms=30.0, computed_token_ms=0.0), plan=make_plan(interval_s=0.001))
    assert result.records["kvbm"][-1].ttft_ms > 150


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("http_400", 'HTTP 400: {"error": {"message": "asked for"}}'),
        ("http_503", 'HTTP 503: {"error": {"message": "asked for"}}'),
        ("error_event", "error in the stream: {'message': 'asked for'}"),
        ("short", "the answer has 3 tokens instead of 6"),
        ("miscount", "the engine counted 449 prompt tokens instead of 448"),
    ],
)
def test_a_failure_is_a_record_with_the_reason(fault, error):
    record = first_record(fault)
    assert record.error == error
    assert record.to_json()["status"] == "error"
    assert record.end_ms is not None


def test_a_connection_that_breaks_off_is_an_error():
    assert "ClientPayloadError" in (first_record("break_off").error or "")


def test_a_stalled_answer_ends_at_the_time_limit():
    record = first_record("stall", SHORT)
    assert record.error == "no complete answer within 0.5 s"
    assert record.ttft_ms is None


def test_a_missing_usage_leaves_the_sources_unknown():
    record = first_record("no_usage")
    assert record.error is None
    assert (record.prompt_tokens, record.g1_tokens, record.g2_tokens, record.computed_tokens) == (
        None,
        None,
        None,
        None,
    )


def test_events_of_several_tokens_share_the_time_since_the_last_one():
    record = first_record("multi_token")
    assert record.error is None
    assert len(record.token_ids) == 6
    assert len(record.token_gaps_ms) == 3
    assert len(set(record.token_gaps_ms)) == 1


def test_events_cut_inside_a_character_are_put_together():
    record = first_record("split_utf8")
    assert record.error is None
    assert len(record.token_gaps_ms) == 5


def test_a_refused_connection_is_an_error_record():
    with MockEngine(Options()) as engine:
        address = engine.base_url
    plan = make_plan()
    target = Target("kvbm", address, 0.0, lambda: False)
    result = asyncio.run(drive(plan, [target], on_record=lambda record: None))
    assert all("Connect" in (record.error or "") for record in result.records["kvbm"])


def test_requests_left_when_the_engine_ends_become_errors_at_once():
    plan = make_plan(interval_s=2.0)
    _, result = drive_mock(Options(faults={1: "end"}), plan=plan)
    assert result.records["kvbm"][0].is_ok
    assert [record.error for record in result.records["kvbm"][2:]] == ["the engine ended"] * 4
    assert result.duration_s < plan.duration_s / 2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_splitting_does_not_depend_on_where_reads_end(size):
    stream = (
        'data: {"text": "€"}\n\n: comment\n\ndata: a\r\ndata: b\r\n\r\nevent: x\ndata:c\n\ndata: [DONE]\n\n'.encode()
    )
    splitter = EventSplitter()
    payloads = [one for start in range(0, len(stream), size) for one in splitter.feed(stream[start : start + size])]
    assert payloads == ['{"text": "€"}'.encode(), b"a\nb", b"c", b"[DONE]"]
    assert json.loads(payloads[0]) == {"text": "€"}
