"""Traces in formats of others: recognised by their first line, read as if they were Mooncake's."""

import gzip
import json

import pytest

from kvbm.errors import ProfileError, UsageError
from kvbm_cli.bench.trace.analysis import analyse
from kvbm_cli.bench.trace.command import trace
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat, Turns
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, RecordedAnswer
from kvbm_cli.bench.workload.script import AnswerOf, TextWriter

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,7,1.2,ChatGPT,472,18,490,Conversation log
"""
BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 33, "output_length": 7, "turn": 1,
     "hash_ids": [4, 5, 6]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 61.114, "input_length": 40, "output_length": 9, "turn": 2,
     "hash_ids": [4, 5, 7]},
]  # fmt: skip

SHAREGPT = [
    {"id": "a_0", "conversations": [
        {"from": "system", "value": "Be short. "}, {"from": "human", "value": "What is a cache?"},
        {"from": "gpt", "value": "Memory that is fast."}, {"from": "human", "value": "And a miss?"},
        {"from": "gpt", "value": "Not there."}, {"from": "human", "value": "not answered"}]},
    {"id": "b_3", "items": [
        {"from": "gpt", "value": "the rest of an earlier answer"}, {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "So."}]},
]  # fmt: skip
MULTI_TURN = [
    {"session_id": "one", "turns": [
        {"role": "system", "text": "Be short. "}, {"text": "What is a cache?", "output_length": 7},
        {"texts": ["And ", "a miss?"], "delay": 900, "extra": {"top_p": 0.5}}]},
    {"turns": [{"text": "Why?", "image": "cat.png"}]},
]  # fmt: skip


def span(start_s: float, end_s: float, conversation: str | None, prompt: int, answer: int, **attributes: str):
    """A span of a call, in OTLP's JSON."""
    counts = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": answer}
    values = [{"key": key, "value": {"intValue": str(value)}} for key, value in counts.items()]
    texts = {"gen_ai.operation.name": "chat", **{key.replace("__", "."): value for key, value in attributes.items()}}
    if conversation is not None:
        texts["gen_ai.conversation.id"] = conversation
    values += [{"key": key, "value": {"stringValue": value}} for key, value in texts.items()]
    times = {"startTimeUnixNano": str(int(1.8e18 + start_s * 1e9)), "endTimeUnixNano": str(int(1.8e18 + end_s * 1e9))}
    return {"traceId": "0", "name": "chat m", "kind": 3, **times, "attributes": values}


def export(*spans: dict[str, object]) -> dict[str, object]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "agent"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


def agents(name: str, **changes: object) -> dict[str, object]:
    """A session of two requests, of 130 and 200 tokens, and a subagent."""
    first = {"t": 0.0, "type": "n", "in": 130, "out": 10, "hash_ids": [1, 2], "api_time": 6.5}
    second = {"t": 25.0, "type": "s", "in": 200, "out": 20, "hash_ids": [1, 2, 3]}
    helper = {"type": "subagent", "requests": [{"t": 3.0, "type": "n", "in": 64, "out": 5, "hash_ids": [1]}]}
    requests = [first, helper, second]
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, **changes}


def written(path, content: str | list[dict[str, object]], *, compressed: bool = False):
    text = content if isinstance(content, str) else "".join(json.dumps(one) + "\n" for one in content)
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    return path


def read(path) -> TraceReader:
    return TraceReader(path, TraceFormat())


def test_azure_has_times_and_lengths(tmp_path):
    reader = read(written(tmp_path / "AzureLLMInferenceTrace_conv.csv", AZURE))
    found = [(one.line, one.timestamp_ms, one.input_tokens, one.output_tokens) for one in reader]
    assert found == [(2, 0.0, 374, 44), (3, pytest.approx(4314.579), 396, 109)]
    assert reader.skips() == ["1 line is skipped: `output_length` is 0"]


@pytest.mark.parametrize("text", [BURSTGPT, BURSTGPT_2])
def test_burstgpt_has_times_and_lengths(tmp_path, text):
    first, *_ = read(written(tmp_path / "BurstGPT_1.csv", text))
    assert (first.timestamp_ms, first.input_tokens, first.output_tokens) == (5000.0, 472, 18)
    assert (first.hash_ids, first.session_id) == (None, None)


def test_bailian_has_blocks_of_16_tokens_and_seconds(tmp_path):
    reader = read(written(tmp_path / "qwen_traceA_blksz_16.jsonl", BAILIAN))
    assert [(one.timestamp_ms, one.hash_ids) for one in reader] == [(500.0, (4, 5, 6)), (61114.0, (4, 5, 7))]
    assert (reader.form.block_tokens, reader.form.turns) == (16, Turns.WHOLE)


