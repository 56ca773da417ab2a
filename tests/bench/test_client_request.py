import asyncio
import json
import socket
from dataclasses import replace

import pytest
from client_rig import IDS, TEXT, TOKENS, drive_plan, open_loop, planned, target_of
from openai_mock import Answer, OpenAIMock, answer_tokens
from terminal import assert_said, given_in

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
            first = await send(session, target, request, timeout_s=timeout_s)
            return [first, await send(session, target, replace(request, prompt_tokens=None), timeout_s=60.0)]

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
    headers = {"X-Tenant": "a", "Authorization": "Bearer secret"}
    with OpenAIMock() as mock:
        target = target_of(mock.url + "/", headers=headers)

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


def test_a_chat_has_token_ids_or_its_text():
    record = record_of(Answer(), messages=CHAT)
    assert (record.error, len(record.token_ids)) == (None, TOKENS)
    record = record_of(Answer(sends_usage=False), dialect=TEXT, messages=CHAT)
    assert record.text == "".join(f" €{token}" for token in answer_tokens(CHAT[0]["content"].split(), TOKENS))
    assert (record.error, record.prompt_tokens, record.cached_tokens, record.computed_tokens) == (None, *[None] * 3)


def test_answers_of_the_wrong_length_are_errors_only_where_the_length_was_forced():
    assert record_of(Answer(tokens=3)).error == "the answer has 3 tokens instead of 6"
    assert record_of(Answer(tokens=3), dialect=TEXT).error is None
    assert record_of(Answer(tokens=0), dialect=TEXT).error == "the answer is empty"


def test_a_prompt_that_the_engine_counts_differently_is_an_error():
    assert record_of(Answer(), prompt_tokens=21).error == "the engine counted 20 prompt tokens instead of 21"


def test_a_server_that_ignores_the_wish_for_token_ids_is_named():
    record = record_of(Answer(events=(*[b'{"choices": [{"text": "a"}]}'] * TOKENS, b"[DONE]")))
    assert record.error == "the engine sent no token ids (it must support `return_token_ids`)"


def test_a_connection_that_stays_open_after_the_end_mark_is_no_failure():
    events = [b'{"choices": [{"text": "a", "token_ids": [%d]}]}' % token for token in range(TOKENS)]
    record = record_of(Answer(events=(*events, b"[DONE]"), stays_open=True), timeout_s=2.0, prompt_tokens=None)
    assert (record.error, record.end_ms < 2000) == (None, True)


@pytest.mark.parametrize(
    ("events", "stays_open", "error"),
    [
        ([b"<html>"], True, "no complete answer within 0.5 s"),
        ([b"<html>", b"[DONE]"], False, "unreadable answer: JSON"),
        ([b"[1]", b"[DONE]"], False, "unreadable answer: "),
    ],
)
def test_an_answer_that_is_not_json_is_an_error(events, stays_open, error):
    timeout_s = 0.5 if stays_open else 60.0
    record = record_of(Answer(events=tuple(events), stays_open=stays_open), timeout_s=timeout_s)
    assert record.error.startswith(error)


@pytest.mark.parametrize("answer", [{"error": "bad key: Bearer {key}"}, {"detail": "x" * 290 + "{key}"}])
def test_an_error_that_repeats_the_key_is_kept_without_it(answer, monkeypatch):
    key = "sk-secret-of-a-user"
    monkeypatch.setenv("KVBM_BENCH_API_KEY", key)
    text = json.dumps(answer).replace("{key}", key)
    for found in (error_text(f"HTTP 401: {text}"), error_text(text)):
        assert len(found) <= 300
        assert "sk-" not in found


def record_without_answer() -> RequestRecord:
    return RequestRecord("run", "arm", "cell", 1, 0, 0, 1, "cold")


def read_answer(stream: bytes) -> RequestRecord:
    """The record of an answer of which event number i arrives after i + 1 ms. The comment `: asks for tiers` in front
    is what the request has asked for."""
    record = record_without_answer()
    answer = StreamedAnswer(record, start_ns=0, asks_tiers=stream.startswith(b": asks for tiers\n"))
    events = stream.removeprefix(b": asks for tiers\n\n").split(b"\n\n")
    for number, event in enumerate(events, start=1):
        answer.take(number * 1_000_000, event + b"\n\n" if number < len(events) else event)
    answer.finish()
    assert answer.is_done
    return record


@pytest.mark.parametrize("name", given_in("bench/answers"))
def test_answer(name):
    """Streams as engines send them. SGLang 0.5.23 sends cached tokens by tier in an event of its own, if the request
    asks for it, and only if there are any."""
    record, blank = read_answer(given_in("bench/answers")[name].encode()), record_without_answer().to_json()
    found = {**record.to_json(), "tpot_ms": record.tpot_ms, "computed_tokens": record.computed_tokens}
    lines = [
        f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in found.items() if value != blank.get(key)
    ]
    assert_said("bench/answers", name, "\n".join(lines))


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n", b"data: [DONE]\r\n\r\n"])
def test_an_end_mark_may_have_any_line_end(end):
    assert read_answer(b'data: {"choices": [{"text": "a"}]}\n\n' + end).text == "a"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_splitting_does_not_depend_on_where_reads_end(size):
    stream = (
        'data: {"text": "€"}\n\n: comment\n\ndata: a\r\ndata: b\r\n\r\nevent: x\ndata:c\n\n\ndata: [DONE]\n\n'.encode()
    )
    splitter = EventSplitter()
    payloads = [one for start in range(0, len(stream), size) for one in splitter.feed(stream[start : start + size])]
    assert payloads == ['{"text": "€"}'.encode(), b"a\nb", b"c", b"[DONE]"]


