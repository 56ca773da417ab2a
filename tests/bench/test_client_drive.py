import asyncio
import threading
import time

import pytest
from client_rig import drive_plan, open_loop, plan_of, planned, target_of
from openai_mock import Answer, OpenAIMock

from kvbm_cli.bench.load import launcher
from kvbm_cli.bench.load.drive import drive
from kvbm_cli.bench.load.launcher import encoding_starts
from kvbm_cli.bench.workload.plan import PlannedRequest

LATE_MS = 150.0


def are_in_time(late_ms) -> bool:
    """None is early, and three quarters are in time: a busy machine makes some late, a wrong client all or most."""
    ordered = sorted(late_ms)
    return ordered[0] >= 0 and ordered[len(ordered) * 3 // 4 - 1] < LATE_MS


def session_plan(sessions: int, turns: int, **launches):
    """Sessions of turns that follow on each other."""
    requests = [
        planned(index, session=index // turns, turn=index % turns + 1, after=(index - 1,) if index % turns else ())
        for index in range(sessions * turns)
    ]
    return plan_of(requests, **launches)


def in_flight_at_most(records, key):
    """The largest number of different keys in flight at one time."""
    spans = {}
    for record in records:
        start, end = spans.get(key(record), (float("inf"), 0.0))
        spans[key(record)] = (min(start, record.launched_ms), max(end, record.end_ms))
    return max(sum(start <= at < end for start, end in spans.values()) for at, _ in spans.values())


def test_a_slow_server_does_not_slow_down_an_open_loop():
    """Launches stay on schedule; all queueing counts into the time to first token."""
    plan = open_loop(20, 0.02)
    result, records, _ = drive_plan(plan, Answer(first_ms=1500))
    for record, request in zip(records, plan.requests, strict=True):
        assert record.error is None
        assert record.intended_ms == pytest.approx(request.intended_s * 1e3)
    assert are_in_time(record.lateness_ms for record in records)
    assert records[-1].launched_ms < min(record.first_token_ms for record in records)
    assert 1.88 <= result.duration_s < 15, "30 s one after the other"


def test_a_stalled_request_delays_no_other():
    plan = plan_of([planned(index, intended_s=index * 0.03) for index in range(6)], timeout_s=2.0, interval_s=0.03)
    _, records, _ = drive_plan(plan, by_number={0: Answer(stall_after=0)})
    assert records[0].error == "no complete answer within 2 s"
    assert all(record.is_ok and record.end_ms < records[0].end_ms for record in records[1:])


def test_the_start_is_the_same_moment_in_all_clocks():
    before_unix_s, before_ns = time.time(), time.perf_counter_ns()
    result, records, mock = drive_plan(open_loop(2, 0.01))
    assert result.started_unix_s - before_unix_s == pytest.approx((result.start_ns - before_ns) / 1e9, abs=0.5)
    arrived_ms = (mock.arrivals[0].complete_s - result.start_ns / 1e9) * 1e3
    assert records[0].launched_ms <= arrived_ms < records[0].first_token_ms
    assert result.duration_s == pytest.approx(records[-1].end_ms / 1e3, abs=2.0)


def test_a_closed_loop_keeps_its_number_of_sessions_in_flight():
    plan = session_plan(6, 3, concurrency=2)
    _, records, _ = drive_plan(plan, Answer(first_ms=10))
    assert in_flight_at_most(records, lambda record: record.session) == 2
    assert all(record.is_ok for record in records)
    for record in records:
        if record.turn > 1:
            assert record.intended_ms == records[record.index - 1].end_ms
    assert are_in_time(record.lateness_ms for record in records)
    firsts = [record.intended_ms for record in records if record.turn == 1]
    assert firsts[:2] == [0.0, 0.0]
    assert firsts == sorted(firsts), "sessions start in the order of the plan"
    session_ends = [records[session * 3 + 2].end_ms for session in range(6)]
    assert all(start in session_ends for start in firsts[2:])


def test_think_time_counts_from_the_end_of_the_last_answer():
    requests = [planned(0), planned(1, session=0, turn=2, after=(0,), delay_s=0.2)]
    _, records, _ = drive_plan(plan_of(requests, concurrency=1))
    assert records[1].intended_ms == pytest.approx(records[0].end_ms + 200)
    assert records[1].lateness_ms >= 0


def test_a_request_awaits_all_others_and_its_time():
    """0 -> 1, 2 (parallel) -> 3; request 4 has a time of its own that is later."""
    requests = [
        planned(0, intended_s=0.05),
        planned(1, session=0, turn=2, after=(0,)),
        planned(2, session=0, turn=3, after=(0,), delay_s=0.1),
        planned(3, session=0, turn=4, after=(1, 2)),
        planned(4, session=0, turn=5, after=(0,), intended_s=0.4),
    ]
    _, records, _ = drive_plan(plan_of(requests))
    assert records[0].intended_ms == 50
    assert records[1].intended_ms == records[0].end_ms
    assert records[2].intended_ms == pytest.approx(records[0].end_ms + 100)
    assert records[3].intended_ms == max(records[1].end_ms, records[2].end_ms)
    assert records[4].intended_ms == max(400, records[0].end_ms)
    assert all(record.is_ok and record.lateness_ms >= 0 for record in records)


def test_a_request_is_sent_although_the_awaited_one_failed():
    requests = [planned(0), planned(1, session=0, turn=2, after=(0,))]
    _, records, _ = drive_plan(plan_of(requests, concurrency=1), by_number={0: Answer(status=500)})
    assert [record.is_ok for record in records] == [False, True]


def test_a_session_that_awaits_another_one_shares_its_slot():
    """An agent (0) waits for a helper (1) in the middle; each with a slot of its own would never end."""
    requests = [
        planned(0, session=0),
        planned(1, session=1, after=(0,)),
        planned(2, session=0, turn=2, after=(0, 1)),
        planned(3, session=2),
    ]
    _, records, _ = drive_plan(plan_of(requests, concurrency=1))
    assert [record.is_ok for record in records] == [True] * 4
    assert records[3].launched_ms >= records[2].end_ms


def test_the_duration_ends_new_launches_and_leaves_no_records():
    plan = session_plan(400, 3, concurrency=3, duration_s=0.4)
    _, records, mock = drive_plan(plan, Answer(first_ms=20))
    assert 3 <= len(records) < 100, "60 on an idle machine, 400 without an end"
    assert len(mock.arrivals) == len(records)
    assert all(record.is_ok for record in records)
    assert are_in_time(max(0.0, record.launched_ms - 400) for record in records)
    assert max(record.end_ms for record in records) > 400, "requests in flight at the end are completed"


def test_targets_run_one_offset_apart_and_fail_alone():
    plan = open_loop(4, 0.1)
    over = threading.Event()
    with OpenAIMock() as first, OpenAIMock() as second:
        targets = [
            target_of(first.url, "cell.1.first", has_ended=over.is_set),
            target_of(second.url, "cell.1.second", offset_s=0.05),
        ]

        def take(record):
            if record.arm == "first":
                over.set()

        result = asyncio.run(drive(plan, targets, on_record=take))
    assert list(result.records) == ["cell.1.first", "cell.1.second"]
    assert [record.error for record in result.records["cell.1.second"]] == [None] * 4
    assert first.arrivals[0].complete_s >= result.start_ns / 1e9
    assert second.arrivals[0].complete_s >= result.start_ns / 1e9 + 0.05
    for record in result.records["cell.1.second"]:
        assert record.intended_ms == pytest.approx(plan.requests[record.index].intended_s * 1e3)
    errors = [record.error for record in result.records["cell.1.first"]]
    assert errors[0] is None
    assert errors[-1] == "the engine ended"


def test_an_engine_that_ends_fails_its_open_requests_at_once():
    over = threading.Event()
    plan = plan_of([planned(0, intended_s=0.0), planned(1, intended_s=0.1), planned(2, intended_s=30.0)], interval_s=1)
    with OpenAIMock(Answer(stall_after=1), by_number={0: Answer()}) as mock:
        target = target_of(mock.url, has_ended=over.is_set)
        timer = threading.Timer(5.0, over.set)  # after the first answer, also on a busy machine
        timer.start()
        result = asyncio.run(drive(plan, [target], on_record=lambda record: None))
    records = result.records[target.run]
    assert [record.error for record in records] == [None, "the engine ended", "the engine ended"]
    assert records[1].launched_ms is not None
    assert records[2].launched_ms is None
    assert result.duration_s < 20


def test_an_exception_of_the_receiver_ends_the_drive():
    def fail(record):
        raise OSError("disk full")

    with OpenAIMock() as mock, pytest.raises(OSError, match="disk full"):
        asyncio.run(drive(open_loop(3, 0.1), [target_of(mock.url)], on_record=fail))


def test_bodies_of_simultaneous_requests_are_encoded_one_after_the_other_before_their_time():
    requests = [planned(index, intended_s=1.0, prompt_tokens=100_000) for index in range(10)]
    starts = [encoding_starts(requests)[index] for index in range(10)]
    assert starts == sorted(starts)
    assert starts[0] == pytest.approx(1.0 - 10 * 0.03)
    assert encoding_starts([planned(0)]) == {}


def test_bodies_are_encoded_shortly_before_the_launch(monkeypatch):
    encoded_s = {}
    original = PlannedRequest.encode

    def encode(request):
        encoded_s[request.index] = time.perf_counter()
        return original(request)

    monkeypatch.setattr(PlannedRequest, "encode", encode)
    after = planned(4, session=3, turn=2, after=(3,))
    plan = plan_of([*(planned(index, intended_s=index * 0.3) for index in range(4)), after])
    result, records, _ = drive_plan(plan, Answer(first_ms=100))
    early_ms = [record.launched_ms - (encoded_s[record.index] - result.start_ns / 1e9) * 1e3 for record in records[:4]]
    assert min(early_ms) > 0
    assert are_in_time(max(0.0, early - launcher.ENCODE_AHEAD_S * 1e3) for early in early_ms)
    encoded_ms = (encoded_s[4] - result.start_ns / 1e9) * 1e3
    assert records[3].launched_ms < encoded_ms < records[3].end_ms, "while its predecessor was in flight"


def test_health_shows_a_client_that_was_too_slow():
    quiet, records, _ = drive_plan(open_loop(20, 0.02))
    health = quiet.health
    assert health.workers == 1
    assert 0 < health.cpu_share < 1
    assert 0 <= health.loop_lag_p50_ms <= health.loop_lag_p99_ms <= health.loop_lag_max_ms
    lateness = sorted(record.lateness_ms for record in records)
    assert lateness[0] <= health.lateness_p50_ms <= health.lateness_p99_ms <= lateness[-1] + 1e-3
    assert health.garbage_objects < 50 * len(records)  # a connection leaves some ten, and the mock's are counted too
    assert health.to_json()["workers"] == 1

    busy_seen = []
    with OpenAIMock() as mock:

        def slow(record):
            busy_seen.append(record)
            time.sleep(0.05)

        busy = asyncio.run(drive(open_loop(20, 0.02), [target_of(mock.url)], on_record=slow)).health
    assert busy.lateness_p99_ms > 100
    assert busy.loop_lag_max_ms > 40