@pytest.mark.parametrize("compressed", [False, True])
def test_sessions_of_agents_keep_their_pauses_and_their_blocks(tmp_path, compressed):
    name = "agents.jsonl.gz" if compressed else "agents.jsonl"
    reader = read(written(tmp_path / name, [agents("a"), agents("b")], compressed=compressed))
    requests = list(reader)
    assert [(one.session_id, one.delay_ms, one.input_tokens) for one in requests[:3]] == [
        ("a", None, 130),
        ("a/1", None, 64),
        ("a", 18_500.0, 200),
    ]
    first, helper, second = (one.hash_ids for one in requests[:3])
    assert second[:2] == first[:2]
    assert helper == first[:1]
    assert first[2] != second[2]  # the last block of the first prompt was not full, and has no id
    assert not {*first, *second} & {one for other in requests[3:] for one in other.hash_ids}
    assert reader.form.block_tokens == 64


def test_a_session_whose_first_request_failed_begins_with_the_second(tmp_path):
    session = agents("a")
    session["requests"][0]["out"] = 0
    reader = read(written(tmp_path / "agents.jsonl", [session]))
    assert [(one.session_id, one.delay_ms) for one in reader] == [("a/1", None), ("a", None)]
    assert reader.skips() == ["1 line is skipped: `output_length` is 0"]


def test_ids_of_all_sessions_are_equal_if_the_file_says_so(tmp_path):
    sessions = [agents(name, hash_id_scope="global") for name in "ab"]
    requests = list(read(written(tmp_path / "agents.jsonl", sessions)))
    assert requests[0].hash_ids[:2] == requests[3].hash_ids[:2]
    assert requests[0].hash_ids[2] != requests[3].hash_ids[2]


def test_a_format_of_others_becomes_a_script(tmp_path):
    path = written(tmp_path / "agents.jsonl", [agents("a")])
    script = trace_script(path, TraceFormat(), TextWriter(4.0), seed=0)
    assert [one.session for one in script.requests] == [0, 1, 0]
    assert script.requests[2].delay_s == 18.5


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("compressed", [False, True])
def test_sharegpt_has_one_request_per_question_and_answer(tmp_path, indent, compressed):
    path = written(tmp_path / "sharegpt.json", json.dumps(SHAREGPT, indent=indent), compressed=compressed)
    reader = read(path)
    assert [(one.session_id, one.text, one.output_tokens) for one in reader] == [
        ("1", "Be short. What is a cache?", 5),
        ("1", "And a miss?", 3),
        ("2", "Why?", 1),
    ]
    assert (reader.form.turns, reader.form.block_tokens) == (Turns.ADDED, 16)


def test_sharegpt_may_have_one_conversation_per_line(tmp_path):
    assert len(list(read(written(tmp_path / "sharegpt.jsonl", SHAREGPT)))) == 3


def test_a_list_is_read_piece_by_piece(tmp_path, monkeypatch):
    expected = list(read(written(tmp_path / "whole.json", json.dumps(SHAREGPT))))
    monkeypatch.setattr("kvbm_cli.bench.trace.request.CHUNK_BYTES", 3)
    emptied = [{**one, "id": "\N{GREEK SMALL LETTER ALPHA}"} for one in SHAREGPT]
    assert list(read(written(tmp_path / "pieces.json", json.dumps(emptied, ensure_ascii=False)))) == expected


def test_the_next_prompt_of_sharegpt_has_the_answer_of_the_engine(tmp_path):
    path = written(tmp_path / "sharegpt.json", json.dumps(SHAREGPT))
    script = trace_script(path, TraceFormat(), TextWriter(4.0), seed=0)
    assert [part for part in script.requests[1].parts if isinstance(part, AnswerOf)] == [AnswerOf(0, 5)]
    dialect = Dialect("m", path="/v1/chat/completions")
    plan = Plan.make(script, Launches(), dialect, answers=3 * [RecordedAnswer(text="Memory.")], request_timeout_s=9.0)
    assert [message["role"] for message in plan.requests[1].messages()] == ["user", "assistant", "user"]


