"""The faithful driver against a recording server: what it sends and records, and what the file leaves out."""

import asyncio
import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from openai_mock import Answer, OpenAIMock, prompt_of
from terminal import assert_said, given_in

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.bench.lmbenchmark.agentic import read_agent_trace
from kvbm_cli.bench.lmbenchmark.of_workload import run_faithful
from kvbm_cli.bench.lmbenchmark.presets import AgenticParameters, ShareGptParameters, preset
from kvbm_cli.bench.lmbenchmark.sharegpt import read_transcripts
from kvbm_cli.bench.load.request import Target

START_UP_REQUESTS = 10
USUAL = Answer(tokens=3)
AT_START_UP = dict.fromkeys(range(START_UP_REQUESTS), USUAL)
SMALL = replace(
    preset("lmbenchmark-short", sizes="as-shipped"),
    users=3,
    rounds=3,
    answer_tokens=4,
    qps=9.0,
    duration_s=1.3,
    warm_up_users=0,
)


def run(parameters, server, *, on_record=lambda record: None, **changes):
    target = Target("cell.1.kvbm", "kvbm", "cell", 1, server.url, **changes)
    return asyncio.run(run_faithful(parameters, target, model="m", on_record=on_record))


def rows_of(result):
    return list(csv.DictReader(result.csv.splitlines()))


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_multi_round_run_sends_live_history_and_records_every_request(is_chat):
    seen = []
    with OpenAIMock(USUAL) as server:
        result = run(replace(SMALL, is_chat=is_chat), server, on_record=seen.append)
    start_up, sent = server.arrivals[:START_UP_REQUESTS], server.arrivals[START_UP_REQUESTS:]
    assert {request.user for request in start_up} == {None}
    assert all(request.json["max_tokens"] == 100 for request in start_up)
    assert all(request.headers["authorization"] == "Bearer EMPTY" for request in server.arrivals)
    assert {request.path for request in sent} == {"/v1/chat/completions" if is_chat else "/v1/completions"}
    of_user = [request for request in sent if request.user == "5"]  # the user that joins at the first tick
    assert 2 <= len(of_user) <= 3, "the third round is sent within the time, except on a busy machine"
    first_answer = of_user[0].text
    second = of_user[1].json
    if is_chat:
        assert second["messages"][1] == {"role": "assistant", "content": first_answer}
    else:
        assert f"\nASSISTANT: {first_answer}\nUSER: Here's question #2: " in second["prompt"]

    assert len(result.records) == len(sent) == len(seen) == len(rows_of(result))
    assert [record.index for record in sorted(seen, key=lambda one: one.index)] == list(range(len(sent)))
    assert {(record.run, record.arm, record.cell, record.pair) for record in seen} == {
        ("cell.1.kvbm", "kvbm", "cell", 1)
    }
    assert all(record.is_ok and record.lateness_ms >= 0 for record in seen)
    assert result.notes == ()


def test_file_and_records_agree():
    with OpenAIMock(Answer(tokens=3, first_ms=50.0)) as server:
        result = run(SMALL, server)
    by_key = {(record.session, record.turn): record for record in result.records}
    rows = rows_of(result)
    assert len(rows) == len(by_key) > 1
    for row in rows:
        record = by_key[int(row["user_id"]), int(row["question_id"])]
        assert float(row["prompt_tokens"]) == record.prompt_tokens
        assert float(row["generation_tokens"]) == record.output_tokens == 3
        encoding_ms = float(row["ttft"]) * 1e3 - record.ttft_from_launch_ms  # LMBenchmark's launch time is before it
        assert encoding_ms >= 0
        assert float(row["launch_time"]) * 1e3 + encoding_ms == pytest.approx(
            result.started_unix_s * 1e3 + record.launched_ms, abs=0.01
        )
        assert float(row["ttft"]) > 0.05
        assert float(row["finish_time"]) - float(row["launch_time"]) == pytest.approx(
            float(row["ttft"]) + float(row["generation_time"]), abs=1e-6
        )


def test_warm_up_run_precedes_and_decides_the_phase():
    with OpenAIMock(USUAL) as server:
        cold = run(SMALL, server)
    with OpenAIMock(USUAL) as server:
        warm = run(replace(SMALL, duration_s=0.5, warm_up_users=4), server)
    assert {record.phase for record in cold.records} == {"cold", "steady"}
    first = min(warm.records, key=lambda record: record.index)
    assert (first.session, first.turn, first.phase) == (5, 1, "steady")  # the warm-up has sent users 3 to 6
    assert warm.warm_up_requests >= 4
    assert len(server.arrivals) == 2 * START_UP_REQUESTS + warm.warm_up_requests + len(warm.records)


