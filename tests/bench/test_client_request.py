import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import pytest
from client_rig import IDS, TEXT, TOKENS, drive_plan, open_loop, planned, target_of
from fake_server import FakeServer
from openai_mock import Answer, OpenAIMock, answer_tokens
from terminal import assert_entry

from kvbm_cli.bench.load.control import error_text
from kvbm_cli.bench.load.request import (
    LARGEST_EVENT_BYTES,
    LARGEST_UNPARSED_BYTES,
    EventSplitter,
    StreamedAnswer,
    open_session,
    send,
)
from kvbm_cli.bench.result.results import RequestRecord

CHAT = [{"role": "user", "content": "five words of a user"}]


def record_of(answer: Answer, *, timeout_s: float = 5.0, target_changes=None, **changes) -> RequestRecord:
    """The record of a request that gets this answer. One that follows on the same session must not be disturbed."""
    request = planned(**changes)

    async def twice(base_url: str) -> list[RequestRecord]:
        target = target_of(base_url, **(target_changes or {}))
        async with open_session() as session:
            return [
                await send(session, target, one, timeout_s=timeout_s)
                for one in (request, replace(request, prompt_tokens=None))
            ]

    with OpenAIMock(answer, by_number={1: Answer()}) as mock:
        record, following = asyncio.run(twice(mock.url))
    assert following.error is None
    assert len(mock.arrivals) == 2, "a request was sent twice"
    return record


def test_a_record_agrees_with_the_stamps_of_the_server():
    _, records, mock = drive_plan(open_loop(5, 0.05), Answer(first_ms=20, token_ms=4, cached_tokens=16))
    added_ms = []
    for record, arrival in zip(records, mock.arrivals, strict=True):
        assert record.error is None
        assert record.http_status == 200
        assert record.token_ids == arrival.token_ids
        assert record.logprobs == [-0.5] * TOKENS
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens, record.computed_tokens) == (
            20,
            TOKENS,
            16,
            4,
        )
        assert record.finish_reason == "length"
        added_ms.append(record.ttft_from_launch_ms - (arrival.first_write_s - arrival.first_byte_s) * 1e3)
        assert record.ttft_ms == pytest.approx(record.lateness_ms + record.ttft_from_launch_ms)
        assert record.end_ms >= record.last_token_ms >= record.first_token_ms == record.first_text_ms
        assert sum(record.token_gaps_ms) == pytest.approx(record.last_token_ms - record.first_token_ms, abs=0.01)
        assert len(record.token_gaps_ms) == TOKENS - 1
    assert 0 <= min(added_ms) < 150, "a busy machine stops the client for longer, but not in all five requests"


def test_connections_are_kept_and_bodies_and_headers_arrive():
    headers = {"X-Tenant": "a"}
    with OpenAIMock() as mock:
        target = target_of(mock.url + "/", headers=headers, api_key="secret")

        async def thrice() -> None:
            async with open_session() as session:
                for index in range(3):
                    await send(session, target, planned(index), timeout_s=5)

        asyncio.run(thrice())
    assert [arrival.connection for arrival in mock.arrivals] == [1, 1, 1]
    for index, arrival in enumerate(mock.arrivals):
        assert arrival.json == {"prompt": list(range(index, index + 20)), **IDS.fields(TOKENS)}
        assert arrival.headers["x-request-id"] == f"cell.1.kvbm-{index}"
        assert arrival.headers["authorization"] == "Bearer secret"
        assert arrival.headers["x-tenant"] == "a"
        assert arrival.headers["accept-encoding"] == "identity"
    assert "secret" not in repr(target)


def test_a_body_of_megabytes_arrives_in_one_piece():
    prompt = tuple(range(1_000_000, 1_150_000))
    record = record_of(Answer(), parts=(prompt,), prompt_tokens=len(prompt))
    assert record.error is None
    assert record.prompt_tokens == 150_000


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_http_error_is_a_record_with_the_answer(status):
    record = record_of(Answer(status=status))
    assert record.error.startswith(f"HTTP {status}: ")
    assert "requested by the test" in record.error
    assert record.http_status == status
    assert record.to_json()["status"] == "error"
    assert record.end_ms is not None
    assert record.ttft_ms is None


@pytest.mark.parametrize("stall_after", [0, 3])
def test_an_answer_that_stalls_ends_at_the_time_limit_with_the_tokens_so_far(stall_after):
    record = record_of(Answer(stall_after=stall_after), timeout_s=1.0)
    assert record.error == "no complete answer within 1 s"
    assert (len(record.token_ids), record.ttft_ms is not None) == (stall_after, stall_after > 0)
    assert record.end_ms >= 1000