def test_turns_of_aiperf_add_to_their_conversation(tmp_path):
    reader = read(written(tmp_path / "multi.jsonl", MULTI_TURN))
    requests = list(reader)
    assert [(one.session_id, one.text, one.output_tokens, one.delay_ms) for one in requests] == [
        ("one", "Be short. What is a cache?", 7, None),
        ("one", "And a miss?", None, 900.0),
        ("line 2", "Why?", None, None),
    ]
    assert requests[1].extra == {"top_p": 0.5}
    assert (reader.form.turns, dict(reader.ignored)) == (Turns.ADDED, {"image": 1})


def test_single_turns_of_aiperf_hold_whole_prompts(tmp_path):
    lines = [{"session_id": "s", "text": "a", "timestamp": 5}, {"session_id": "s", "texts": ["a", "b"], "timestamp": 9}]
    reader = read(written(tmp_path / "single.jsonl", lines))
    assert [(one.session_id, one.text, one.timestamp_ms) for one in reader] == [("s", "a", 5.0), ("s", "ab", 9.0)]
    assert reader.form.turns is Turns.WHOLE


def test_text_in_messages_is_not_aiperfs_text(tmp_path):
    content = [{"type": "text", "text": "hello"}]
    reader = read(written(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": content}]}]))
    assert next(iter(reader)).messages is not None


def test_a_column_named_text_can_still_be_given(tmp_path):
    path = written(tmp_path / "t.jsonl", [{"text": "x", "n": 3}])
    reader = TraceReader(path, TraceFormat(columns={"text_input": "text", "output_length": "n"}))
    assert [(one.text, one.output_tokens) for one in reader] == [("x", 3)]


def test_calls_of_spans_have_times_pauses_and_prefixes_of_their_conversation(tmp_path):
    second = span(10, 12, "c", 70, 8)
    other = span(20, 21, "c", 30, 5)  # shorter: a summary
    lines = [export(second, other), export(span(0, 4, "c", 40, 20)), {"resourceMetrics": [], "resourceSpans": []}]
    reader = read(written(tmp_path / "spans.jsonl", lines))
    requests = list(reader)
    assert [(one.timestamp_ms, one.delay_ms, one.input_tokens) for one in requests] == [
        (0.0, None, 40),
        (10_000.0, 6_000.0, 70),
        (20_000.0, 8_000.0, 30),
    ]
    first, grown, shorter = (one.hash_ids for one in requests)
    assert grown[:3] == first
    assert not {*shorter} & {*grown}
    assert reader.form.turns is Turns.WHOLE
    analysis = analyse(reader.path, TraceFormat())
    assert analysis.curve.ideal == 32 / 140  # the last block of the first prompt was not full


def test_calls_that_overlap_are_sessions_of_their_own(tmp_path):
    calls = [span(0, 9, "c", 40, 20), span(3, 5, "c", 400, 20), span(6, 8, "c", 430, 9), span(10, 11, "c", 80, 9)]
    requests = list(read(written(tmp_path / "spans.jsonl", [export(*calls)])))
    assert [(one.session_id, one.delay_ms) for one in requests] == [
        ("c", None),
        ("c/1", None),
        ("c/1", 1_000.0),
        ("c", 1_000.0),
    ]


def test_only_calls_of_models_count_and_calls_without_a_conversation_share_nothing(tmp_path):
    agent = span(0, 9, "c", 400, 20, gen_ai__operation__name="invoke_agent")
    tool = {**span(0, 9, "c", 1, 1), "attributes": []}
    alone = [span(1, 2, None, 40, 20), span(3, 4, None, 40, 0)]
    reader = read(written(tmp_path / "spans.jsonl", [export(agent, tool, *alone)]))
    assert [(one.session_id, one.hash_ids, one.timestamp_ms) for one in reader] == [(None, None, 0.0)]
    assert reader.skips() == ["1 line is skipped: `output_length` is 0"]


def test_the_command_shows_them(tmp_path, capsys):
    assert trace(written(tmp_path / "a.csv", AZURE), TraceFormat()) == 0
    shown = capsys.readouterr().out
    assert "2 requests in" in shown
    assert "have no hash ids" in shown


def test_a_value_that_is_too_long_is_named(tmp_path):
    """Other wrong lines are in test_trace_reader.py."""
    path = written(tmp_path / "trace.csv", AZURE + '"' + "a" * 200_000 + '",1,1\n')
    with pytest.raises(ProfileError, match=f"^{path}:5: not CSV: field larger than field limit"):
        list(read(path))


def test_columns_are_for_mooncake(tmp_path):
    with pytest.raises(UsageError, match="the format of BurstGPT, whose columns are known"):
        TraceReader(written(tmp_path / "a.csv", BURSTGPT), TraceFormat(columns={"input_length": "x"}))