def test_an_event_that_is_not_json_is_found_among_others():
    record = record_without_answer()
    answer = StreamedAnswer(record, start_ns=0)
    answer.take(1_000_000, b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choi\n\ndata: [DONE]\n\n')
    with pytest.raises(ValueError):
        answer.finish()
    assert record.text == "a"


def test_a_long_answer_is_parsed_in_parts():
    record = record_without_answer()
    answer = StreamedAnswer(record, start_ns=0)
    event = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
    for number in range(500):
        answer.take(number * 1_000_000, 2 * event)
    assert 1000 - LARGEST_UNPARSED_BYTES / len(event) - 2 < len(record.token_ids) < 1000
    answer.finish()
    assert len(record.token_ids) == 1000
    assert record.token_gaps_ms == [0.0, *[1.0, 0.0] * 499], "events that share a read share its time"


@pytest.mark.parametrize(
    ("choice", "usage", "message"),
    [
        ({}, {"prompt_tokens": "64"}, '`prompt_tokens` of `usage` must be a whole number, not "64"'),
        ({}, {"prompt_tokens": 64, "completion_tokens": -1}, "`completion_tokens` of `usage` must be a whole number"),
        ({}, {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 65}}, "65 cached tokens of 64 prompt"),
        ({"token_ids": [None]}, {}, "`token_ids` has a value that is not a whole number"),
        ({"logprobs": {"token_logprobs": [float("nan")]}}, {}, "a log-probability is not a finite number"),
        ({"logprobs": {"token_logprobs": [None]}}, {}, "a log-probability is not a finite number"),
    ],
)
def test_what_is_no_number_makes_an_answer_unreadable(choice, usage, message):
    events = {"choices": [{"text": "a", **choice}]}, {"choices": [], "usage": usage}
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]"
    with pytest.raises(ValueError, match=message):
        read_answer(stream.encode())


def test_an_event_without_an_end_is_a_failure_and_takes_no_memory_without_limit():
    splitter = EventSplitter()
    splitter.feed(b"x" * LARGEST_EVENT_BYTES)
    with pytest.raises(ValueError, match="an event is longer than"):
        splitter.feed(b"x")


EMPTY, A_TOKEN = b'data: {"choices": []}\n\n', b'data: {"choices": [{"text": "a"}]}\n\n'


def refused_after_s(*pieces: bytes, every_s: float) -> float | None:
    """Return when an answer of 10 tokens is refused that begins with all but the last piece, and repeats that one."""
    record = target_of("http://127.0.0.1:1").record_of(planned(dialect=TEXT))
    answer = StreamedAnswer(record, start_ns=0, answer_tokens=10)
    *first, repeated = pieces
    for count in range(round(600 / every_s)):
        try:
            answer.take(round(1e9 * (1 + count * every_s)), first[count] if count < len(first) else repeated)
        except ValueError:
            return count * every_s
    return None


@pytest.mark.parametrize(
    "pieces",
    [
        (EMPTY,),
        (A_TOKEN, EMPTY),
        (A_TOKEN,),
        (b"data: ", b"x"),
        (b"data: ", b"x" * 4000),
        (A_TOKEN, b": still there\n\n"),
        (A_TOKEN, b"data: [DONE]\n\n", EMPTY),
        (A_TOKEN, b"data: [DONE]\n\n", b": still there\n\n"),
    ],
)
@pytest.mark.parametrize("every_s", [0.01, 0.3, 5.0])
def test_an_answer_without_an_end_is_refused_within_a_minute(pieces, every_s):
    refused_s = refused_after_s(*pieces, every_s=every_s)
    if pieces != (A_TOKEN,) or every_s < 1:  # one token every five seconds is slow, and may end
        assert refused_s is not None
        assert refused_s <= 60


def test_an_answer_that_is_slow_is_no_answer_without_an_end():
    assert refused_after_s(b": waits\n\n", every_s=1.0) is None, "it may wait for its turn"
    assert refused_after_s(EMPTY, *[b": waits\n\n"] * 300, A_TOKEN, every_s=1.0) == pytest.approx(421, abs=25)
    assert refused_after_s(EMPTY, *[A_TOKEN] * 11, A_TOKEN, every_s=50.0) is None


class EndlessServer(OpenAIMock):
    """Repeats one piece of an answer."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        super().__init__()
        self.head, self.piece = head, piece

    async def _respond(self, arrival, answer, connection):
        connection.write(self.head)
        while True:  # until the client has left
            if connection.unsent_bytes < 1 << 20:
                connection.write(self.piece)
            await asyncio.sleep(0)


CHUNKED = b"HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 x\r\n", b"X-More: 1\r\n"),
        (b"HTTP/1.1 200 x\r\nX-More: ", b"1" * 1000),
        (CHUNKED, b"400\r\n" + b"x" * 1024 + b"\r\n"),
        (CHUNKED, b"%x\r\n%s\r\n" % (100 * len(EMPTY), 100 * EMPTY)),
        (CHUNKED, b"%x\r\n%s\r\n" % (100 * len(A_TOKEN), 100 * A_TOKEN)),
        (CHUNKED + b"0\r\n", b"X-More: 1\r\n"),
    ],
    ids=["headers", "a header", "bytes", "events", "tokens", "trailers"],
)
def test_a_server_that_sends_without_end_is_left(head, piece):
    async def asked(base_url: str) -> RequestRecord:
        async with open_session() as session:
            return await send(session, target_of(base_url), planned(), timeout_s=120.0)

    with EndlessServer(head, piece) as server:
        record = asyncio.run(asked(server.url))
    assert record.error is not None
    assert "within 120 s" not in record.error
