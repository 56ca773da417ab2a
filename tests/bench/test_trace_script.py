"""A trace as a workload: lengths, sharing, times and order of the script, and the bodies of its plan."""

import json
import random
from pathlib import Path

import pytest
from test_bench_scripts import common

from kvbm.errors import ProfileError
from kvbm_cli.bench.cells import script_of as script_of_workload
from kvbm_cli.bench.trace.analysis import analyse
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat, Turns
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, RecordedAnswer
from kvbm_cli.bench.workload.script import Phase, TextWriter, TokenWriter

HEAD = Path(__file__).parent / "data/mooncake-conversation-head.jsonl.gz"


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


def answers_of(script):
    """One answer of the right length per request; its tokens occur nowhere else."""
    return [RecordedAnswer((1000 + index,) * (one.answer_tokens or 0)) for index, one in enumerate(script.requests)]


def test_prompts_of_the_head_have_the_lengths_and_the_sharing_of_the_trace():
    script = trace_script(HEAD, TraceFormat(), WRITER, seed=0, request_limit=80)
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
    assert script.working_set_tokens == analyse(HEAD, TraceFormat()).unique_tokens
    phases = [one.phase for one in script.requests]
    assert phases[0] is Phase.COLD
    assert {*phases} == {*Phase}


def test_equal_seeds_give_equal_content_and_other_seeds_other_content(tmp_path):
    line = {"input_length": 7, "hash_ids": [1, 2]}
    one, same, other = (planned(script_of(tmp_path, line, seed=seed))[0].prompt for seed in (5, 5, 6))
    assert one == same != other
    assert len(one) == 7


def test_equal_blocks_are_one_object_and_a_last_block_is_cut(tmp_path):
    script = script_of(
        tmp_path,
        {"input_length": 8, "hash_ids": [1, 2]},
        {"input_length": 8, "hash_ids": [1, 3]},
        {"input_length": 6, "hash_ids": [1, 2]},
    )
    first, second, third = (one.parts for one in script.requests)
    assert first[0] is second[0] is third[0]
    assert [len(part) for part in third] == [4, 2]
    assert third[1] == first[1][:2]


def test_lengths_are_scaled(tmp_path):
    line = {"input_length": 150, "output_length": 50, "hash_ids": [1, 2]}
    script = script_of(tmp_path, line, form=TraceFormat(block_tokens=100), length_scale=0.1)
    [one] = script.requests
    assert [len(part) for part in one.parts] == [10, 5]
    assert (one.answer_tokens, script.working_set_tokens) == (5, 15)


def test_a_session_waits_for_its_answers_and_repeats_them(tmp_path):
    lines = [
        {"session_id": "a", "timestamp": 5000, "input_length": 4, "output_length": 2, "hash_ids": [1]},
        {"session_id": "a", "delay": 9000, "input_length": 3, "output_length": 1, "hash_ids": [2]},
        {"timestamp": 6000, "input_length": 5},
        {"session_id": "a", "timestamp": 20000, "input_length": 1},
    ]
    script = script_of(tmp_path, *lines)
    times = [(one.session, one.turn, one.at_s, one.after, one.delay_s) for one in script.requests]
    assert times == [(0, 1, 0.0, (), 0.0), (1, 1, 1.0, (), 0.0), (0, 2, None, (0,), 9.0), (0, 3, 15.0, (2,), 0.0)]
    first, _, second, third = planned(script, answers=answers_of(script))
    assert second.prompt[:6] == [*first.prompt, 1000, 1000]
    assert second.prompt_tokens == 4 + 2 + 3
    assert third.prompt[:10] == [*second.prompt, 1002]
    assert script.requests[2].phase is not Phase.COLD
    assert script.working_set_tokens == 4 + 2 + 3 + 1 + 1 + 5


def test_whole_prompts_are_not_joined(tmp_path):
    lines = [
        {"session_id": "a", "input_length": 4, "output_length": 2, "hash_ids": [1]},
        {"session_id": "a", "input_length": 7, "output_length": 1, "hash_ids": [1, 2]},
    ]
    script = script_of(tmp_path, *lines, form=TraceFormat(block_tokens=4, turns=Turns.WHOLE))
    first, second = planned(script)
    assert (second.prompt_tokens, second.prompt[:4], second.after) == (7, first.prompt, (0,))


