"""The mock OpenAI server behaves as its options say; the tests of the load client rest on it."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

import pytest
from openai_mock import Answer, OpenAIMock, answer_tokens


def post(mock: OpenAIMock, path: str, body: dict[str, Any], timeout: float = 5) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(mock.url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def events(data: bytes) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in data.decode().split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def test_completion_streams_the_known_tokens_at_the_known_times() -> None:
    body = {"prompt": "a b c", "max_tokens": 6, "return_token_ids": True, "logprobs": 0, **STREAM}
    with OpenAIMock(Answer(first_ms=20, token_ms=5, cached_tokens=2)) as mock:
        launched = time.monotonic()
        status, data = post(mock, "/v1/completions", body)
    *tokens, usage = events(data)
    assert status == 200
    assert [event["choices"][0]["token_ids"] for event in tokens] == [[n] for n in answer_tokens(["a", "b", "c"], 6)]
    assert tokens[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    (arrival,) = mock.arrivals
    assert launched <= arrival.first_byte_s <= arrival.complete_s
    assert arrival.first_write_s is not None
    assert arrival.first_write_s - arrival.complete_s >= 0.020
    assert arrival.token_writes_s[-1] - arrival.complete_s >= 0.045
    assert len(arrival.token_writes_s) == 6


def test_chunks_of_several_tokens_share_their_time_and_writes_can_be_joined() -> None:
    answer = Answer(first_chunk_tokens=2, tokens_per_chunk=3, chunks_per_write=2)
    with OpenAIMock(answer) as mock:
        _, data = post(mock, "/v1/completions", {"prompt": [1, 2], "max_tokens": 9, "return_token_ids": True, **STREAM})
    assert [len(event["choices"][0]["token_ids"]) for event in events(data)[:-1]] == [2, 3, 3, 1]
    first, second, third, fourth = mock.arrivals[0].token_writes_s
    assert first == second < third == fourth


def test_chat_sends_reasoning_before_text() -> None:
    body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4, "logprobs": True, **STREAM}
    with OpenAIMock(Answer(reasoning_tokens=2)) as mock:
        _, data = post(mock, "/v1/chat/completions", body)
        body["stream"] = False
        _, whole = post(mock, "/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events(data)[:-1]]
    assert [sorted(delta) for delta in deltas] == [
        ["content", "role"],
        *[["reasoning_content"]] * 2,
        *[["content"]] * 2,
    ]
    message = json.loads(whole)["choices"][0]["message"]
    assert message["content"] == "".join(delta.get("content", "") for delta in deltas)


def test_split_characters_arrive_whole() -> None:
    with OpenAIMock(Answer(split_utf8=True)) as mock:
        _, data = post(mock, "/v1/completions", {"prompt": "a", "max_tokens": 3, **STREAM})
    assert "".join(event["choices"][0]["text"] for event in events(data)[:-1]) == "€€€"


def test_faults_happen_to_their_request_only() -> None:
    body = {"prompt": "a", "max_tokens": 4, **STREAM}
    faults = {
        0: Answer(status=503),
        1: Answer(cut_after=2),
        2: Answer(error_event_after=1),
        3: Answer(sends_usage=False),
        4: Answer(stall_after=1),
    }
    with OpenAIMock(by_number=faults) as mock:
        assert post(mock, "/v1/completions", body)[0] == 503
        with pytest.raises(http.client.IncompleteRead) as cut:
            post(mock, "/v1/completions", body)
        assert cut.value.partial.count(b"data: ") == 2
        assert "error" in events(post(mock, "/v1/completions", body)[1])[1]
        assert len(events(post(mock, "/v1/completions", body)[1])) == 4
        with pytest.raises(TimeoutError):
            post(mock, "/v1/completions", body, timeout=0.2)
        assert len(events(post(mock, "/v1/completions", body)[1])) == 5
    assert [len(arrival.token_writes_s) for arrival in mock.arrivals] == [0, 2, 1, 4, 1, 4]