def test_failed_requests_are_records_without_rows_and_are_not_repeated():
    refused = dict.fromkeys(range(START_UP_REQUESTS, 1000, 3), Answer(status=503))
    with OpenAIMock(USUAL, by_number=refused) as server:
        result = run(SMALL, server)
    failed = [record for record in result.records if not record.is_ok]
    assert len(server.arrivals) == START_UP_REQUESTS + len(result.records)
    assert len(failed) == sum(position in refused for position in range(len(server.arrivals)))
    assert all(record.error.startswith('HTTP 503: {"error": {"message": "requested by the test"') for record in failed)
    assert len(rows_of(result)) == len(result.records) - len(failed)
    assert f"{len(failed)} of {len(result.records)} requests failed" in result.notes[0]
    assert any(  # the session of a failed request continues
        later.session == one.session and later.turn == one.turn + 1 for one in failed for later in result.records
    )


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([b'{"choices":[{"text":" a"}]}'], "the answer ended after 1 chunks, without [DONE]"),
        ([b'{"error":{"message":"out of memory"}}'], "error in the stream: {'message': 'out of memory'}"),
        ([b"not JSON", b"[DONE]"], "unreadable answer: JSONDecodeError"),
    ],
)
def test_broken_answers_are_errors(events, error):
    with OpenAIMock(Answer(events=tuple(events)), by_number=AT_START_UP) as server:
        result = run(replace(SMALL, duration_s=0.2), server)
    assert result.records
    assert all(record.error.startswith(error) for record in result.records)
    assert rows_of(result) == []


def test_missing_usage_is_zero_and_causes_no_second_request():
    with OpenAIMock(Answer(tokens=3, sends_usage=False)) as server:
        result = run(SMALL, server)
    assert len(server.arrivals) == START_UP_REQUESTS + len(result.records)
    assert {row["prompt_tokens"] for row in rows_of(result)} == {"0.0"}
    assert {record.prompt_tokens for record in result.records} == {None}
    assert f"{len(result.records)} answers had no token counts" in result.notes[0]


def test_server_that_refuses_everything_ends_the_run_at_once():
    with (
        OpenAIMock(Answer(status=404)) as server,
        pytest.raises(EnvironmentProblem, match="none of the 10 requests of the warm-up: HTTP 404"),
    ):
        run(SMALL, server)
    assert len(server.arrivals) == START_UP_REQUESTS


def test_failure_of_the_writer_ends_the_run_as_it_is():
    def on_record(record):
        raise OSError("no space left")

    with OpenAIMock(USUAL) as server, pytest.raises(OSError, match="no space left"):
        run(SMALL, server, on_record=on_record)


def test_run_can_be_cancelled_while_answers_are_open():
    async def cancelled(url):
        target = Target("cell.1.kvbm", "kvbm", "cell", 1, url)
        running = asyncio.create_task(run_faithful(SMALL, target, model="m", on_record=lambda record: None))
        while len(server.arrivals) <= START_UP_REQUESTS:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running], timeout=60)
        assert running.cancelled()

    with OpenAIMock(Answer(stall_after=1), by_number=AT_START_UP) as server:
        asyncio.run(cancelled(server.url))


@pytest.mark.parametrize("key", [{"api_key": "secret"}, {"headers": {"Authorization": "Bearer secret"}}])
def test_address_may_end_with_v1_and_key_is_sent(key):
    parameters = replace(SMALL, duration_s=0.1)
    with OpenAIMock(USUAL) as server:
        target = Target("cell.1.kvbm", "kvbm", "cell", 1, server.url + "/v1", **key)
        asyncio.run(run_faithful(parameters, target, model="m", on_record=lambda record: None))
    assert {request.path for request in server.arrivals} == {"/v1/completions"}
    assert {request.headers["authorization"] for request in server.arrivals} == {"Bearer secret"}