@pytest.mark.parametrize("cut_after", [0, 3])
def test_a_connection_that_closes_early_is_an_error(cut_after):
    record = record_of(Answer(cut_after=cut_after))
    assert "ClientPayloadError" in record.error or record.error == f"the answer ended after {cut_after} tokens"
    assert len(record.token_ids) == cut_after


def test_an_error_event_is_an_error():
    record = record_of(Answer(error_event_after=2))
    assert record.error == "error in the stream: {'message': 'requested by the test', 'code': 500}"


def test_a_missing_usage_leaves_counts_unknown_and_sends_nothing_again():
    record = record_of(Answer(sends_usage=False))
    assert record.error is None
    assert (record.prompt_tokens, record.cached_tokens, record.computed_tokens) == (None, None, None)


def test_a_refused_connection_is_an_error_record():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def once() -> RequestRecord:
        async with open_session() as session:
            return await send(session, target_of(f"http://127.0.0.1:{port}"), planned(), timeout_s=5)

    record = asyncio.run(once())
    assert "Cannot connect" in record.error
    assert record.launched_ms is not None


def test_chunks_of_several_tokens_share_the_time_since_the_last_one():
    record = record_of(Answer(tokens_per_chunk=2, first_chunk_tokens=2))
    assert record.error is None
    assert (record.first_chunk_tokens, len(record.token_ids), len(record.token_gaps_ms)) == (2, 6, 4)
    assert record.token_gaps_ms[0] == record.token_gaps_ms[1]
    assert record.tpot_ms == pytest.approx((record.last_token_ms - record.first_token_ms) / 4)


def test_events_cut_inside_a_character_are_put_together():
    record = record_of(Answer(split_utf8=True, token_ms=5), dialect=TEXT)
    assert record.error is None
    assert record.text == "€" * TOKENS


def test_events_that_share_a_write_share_its_time():
    record = record_of(Answer(chunks_per_write=3))
    assert record.error is None
    assert sum(gap == 0 for gap in record.token_gaps_ms) >= 4


def test_a_chat_without_token_ids_keeps_its_text():
    record = record_of(Answer(reasoning_tokens=2, token_ms=30), dialect=TEXT, messages=CHAT)
    assert record.error is None
    assert record.text == "".join(f" w{token}" for token in answer_tokens(CHAT[0]["content"].split(), TOKENS)[2:])
    assert record.first_token_ms < record.first_text_ms
    assert (record.prompt_tokens, record.output_tokens) == (5, TOKENS)


def test_a_chat_with_token_ids_has_them():
    record = record_of(Answer(), messages=CHAT)
    assert record.error is None
    assert len(record.token_ids) == TOKENS


def test_answers_of_the_wrong_length_are_errors_only_where_the_length_was_forced():
    assert record_of(Answer(tokens=3)).error == "the answer has 3 tokens instead of 6"
    assert record_of(Answer(tokens=3), dialect=TEXT).error is None
    assert record_of(Answer(tokens=0), dialect=TEXT).error == "the answer is empty"


def test_a_prompt_that_the_engine_counts_differently_is_an_error():
    assert record_of(Answer(), prompt_tokens=21).error == "the engine counted 20 prompt tokens instead of 21"


class RawServer(FakeServer):
    body, stays_open = b"", False

    async def answer(self, request, connection):
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + self.body)
        if not self.stays_open:
            connection.close()


def raw_record(body: bytes, *, stays_open: bool = False, timeout_s: float = 60.0) -> RequestRecord:
    """The record of an answer of exactly these bytes."""

    async def once() -> RequestRecord:
        async with open_session() as session:
            return await send(session, target_of(server.url), planned(), timeout_s=timeout_s)

    with RawServer() as server:
        server.body, server.stays_open = body, stays_open
        return asyncio.run(once())


def test_a_server_that_ignores_the_wish_for_token_ids_is_named():
    events = b'data: {"choices": [{"text": "a"}]}\n\n' * TOKENS
    record = raw_record(events + b"data: [DONE]\n\n")
    assert record.error == "the engine sent no token ids (it must support `return_token_ids`)"


def test_a_connection_that_stays_open_after_the_end_mark_is_no_failure():
    events = b"".join(b'data: {"choices": [{"text": "a", "token_ids": [%d]}]}\n\n' % token for token in range(TOKENS))
    record = raw_record(events + b"data: [DONE]\n\n", stays_open=True, timeout_s=2.0)
    assert (record.error, record.end_ms < 2000) == (None, True)


