import json

import pytest

from kvbm_cli.bench.load.events import LARGEST_EVENT_BYTES, LARGEST_UNPARSED_BYTES, EventSplitter, StreamedAnswer
from kvbm_cli.bench.result.results import RequestRecord


def read_answer(*events: object, end: bytes = b"data: [DONE]\n\n", asks_tiers: bool = False) -> RequestRecord:
    """The record of an answer of which event number i arrives after i + 1 ms."""
    record = RequestRecord("run", "arm", "cell", 1, 0, 0, 1, "cold")
    answer = StreamedAnswer(record, start_ns=0, asks_tiers=asks_tiers)
    for number, event in enumerate(events):
        answer.take((number + 1) * 1_000_000, b"data: " + json.dumps(event).encode() + b"\n\n")
    if end:
        answer.take((len(events) + 1) * 1_000_000, end)
    answer.finish()
    assert answer.is_done == bool(end)
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
USAGE = {"input_tokens": 20, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 16}}


def read_response(status: str, **fields: object) -> RequestRecord:
    record = RequestRecord("run", "arm", "cell", 1, 0, 0, 1, "cold")
    answer = StreamedAnswer(record, start_ns=0)
    end = {"type": f"response.{status}", "response": {"status": status, "usage": USAGE, **fields}}
    for number, event in enumerate([*RESPONSE, end]):
        data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
        answer.take((number + 1) * 1_000_000, data.encode())
    answer.finish()
    assert answer.is_done
    return record


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_a_response_has_its_text_its_counts_and_its_end(status):
    record = read_response(status)
    assert (record.text, record.finish_reason, record.error) == ("ab", status, None)
    assert (record.first_token_ms, record.first_text_ms, record.last_token_ms, record.end_ms) == (2.0, 3.0, 4.0, 6.0)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (20, 16, 3)


def test_a_failed_response_is_an_error():
    assert "no room" in read_response("failed", error={"message": "no room"}).error


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_splitting_does_not_depend_on_where_reads_end(size):
    stream = (
        'data: {"text": "€"}\n\n: comment\n\ndata: a\r\ndata: b\r\n\r\nevent: x\ndata:c\n\n\ndata: [DONE]\n\n'.encode()
    )
    splitter = EventSplitter()
    payloads = [one for start in range(0, len(stream), size) for one in splitter.feed(stream[start : start + size])]
    assert payloads == ['{"text": "€"}'.encode(), b"a\nb", b"c", b"[DONE]"]


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n", b"data: [DONE]\r\n\r\n"])
def test_an_end_mark_counts_without_the_empty_line_after_it(end):
    assert read_answer(completion("a"), end=end).end_ms == 2.0


def test_roles_and_empty_deltas_are_no_tokens():
    record = read_answer(chat(role="assistant", content=""), chat(content="a"), chat(content=""), chat(content="b"))
    assert (record.first_token_ms, record.first_text_ms, record.last_token_ms) == (2.0, 2.0, 4.0)
    assert record.token_gaps_ms == [2.0]
    assert record.text == "ab"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_a_first_token_but_no_first_text(key):
    record = read_answer(chat(**{key: "hm"}), chat(**{key: "so"}), chat(content="yes"))
    assert (record.first_token_ms, record.first_text_ms) == (1.0, 3.0)
    assert record.token_gaps_ms == [1.0, 1.0]
    assert record.text == "yes"


def test_an_answer_that_only_reasons_has_no_first_text():
    record = read_answer(chat(reasoning="hm"))
    assert (record.first_token_ms, record.first_text_ms) == (1.0, None)


def test_a_tool_call_is_a_token():
    assert read_answer(chat(tool_calls=[{"index": 0}])).first_token_ms == 1.0


def test_token_ids_count_tokens_whose_text_is_not_complete():
    record = read_answer(
        completion("", token_ids=[7]), completion("€", token_ids=[8, 9]), completion("!", token_ids=[])
    )
    assert record.token_ids == [7, 8, 9]
    assert (record.first_token_ms, record.first_text_ms, record.last_token_ms) == (1.0, 2.0, 2.0)
    assert (record.first_chunk_tokens, record.token_gaps_ms) == (1, [0.5, 0.5])
    assert (record.output_tokens, record.text) == (3, "")


def test_logprobs_count_tokens_where_there_are_no_ids():
    def of_completion(count: int) -> dict[str, object]:
        return completion("ab", logprobs={"token_logprobs": [-0.5] * count})

    record = read_answer(of_completion(2), of_completion(4))
    assert (record.first_chunk_tokens, record.token_gaps_ms) == (2, [0.25] * 4)
    assert record.logprobs == [-0.5] * 6
    of_chat = {"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -2}]}}]}
    record = read_answer(of_chat)
    assert (record.logprobs, record.first_chunk_tokens) == ([-0.1, -2], 2)


def test_without_ids_and_logprobs_the_usage_corrects_the_total():
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
    record = read_answer(completion("ab"), completion("cde", finish_reason="stop"), usage)
    assert (record.output_tokens, record.first_chunk_tokens, record.token_gaps_ms) == (5, 1, [1.0])
    assert record.tpot_ms == 0.25
    assert (record.text, record.finish_reason, record.prompt_tokens) == ("abcde", "stop", 9)


def test_counts_stay_unknown_without_usage():
    record = read_answer(completion("ab"))
    counts = (
        record.prompt_tokens,
        record.output_tokens,
        record.cached_tokens,
        record.g1_tokens,
        record.computed_tokens,
    )
    assert counts == (None,) * 5


def test_cached_tokens_are_split_by_tier_where_the_engine_says_so():
    details = {"cached_tokens": 48, "cached_tokens_by_tier": {"device": 16, "host": 20, "disk": 8, "shared": 4}}
    usage = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": details}
    record = read_answer(completion("a"), {"choices": [], "usage": usage})
    by_tier = (record.g1_tokens, record.g2_tokens, record.g3_tokens, record.g4_tokens)
    assert (record.cached_tokens, by_tier) == (48, (16, 20, 8, 4))
    assert record.computed_tokens == 16
    del details["cached_tokens_by_tier"]
    record = read_answer(completion("a"), {"choices": [], "usage": usage})
    assert (record.cached_tokens, record.g1_tokens, record.g2_tokens, record.g3_tokens) == (48, None, None, None)


def test_cached_tokens_of_sglang_are_split_by_tier_if_the_request_asks_for_it():
    """SGLang 0.5.23 sends them in an event of its own, and only if there are any."""

    def read(cached, *events):
        details = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
        record = read_answer(completion("a"), *events, {"choices": [], "usage": details}, asks_tiers=True)
        return (record.g1_tokens, record.g2_tokens, record.g3_tokens, record.g4_tokens)

    tiers = {"device": 16, "host": 20, "storage": 12, "storage_backend": "KvbmHiCacheStorage"}
    event = {"choices": [], "sglext": {"routed_experts": None, "cached_tokens_details": tiers}}
    assert read(48, event) == (16, 20, 12, 0)
    assert read(0) == (0, 0, 0, 0)
    assert read(48) == (None,) * 4


def test_the_first_error_of_a_stream_is_kept():
    record = read_answer(completion("a"), {"error": {"message": "out of memory"}}, {"error": "then this"})
    assert record.error == "error in the stream: {'message': 'out of memory'}"


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