def test_sharegpt_run_is_an_open_loop_over_prepared_transcripts(tmp_path):
    warm_up, main = tmp_path / "warmup.json", tmp_path / "run.json"
    warm_up.write_text(json.dumps([{"input": "one", "output_length": 4}, {"input": "two", "output_length": 5}]))
    transcripts = [{"input": f"{start}\nanswer\nnext", "output_length": 7} for start in ("one", "two", "three")]
    main.write_text(json.dumps([*transcripts, {"input": "one\nanswer\nnext\nanswer\nlast"}]))
    parameters = ShareGptParameters(str(main), str(warm_up), qps=20, pause_s=0.1)
    all_sent = Answer(tokens=3, after_arrivals=6)  # no launch waits for an answer
    with OpenAIMock(all_sent, by_number={0: USUAL, 1: USUAL}) as server:
        result = run(parameters, server)
    assert [request.json["prompt"] for request in server.arrivals][:2] == ["USER: 20.0 one", "USER: 20.0 two"]
    assert [request.json["max_tokens"] for request in server.arrivals] == [4, 5, 7, 7, 7, 1]
    assert {request.user for request in server.arrivals} == {None}
    records = sorted(result.records, key=lambda record: record.index)
    assert [(record.session, record.turn, record.phase) for record in records] == [
        *((0, 2, "fill"), (1, 2, "fill"), (2, 1, "cold"), (0, 3, "steady"))
    ]
    assert [record.intended_ms for record in records] == [0.0, 50.0, 100.0, 150.0]
    assert [row["prompt_tokens"] for row in rows_of(result)] == [
        str(len(prompt_of(request.json))) for request in server.arrivals[2:]
    ]


def test_sharegpt_run_ends_at_the_time_limit(tmp_path):
    main = tmp_path / "run.json"
    main.write_text(json.dumps([{"input": str(number)} for number in range(50)]))
    with OpenAIMock(USUAL) as server:
        result = run(ShareGptParameters(str(main), qps=20, duration_s=0.32), server)
    assert 1 <= len(result.records) <= 7  # at 0, 50, ... 300 ms; fewer if the machine is busy


def test_agentic_run_fires_the_agents_of_a_round_together(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rounds = [
        {"round_id": 0, "agent_id": [0, 1], "output_tokens": [3, 4], "input_from": [[], [[0, 0, "input"]]]},
        {"round_id": 1, "agent_id": [0], "output_tokens": [5], "input_from": [[[0, 1, "both"], [0, 0, "output"]]]},
    ]
    trace.write_text("\n".join(map(json.dumps, rounds)))
    parameters = AgenticParameters((str(trace), str(trace)), request_interval_s=0.15, new_user_interval_s=0.05)
    with OpenAIMock(Answer(tokens=3, first_ms=400.0)) as server:
        result = run(parameters, server)
    first, _, third = [request for request in server.arrivals if request.user == "1"]
    names = [(message["role"], message["name"]) for message in third.json["messages"]]
    assert names == [
        *(("user", "agent1-0"), ("assistant", "agent1-0"), ("assistant", "agent0-0"), ("user", "agent0-1"))
    ]
    assert third.json["messages"][2]["content"] == first.text
    assert third.json["messages"][0]["content"] == "hihihihihi"
    records = sorted((record for record in result.records if record.session == 1), key=lambda one: one.index)
    assert [(record.turn, record.phase) for record in records] == [(1, "cold"), (2, "fill"), (3, "steady")]
    assert records[0].intended_ms == records[1].intended_ms, "one tick"
    assert max(record.end_ms for record in records[:2]) <= records[2].intended_ms
    assert len(result.records) == 6
    row = next(row for row in rows_of(result) if row["user_id"] == "1" and row["round_id"] == "1")
    assert row["input"] == str(third.json["messages"])


def test_agentic_run_ends_although_requests_fail(tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = {"round_id": 0, "agent_id": [0, 1], "output_tokens": [3, 4], "input_from": [[], []]}
    trace.write_text(json.dumps(line))
    parameters = AgenticParameters((str(trace),))
    with OpenAIMock(Answer(status=500), by_number={0: USUAL}) as server:
        result = run(parameters, server)
    assert sorted(record.is_ok for record in result.records) == [False, True]
    assert len(rows_of(result)) == 1


def test_a_run_without_its_file_sends_nothing(tmp_path):
    for parameters in (ShareGptParameters(f"{tmp_path}/none"), AgenticParameters((f"{tmp_path}/none",))):
        with OpenAIMock(USUAL) as server, pytest.raises(UsageError, match="none` does not exist"):
            run(parameters, server)
        assert server.arrivals == []


READERS = {
    "bench/transcripts": lambda name: read_transcripts(None, name),
    "bench/agentic_traces": lambda name: read_agent_trace(Path(name)),
}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in READERS for name in given_in(file)])
def test_unreadable_files_are_refused(tmp_path, monkeypatch, file, name):
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(given_in(file)[name])
    with pytest.raises(UsageError) as caught:
        READERS[file]("run.json")
    assert_said(file, name, caught.value.message)