def test_an_answer_that_is_not_json_is_an_error():
    unfinished = raw_record(b"data: <html>\n\n", stays_open=True, timeout_s=0.2)
    assert unfinished.error == "no complete answer within 0.2 s"
    assert raw_record(b"data: <html>\n\ndata: [DONE]\n\n").error.startswith("unreadable answer: JSON")
    assert raw_record(b"data: [1]\n\ndata: [DONE]\n\n").error.startswith("unreadable answer: ")


@pytest.mark.parametrize("answer", [{"error": "bad key: Bearer {key}"}, {"detail": "x" * 290 + "{key}"}])
def test_an_error_that_repeats_the_key_is_kept_without_it(answer, monkeypatch):
    key = "sk-secret-of-a-user"
    monkeypatch.setenv("KVBM_BENCH_API_KEY", key)
    text = json.dumps(answer).replace("{key}", key)
    for found in (error_text(f"HTTP 401: {text}"), error_text(text)):
        assert len(found) <= 300
        assert "sk-" not in found


def read_answer(*events: Any, end: bytes = b"data: [DONE]\n\n", asks_tiers: bool = False) -> RequestRecord:
    """The record of an answer of which event number i arrives after i + 1 ms. One that begins with events of
    `/v1/responses` ends with the last of them."""
    record = RequestRecord("run", "arm", "cell", 1, 0, 0, 1, "cold")
    answer = StreamedAnswer(record, start_ns=0, asks_tiers=asks_tiers)
    for number, event in enumerate(events):
        kind = f"event: {event['type']}\n" if "type" in event else ""
        answer.take((number + 1) * 1_000_000, f"{kind}data: {json.dumps(event)}\n\n".encode())
    if "type" not in events[0]:
        answer.take((len(events) + 1) * 1_000_000, end)
    answer.finish()
    assert answer.is_done
    return record


def completion(text: str = "", **fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, **fields}]}


def chat(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta}]}


RESPONSE = [
    {"type": "response.created", "response": {"status": "in_progress"}},
    {"type": "response.reasoning_text.delta", "delta": "hm"},
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.output_text.delta", "delta": "b"},
    {"type": "response.output_text.done", "text": "ab"},
]


def ended(status: str, **fields: object) -> dict[str, object]:
    usage = {"input_tokens": 20, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 16}}
    return {"type": f"response.{status}", "response": {"status": status, "usage": usage, **fields}}


def usage(prompt: int, answer: int, cached: int | None = None, **tiers: object) -> dict[str, object]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached, **tiers}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answer, **details}}


def with_logprobs(*values: float) -> dict[str, object]:
    return completion("ab", logprobs={"token_logprobs": values})