def test_text_is_tokenized_or_sent_as_it_is(tmp_path):
    text = "one prompt of more than sixty-four characters, which requests share in pieces"
    lines = [{"text_input": text + " a"}, {"text_input": text + " b"}]
    first, second = planned(script_of(tmp_path, *lines))
    assert (first.prompt, first.phase) == (tokenize(text + " a"), Phase.COLD)
    assert second.phase is not Phase.COLD
    script = script_of(tmp_path, *lines, writer=TextWriter(4.0))
    assert planned(script, has_token_ids=False)[0].prompt == text + " a"


def test_messages_are_a_fixed_body(tmp_path):
    messages = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": "hi"}]
    line = {"messages": messages, "tools": [{"type": "function"}], "output_length": 7, "extra": {"top_p": 0.5}}
    one, two = planned(script_of(tmp_path, line, {**line, "messages": [*messages, {"role": "user", "content": "b"}]}))
    body = json.loads(one.encode())
    assert one.path == "/v1/chat/completions"
    assert (body["messages"], body["tools"]) == (messages, [{"type": "function"}])
    assert (body["max_tokens"], body["top_p"], body["stream"], body["model"]) == (7, 0.5, True, "m")
    assert body["stream_options"] == {"include_usage": True}
    assert (one.phase, two.phase) == (Phase.COLD, Phase.STEADY)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_payload_keeps_its_fields_except_model_and_stream(tmp_path, limit):
    payload = {"model": "other", "prompt": "p", limit: 3, "stream": False, "seed": 4}
    [one] = planned(script_of(tmp_path, {"payload": payload, "output_length": 99}))
    body = json.loads(one.encode())
    assert one.path == "/v1/completions"
    expected = {"model": "m", "prompt": "p", limit: 3, "stream": True, "seed": 4}
    assert body == {**expected, "stream_options": {"include_usage": True}}


def test_extra_fields_are_sent_and_reserved_ones_are_refused(tmp_path):
    [one] = planned(script_of(tmp_path, {"input_length": 3, "output_length": 2, "extra": {"top_k": 1}}))
    body = json.loads(one.encode())
    assert (body["top_k"], body["max_tokens"], len(body["prompt"])) == (1, 2, 3)
    with pytest.raises(ProfileError, match=r"t\.jsonl:1: `extra` must not set `stream`"):
        script_of(tmp_path, {"input_length": 3, "extra": {"stream": False}})


def test_a_trace_without_times_is_a_closed_loop(tmp_path):
    lines = [{"session_id": name, "input_length": 2, "output_length": 1} for name in "abab"]
    script = script_of(tmp_path, *lines)
    assert [(one.session, one.turn, one.at_s, one.after) for one in script.requests] == [
        *((0, 1, None, ()), (1, 1, None, ()), (0, 2, None, (0,)), (1, 2, None, (1,)))
    ]


def test_a_workload_of_kind_trace_is_built_from_its_file(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"length": 33, "hash_ids": [1, 2, 3]}\n{"length": -1}\n')
    (tmp_path / "w.yaml").write_text(
        "name: w\nkind: trace\nfile: t.jsonl\nblock_tokens: 16\nrequests: 1\nlength_scale: 0.5\n"
        "columns: {input_length: length}\n"
    )
    script = script_of_workload(load_workload(str(tmp_path / "w.yaml")), WRITER, seed=0)
    assert [len(part) for part in script.requests[0].parts] == [8, 8, 1]
    assert len(script.requests) == 1


def test_fixed_bodies_are_not_mixed_with_repeated_answers(tmp_path):
    joined = {"session_id": "a", "input_length": 3, "output_length": 1}
    fixed = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(ProfileError, match=r"t\.jsonl:2: a workload cannot mix .* \(line 2\) .* \(line 1\)"):
        script_of(tmp_path, fixed, joined)
    form = TraceFormat(turns=Turns.WHOLE)
    assert len(script_of(tmp_path, fixed, joined, form=form).requests) == 2
