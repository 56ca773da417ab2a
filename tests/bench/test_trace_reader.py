"""The reader of traces: what it accepts and refuses; and a trace as a workload: lengths, sharing, times and bodies."""

import gzip
import json
import random
import tracemalloc

import pytest
from terminal import assert_said, given_in
from test_bench_scripts import common
from trace_pages import HEAD

from kvbm.errors import EnvironmentProblem, KvbmError, ProfileError
from kvbm_cli.bench.trace import request as trace_lines
from kvbm_cli.bench.trace.analysis import analyse
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import Sessions, TraceFormat, Turns
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan
from kvbm_cli.bench.workload.script import Phase, TextWriter, TokenWriter


def written(tmp_path, *lines, name="t.jsonl"):
    path = tmp_path / name
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    path.write_bytes(b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts))
    return path


def read(path, **form):
    return list(TraceReader(path, TraceFormat(**form)))


def placed(tmp_path, *lines, **form):
    path = written(tmp_path, *lines)
    sessions = Sessions(path, TraceFormat(**form))
    return [sessions.place(request) for request in read(path, **form)]


def refused(tmp_path, *lines, **form):
    """The message about wrong lines, without the directory of the file."""
    with pytest.raises(ProfileError) as caught:
        placed(tmp_path, *lines, **form)
    return caught.value.message.replace(f"{tmp_path}/", "")


def test_gzip_is_found_by_its_content_and_empty_lines_are_skipped(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"input_length": 3}\r\n\n  \n{"input_length": 4}'))
    assert [(one.line, one.input_tokens) for one in read(path)] == [(1, 3), (4, 4)]


@pytest.mark.parametrize(
    ("limits", "read_sessions"),
    [
        ({"sessions": 2}, "abab"),
        ({"sessions": 4}, "abacb-"),  # a line without a session counts as one
        ({"requests": 3}, "aba"),
        ({"requests": 1, "sessions": 2}, "a"),
    ],
)
def test_the_first_sessions_are_read_with_all_their_turns(tmp_path, limits, read_sessions):
    lines = [{"session_id": name, "input_length": 5} for name in "abacb"]
    path = written(tmp_path, *lines, {"input_length": 6}, {"input_length": 7})
    assert "".join(one.session_id or "-" for one in read(path, **limits)) == read_sessions


@pytest.mark.parametrize("name", given_in("bench/trace_lines"))
def test_a_wrong_line_is_refused(tmp_path, name):
    """Each line is that of another file."""
    messages = [refused(tmp_path, line) for line in given_in("bench/trace_lines")[name].splitlines()]
    assert_said("bench/trace_lines", name, "\n".join(messages))
    assert all(len(message) < 300 and message.isprintable() for message in messages)


@pytest.mark.parametrize("name", given_in("bench/traces"))
def test_a_wrong_file_is_refused(tmp_path, name):
    assert_said("bench/traces", name, refused(tmp_path, given_in("bench/traces")[name].rstrip("\n")))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"input_length": ' + "9" * 5000 + "}", "t.jsonl:1: the number 99999999999999999999... is too large"),
        ('{"input_length": 1, "extra": ' + "[" * 100_000, "t.jsonl:1: it has more than 100 levels"),
        (b'{"input_length": 1, "x": "\xff"}', "t.jsonl:1: not UTF-8 text (byte 27 of the line is 0xff)"),
        (b"\x00\x01\x02", "t.jsonl:1: not JSON"),
        ("[" + "1," * 1000 + "1]", "..."),
    ],
)
def test_a_line_that_no_text_can_show_is_refused(tmp_path, line, expected):
    message = refused(tmp_path, line)
    assert expected in message
    assert len(message) < 300
    assert message.isprintable()


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-4],
        lambda whole: whole + b"more",
        lambda whole: whole[:2] + b"\xff" * 50,
        lambda whole: whole[:-6] + b"\x00" + whole[-5:],
    ],
)
def test_damaged_gzip_data_is_refused(tmp_path, damage):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(damage(HEAD.read_bytes()))
    with pytest.raises(ProfileError, match=r"t.jsonl.gz: the gzip data is damaged or incomplete after line \d+: ."):
        read(path)


def test_a_file_that_fails_to_be_read_is_a_problem_of_the_machine(tmp_path, monkeypatch):
    def fails(*arguments, **options):
        raise OSError(5, "Input/output error")

    path = written(tmp_path, {"input_length": 1})
    reader = TraceReader(path, TraceFormat())
    monkeypatch.setattr("builtins.open", fails)
    with pytest.raises(EnvironmentProblem, match="input/output error"):
        list(reader)


