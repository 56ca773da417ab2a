"""Traces in formats of others: recognised by their first line, read as if they were Mooncake's."""

import gzip
import json

import pytest

from kvbm.errors import ProfileError, UsageError
from kvbm_cli.bench.trace.command import trace
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat, Turns
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.script import TextWriter

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


def test_the_command_shows_them(tmp_path, capsys):
    assert trace(written(tmp_path / "a.csv", AZURE)) == 0
    shown = capsys.readouterr().out
    assert "2 requests in" in shown
    assert "have no hash ids" in shown


LATER = AZURE.replace("2023-11-16 18:15:50.9951690", "later")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("396", "many"), "3: `contexttokens` must be a number of tokens, not `many`"),
        (LATER, "3: `TIMESTAMP` must be a date with a time, not `later`"),
        (AZURE.replace(",396,109", ""), "3: the line has 1 values, and the header 3"),
        (AZURE.replace("396", "-1"), "3: `input_length` must be a whole number of tokens from 1"),
        (AZURE + '"' + "a" * 200_000 + '",1,1\n', "5: not CSV: field larger than field limit"),
        (BURSTGPT.replace("45.5", "x"), "3: `Timestamp` must be seconds, not `x`"),
        ([{**BAILIAN[0], "timestamp": None}], "1: `timestamp` must be a number of seconds, not `null`"),
        ([agents("a", requests=3)], "1: `requests` must be a list of objects, not `3`"),
        (
            [agents("a", requests=[{"t": 0.0, "in": 5, "out": 1, "hash_ids": "x"}])],
            "1: `hash_ids` of request 0 must be",
        ),
        ([agents("a", requests=[{"in": 5, "out": 1, "hash_ids": []}])], "1: `t` must be a number of seconds"),
        (json.dumps(agents("a"))[:-9], "1: a line must be a JSON object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, message):
    path = written(tmp_path / "trace.csv", text)
    with pytest.raises(ProfileError) as caught:
        list(read(path))
    assert caught.value.message.startswith(f"{path}:{message}")


def test_columns_are_for_mooncake(tmp_path):
    with pytest.raises(UsageError, match="the format of BurstGPT, whose columns are known"):
        TraceReader(written(tmp_path / "a.csv", BURSTGPT), TraceFormat(columns={"input_length": "x"}))
