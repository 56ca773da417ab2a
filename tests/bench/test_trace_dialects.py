"""Traces of others: `bench/trace_formats.txt` has a file of each format and the requests that are read from it.

Wrong files are in test_trace_reader.py.
"""

import gzip
import json
from dataclasses import asdict

import pytest
from terminal import assert_said, given_in

from kvbm.errors import ProfileError, UsageError
from kvbm_cli.bench.trace.command import trace
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, RecordedAnswer
from kvbm_cli.bench.workload.script import AnswerOf, TextWriter

FORMATS = given_in("bench/trace_formats")


def written(tmp_path, content, *, compressed=False):
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(content.encode()) if compressed else content.encode())
    return path


def read(path) -> TraceReader:
    return TraceReader(path, TraceFormat())


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read(tmp_path, name, compressed):
    reader = read(written(tmp_path, FORMATS[name], compressed=compressed))
    lines = [json.dumps({key: one for key, one in asdict(request).items() if one is not None}) for request in reader]
    lines += [f"blocks of {reader.form.block_tokens} tokens; prompts of a session: {reader.form.turns.value}"]
    lines += [*reader.skips(), *(f"ignored: {name}, {count} times" for name, count in reader.ignored.items())]
    assert_said("bench/trace_formats", name, "\n".join(lines))


def test_a_format_of_others_becomes_a_script(tmp_path):
    script = trace_script(written(tmp_path, FORMATS["agents"]), TraceFormat(), TextWriter(4.0), seed=0)
    assert [one.session for one in script.requests[:3]] == [0, 1, 0]
    assert script.requests[2].delay_s == 18.5


def test_a_list_may_have_any_form_and_is_read_piece_by_piece(tmp_path, monkeypatch):
    expected = list(read(written(tmp_path, FORMATS["ShareGPT"])))
    conversations = json.loads(FORMATS["ShareGPT"])
    assert list(read(written(tmp_path, json.dumps(conversations, indent=2)))) == expected
    monkeypatch.setattr("kvbm_cli.bench.trace.request.CHUNK_BYTES", 3)
    renamed = [{**one, "id": "\N{GREEK SMALL LETTER ALPHA}"} for one in conversations]
    assert list(read(written(tmp_path, json.dumps(renamed, ensure_ascii=False)))) == expected


def test_the_next_prompt_of_sharegpt_has_the_answer_of_the_engine(tmp_path):
    script = trace_script(written(tmp_path, FORMATS["ShareGPT"]), TraceFormat(), TextWriter(4.0), seed=0)
    assert [part for part in script.requests[1].parts if isinstance(part, AnswerOf)] == [AnswerOf(0, 5)]
    dialect = Dialect("m", path="/v1/chat/completions")
    plan = Plan.make(script, Launches(), dialect, answers=3 * [RecordedAnswer(text="Memory.")], request_timeout_s=9.0)
    assert [message["role"] for message in plan.requests[1].messages()] == ["user", "assistant", "user"]


def test_a_column_named_text_can_still_be_given(tmp_path):
    path = written(tmp_path, '{"text": "x", "n": 3}\n')
    reader = TraceReader(path, TraceFormat(columns={"text_input": "text", "output_length": "n"}))
    assert [(one.text, one.output_tokens) for one in reader] == [("x", 3)]


def test_the_command_shows_them(tmp_path, capsys):
    assert trace(written(tmp_path, FORMATS["Azure"]), TraceFormat()) == 0
    shown = capsys.readouterr().out
    assert "2 requests in" in shown
    assert "have no hash ids" in shown


def test_a_value_that_is_too_long_is_named(tmp_path):
    path = written(tmp_path, FORMATS["Azure"] + '"' + "a" * 200_000 + '",1,1\n')
    with pytest.raises(ProfileError, match=f"^{path}:5: not CSV: field larger than field limit"):
        list(read(path))


def test_a_session_without_turns_is_refused(tmp_path):
    path = written(tmp_path, '{"session_id": "a", "turns": []}\n')
    with pytest.raises(ProfileError, match=f"^{path}:1: `turns` is empty"):
        list(read(path))


def test_columns_are_for_mooncake(tmp_path):
    with pytest.raises(UsageError, match="the format of BurstGPT, whose columns are known"):
        TraceReader(written(tmp_path, FORMATS["BurstGPT"]), TraceFormat(columns={"input_length": "x"}))