def test_a_line_of_100_mb_is_refused_with_bounded_memory(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text_input": "')
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b'"}\n')
    tracemalloc.start()
    with pytest.raises(ProfileError, match=r"t\.jsonl\.gz:1: the line is longer than 32 MiB"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * trace_lines.MAX_LINE_BYTES


def test_random_bytes_give_an_error_of_ours(tmp_path):
    generator = random.Random(0)
    line = json.dumps({"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}).encode()
    path = tmp_path / "t.jsonl"
    outcomes = set()
    for _ in range(500):
        changed = bytearray(line)
        for _ in range(generator.randint(1, 3)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        path.write_bytes(bytes(changed))
        try:
            read(path)
            outcomes.add("accepted")
        except KvbmError:
            outcomes.add("refused")
    assert outcomes == {"accepted", "refused"}


def test_turns_follow_each_other_and_times_are_estimated(tmp_path):
    lines = [
        {"session_id": "a", "timestamp": 1000, "input_length": 1},
        {"timestamp": 1200, "input_length": 1},
        {"session_id": "a", "delay": 500, "input_length": 1},
        {"session_id": "a", "timestamp": 9000, "delay": 1, "input_length": 1},
    ]
    found = [(one.session, one.turn, one.previous, one.launch_ms) for one in placed(tmp_path, *lines)]
    assert found == [(0, 1, None, 1000), (1, 1, None, 1200), (0, 2, 0, 1500), (0, 3, 2, 9000)]


def test_whole_prompts_may_repeat_the_first_block(tmp_path):
    line = {"session_id": "a", "input_length": 1, "hash_ids": [3]}
    assert [one.turn for one in placed(tmp_path, line, line, turns=Turns.WHOLE)] == [1, 2]


def tokenize(text):
    return [ord(character) for character in text]


WRITER = TokenWriter(tokenize, seed=1)


def script_of(tmp_path, *lines, writer=WRITER, form=None, **options):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace_script(path, form or TraceFormat(block_tokens=4), writer, **{"seed": 0, **options})


def planned(script, *, answers=(), has_token_ids=True):
    dialect = Dialect("m", has_token_ids=has_token_ids)
    return Plan.make(script, Launches(), dialect, answers=answers, request_timeout_s=60).requests


def test_prompts_of_the_head_have_the_lengths_and_the_sharing_of_the_trace():
    script = trace_script(HEAD, TraceFormat(requests=80), WRITER, seed=0)
    trace = [request for request, _ in zip(TraceReader(HEAD, TraceFormat()), range(80), strict=False)]
    requests = planned(script)
    assert [one.prompt_tokens for one in requests] == [one.input_tokens for one in trace]
    assert [one.answer_tokens for one in requests] == [one.output_tokens for one in trace]
    assert [one.intended_s for one in requests] == [one.timestamp_ms / 1000 for one in trace]
    generator = random.Random(0)
    for _ in range(60):
        a, b = generator.sample(range(80), 2)
        shared = 512 * common(trace[a].hash_ids, trace[b].hash_ids)
        expected = min(shared, trace[a].input_tokens, trace[b].input_tokens)
        assert expected <= common(requests[a].prompt, requests[b].prompt) < expected + 16


def test_working_set_is_that_of_the_analysis_and_phases_follow_the_reuse():
    script = trace_script(HEAD, TraceFormat(), WRITER, seed=0)
    assert script.working_set_tokens == analyse(HEAD, TraceFormat())["unique_tokens"]
    phases = [one.phase for one in script.requests]
    assert phases[0] is Phase.COLD
    assert {*phases} == {*Phase}


def test_equal_seeds_give_equal_content_and_other_seeds_other_content(tmp_path):
    line = {"input_length": 7, "hash_ids": [1, 2]}
    one, same, other = (planned(script_of(tmp_path, line, seed=seed))[0].prompt for seed in (5, 5, 6))
    assert one == same != other
    assert len(one) == 7


def test_text_is_tokenized_or_sent_as_it_is(tmp_path):
    text = "one prompt of more than sixty-four characters, which requests share in pieces"
    lines = [{"text_input": text + " a"}, {"text_input": text + " b"}]
    first, second = planned(script_of(tmp_path, *lines))
    assert (first.prompt, first.phase) == (tokenize(text + " a"), Phase.COLD)
    assert second.phase is not Phase.COLD
    script = script_of(tmp_path, *lines, writer=TextWriter(4.0))
    assert planned(script, has_token_ids=False)[0].prompt == text + " a"