OF_A_CHAT = {"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -2}]}}]}
BY_TIER = {"cached_tokens_by_tier": {"device": 16, "host": 20, "disk": 8, "shared": 4}}
TIERS = {"device": 16, "host": 20, "storage": 12, "storage_backend": "KvbmHiCacheStorage"}
OF_SGLANG = {"choices": [], "sglext": {"routed_experts": None, "cached_tokens_details": TIERS}}


def of(*events: Any, **options: Any) -> tuple[Any, Any]:
    """The events of an answer, and the options of `read_answer`."""
    return events, options


ANSWERS = {
    "a completed response": of(*RESPONSE, ended("completed")),
    "an incomplete response": of(*RESPONSE, ended("incomplete")),
    "a failed response": of(*RESPONSE, ended("failed", error={"message": "no room"})),
    "an end mark without a line end": of(completion("a"), end=b"data: [DONE]"),
    "an end mark without an empty line": of(completion("a"), end=b"data: [DONE]\n"),
    "an end mark without a space": of(completion("a"), end=b"data:[DONE]\r\n"),
    "an end mark with line ends of HTTP": of(completion("a"), end=b"data: [DONE]\r\n\r\n"),
    "roles and empty deltas are no tokens": of(
        chat(role="assistant", content=""), chat(content="a"), chat(content=""), chat(content="b")
    ),
    "reasoning is a first token but no first text": of(chat(reasoning="hm"), chat(reasoning="so"), chat(content="yes")),
    "reasoning_content too": of(chat(reasoning_content="hm"), chat(reasoning_content="so"), chat(content="yes")),
    "an answer that only reasons has no first text": of(chat(reasoning="hm")),
    "a tool call is a token": of(chat(tool_calls=[{"index": 0}])),
    "ids count tokens whose text is not complete": of(
        completion("", token_ids=[7]), completion("€", token_ids=[8, 9]), completion("!", token_ids=[])
    ),
    "logprobs count tokens where there are no ids": of(with_logprobs(-0.5, -0.5), with_logprobs(*[-0.5] * 4)),
    "logprobs count tokens of a chat": of(OF_A_CHAT),
    "without both the usage corrects the total": of(
        completion("ab"), completion("cde", finish_reason="stop"), usage(9, 5)
    ),
    "counts stay unknown without usage": of(completion("ab")),
    "cached tokens are split by tier where the engine says so": of(completion("a"), usage(64, 1, 48, **BY_TIER)),
    "cached tokens are not split where the engine does not": of(completion("a"), usage(64, 1, 48)),
    # SGLang 0.5.23 sends them in an event of its own, if the request asks for it, and only if there are any.
    "cached tokens of SGLang are split by tier": of(completion("a"), OF_SGLANG, usage(64, 1, 48), asks_tiers=True),
    "no cached tokens of SGLang are none of each tier": of(completion("a"), usage(64, 1, 0), asks_tiers=True),
    "cached tokens of SGLang without the event": of(completion("a"), usage(64, 1, 48), asks_tiers=True),
    "the first error is kept": of(*(completion("a"), {"error": {"message": "out of memory"}}, {"error": "then this"})),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answer(name):
    events, options = ANSWERS[name]
    record, blank = read_answer(*events, **options), RequestRecord("run", "arm", "cell", 1, 0, 0, 1, "cold").to_json()
    found = {**record.to_json(), "tpot_ms": record.tpot_ms, "computed_tokens": record.computed_tokens}
    lines = [
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in found.items() if value != blank.get(key)
    ]
    assert_entry("bench/answers", name, "".join(lines), names=ANSWERS)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_splitting_does_not_depend_on_where_reads_end(size):
    stream = (
        'data: {"text": "€"}\n\n: comment\n\ndata: a\r\ndata: b\r\n\r\nevent: x\ndata:c\n\n\ndata: [DONE]\n\n'.encode()
    )
    splitter = EventSplitter()
    payloads = [one for start in range(0, len(stream), size) for one in splitter.feed(stream[start : start + size])]
    assert payloads == ['{"text": "€"}'.encode(), b"a\nb", b"c", b"[DONE]"]


def test_an_event_that_is_not_json_is_found_among_others():
    record = RequestRecord("run", "arm", "cell", 1, 0, 0, 1, "cold")
    answer = StreamedAnswer(record, start_ns=0)
    answer.take(1_000_000, b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choi\n\ndata: [DONE]\n\n')
    with pytest.raises(ValueError):
        answer.finish()
    assert record.text == "a"


def test_a_long_answer_is_parsed_in_parts():
    record = RequestRecord("run", "arm", "cell", 1, 0, 0, 1, "cold")
    answer = StreamedAnswer(record, start_ns=0)
    event = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
    for number in range(1000):
        answer.take(number * 1_000_000, event)
    assert 1000 - LARGEST_UNPARSED_BYTES / len(event) - 2 < len(record.token_ids) < 1000
    answer.finish()
    assert len(record.token_ids) == 1000
    assert record.token_gaps_ms == [1.0] * 999


@pytest.mark.parametrize(
    ("choice", "usage", "message"),
    [
        ({}, {"prompt_tokens": "64"}, "`prompt_tokens` of `usage` must be a whole number, not '64'"),
        ({}, {"prompt_tokens": 64, "completion_tokens": -1}, "`completion_tokens` of `usage` must be a whole number"),
        ({}, {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 65}}, "65 cached tokens of 64 prompt"),
        ({"token_ids": [None]}, {}, "`token_ids` has a value that is not a whole number"),
        ({"logprobs": {"token_logprobs": [float("nan")]}}, {}, "a log-probability is not a finite number"),
        ({"logprobs": {"token_logprobs": [None]}}, {}, "a log-probability is not a finite number"),
    ],
)
def test_what_is_no_number_makes_an_answer_unreadable(choice, usage, message):
    with pytest.raises(ValueError, match=message):
        read_answer(completion("a", **choice), {"choices": [], "usage": usage})


def test_an_event_without_an_end_is_a_failure_and_takes_no_memory_without_limit():
    splitter = EventSplitter()
    splitter.feed(b"x" * LARGEST_EVENT_BYTES)
    with pytest.raises(ValueError, match="an event is longer than"):
        splitter.feed(b"x")
