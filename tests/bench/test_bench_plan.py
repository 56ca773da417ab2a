"""Content, scripts and plans: exact lengths, fixed launch times, and equal bytes for equal seeds."""

import json
import random
import zlib
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev

import pytest
from bench_rig import WORKLOAD

from kvbm_cli.bench.workload.build import build_script
from kvbm_cli.bench.workload.plan import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Dialect,
    Launches,
    Plan,
    RecordedAnswer,
    unplanned,
)
from kvbm_cli.bench.workload.script import (
    LARGEST_POOL,
    Script,
    ScriptedRequest,
    TextWriter,
    TokenWriter,
    random_text,
    random_tokens,
)

ANSWERS = [RecordedAnswer((index, 1, 2, 3, 4, 5), (-0.5,) * 6) for index in range(6)]
TEXTS = [RecordedAnswer(text=f"answer {index} ") for index in range(6)]


def by_byte(text: str) -> list[int]:
    return list(text.encode())


def by_pair(text: str) -> list[int]:
    data = text.encode()
    return [data[index] for index in range(0, len(data), 2)]


WRITER = TokenWriter(by_byte, seed=0)


def make_plan(
    *, seed: int = 0, launches: Launches | None = None, dialect: Dialect | None = None, writer=WRITER, answers=ANSWERS
) -> Plan:
    script = build_script(WORKLOAD, writer, seed=seed)
    return Plan.make(
        script, launches or Launches(interval_s=0.5), dialect or Dialect("m"), answers=answers, request_timeout_s=5.0
    )


def body(request) -> dict:
    return json.loads(request.encode())


@pytest.mark.parametrize("tokenize", [by_byte, by_pair])
@pytest.mark.parametrize("count", [0, 1, 17, 2048])
def test_token_counts_are_exact_whatever_the_tokenizer(tokenize, count):
    assert len(random_tokens(random.Random(0), count, tokenize)) == count
    assert len(TokenWriter(tokenize, seed=0).content(random.Random(0), count)) == count


def test_text_has_high_entropy():
    text = random_text(random.Random(3), 20_000).encode()
    assert len(zlib.compress(text, 9)) > 0.7 * len(text)


def test_a_writer_asks_the_engine_once_whatever_the_length():
    asked = []

    def tokenize(text):
        asked.append(text)
        return by_byte(text)

    writer = TokenWriter(tokenize, seed=1)
    generator = random.Random(1)
    assert sum(len(writer.content(generator, 1000)) for _ in range(100)) == 100_000
    assert len(asked) == 1
    assert len(asked[0]) >= LARGEST_POOL


@pytest.mark.parametrize("characters_per_token", [1.0, 4.0, 5.5])
def test_text_has_about_the_length(characters_per_token):
    text = TextWriter(characters_per_token).content(random.Random(0), 500)
    assert len(text) == pytest.approx(500 * characters_per_token, rel=0.03)
    assert TextWriter(characters_per_token).content(random.Random(0), 0) == ""


def test_a_prompt_repeats_earlier_questions_and_recorded_answers_token_for_token():
    plan = make_plan()
    first, second = (body(plan.requests[index])["prompt"] for index in (1, 4))
    assert [(one.session, one.turn) for one in (plan.requests[1], plan.requests[4])] == [(1, 1), (1, 2)]
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + 6] == list(ANSWERS[1].token_ids)
    assert len(second) == WORKLOAD.prompt_tokens(2) == plan.requests[4].prompt_tokens


def test_text_prompts_repeat_the_text_of_answers():
    plan = make_plan(dialect=Dialect("m", has_token_ids=False), writer=TextWriter(4.0), answers=TEXTS)
    first, second = (body(plan.requests[index])["prompt"] for index in (1, 4))
    assert second.startswith(first + "answer 1 ")
    assert plan.requests[4].prompt_tokens is None
    assert "return_token_ids" not in body(plan.requests[0])


def test_users_take_turns_at_fixed_times():
    plan = make_plan()
    assert [(one.session, one.turn) for one in plan.requests] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    assert [request.intended_s for request in plan.requests] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert plan.duration_s == 3.0
    assert (plan.session_count, plan.turns) == (3, 2)


OF_OPENAI = {"model": "m", "max_tokens": 6, "temperature": 0.0, "stream": True}
WITH_USAGE = {**OF_OPENAI, "stream_options": {"include_usage": True}}
WITH_LENGTH = {**WITH_USAGE, "min_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize(
    ("lacks", "fields"),
    [
        ((), {**WITH_LENGTH, "logprobs": 0, "return_token_ids": True}),
        (("has_token_ids",), WITH_LENGTH),
        (("has_token_ids", "has_ignore_eos"), WITH_USAGE),
        (("has_token_ids", "has_ignore_eos", "has_usage"), OF_OPENAI),
    ],
)
def test_a_request_asks_for_a_greedy_stream_of_fixed_length(lacks, fields):
    dialect = Dialect("m", **dict.fromkeys(lacks, False))
    assert dialect.fields(6) == fields
    assert "max_tokens" not in dialect.fields(None)
    writer, answers = (TextWriter(4.0), TEXTS) if lacks else (WRITER, ANSWERS)
    asked = body(make_plan(dialect=dialect, writer=writer, answers=answers).requests[0])
    assert {name: value for name, value in asked.items() if name != "prompt"} == fields


def test_an_open_loop_awaits_no_answer_and_a_closed_loop_does():
    open_loop, closed = make_plan(), make_plan(launches=Launches(concurrency=2, think_s=1.5))
    assert [request.after for request in open_loop.requests] == [()] * 6
    assert [request.after for request in closed.requests] == [(), (), (), (0,), (1,), (2,)]
    assert [request.delay_s for request in closed.requests] == [0.0] * 3 + [1.5] * 3
    assert {request.intended_s for request in closed.requests} == {None}
    assert closed.duration_s is None
    assert (open_loop.is_closed_loop, closed.is_closed_loop) == (False, True)


def test_times_that_a_workload_fixes_are_kept_with_what_they_await():
    requests = [
        ScriptedRequest(0, 1, ((1, 2),), 2, at_s=1.0),
        ScriptedRequest(0, 2, ((1, 2), (3,)), 2, after=(0,), delay_s=0.5, at_s=4.0),
    ]
    plan = Plan.make(Script.of(requests, warmup=(9,)), Launches(), Dialect("m"), request_timeout_s=1.0)
    assert [(one.intended_s, one.after, one.delay_s) for one in plan.requests] == [(1.0, (), 0.0), (4.0, (0,), 0.5)]
    assert plan.duration_s == 4.0
    assert not plan.is_closed_loop, "the engine can be too slow for these times"


@pytest.mark.parametrize(("duration_s", "count"), [(0.4, 1), (1.0, 2), (1.01, 3), (100.0, 6)])
def test_a_duration_cuts_an_open_loop(duration_s, count):
    plan = make_plan(launches=Launches(interval_s=0.5, duration_s=duration_s))
    assert [request.index for request in plan.requests] == list(range(count))
    closed = make_plan(launches=Launches(concurrency=1, duration_s=duration_s))
    assert len(closed.requests) == 6
    assert closed.duration_s == duration_s


def test_the_same_seed_gives_the_same_digest_and_another_seed_another():
    digest = make_plan().digest
    assert make_plan().digest == digest
    assert make_plan(seed=1).digest != digest
    assert make_plan(launches=Launches(interval_s=0.51)).digest != digest
    assert make_plan(dialect=Dialect("other")).digest != digest
    changed = [replace(ANSWERS[0], token_ids=(9,) * 6), *ANSWERS[1:]]
    assert make_plan(answers=changed).digest != digest


OF_TEXT = {"writer": TextWriter(4.0), "answers": TEXTS}


@pytest.mark.parametrize(
    "changes",
    [
        *({"launches": one} for one in (Launches(interval_s=0.5), Launches(concurrency=2, think_s=0.1))),
        {"launches": Launches(interval_s=1, ramp_to_s=2)},
        *(
            {"dialect": Dialect("m", has_token_ids=False, path=path), **OF_TEXT}
            for path in (COMPLETIONS, CHAT, RESPONSES)
        ),
    ],
)
def test_the_written_plan_is_enough_to_send_the_same_again(changes):
    plan = make_plan(**changes)
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (read, read.digest) == (plan, plan.digest)
    sent = [[one.encode() for one in (of.warmup, *of.requests)] for of in (read, plan)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(("path", "key"), [(CHAT, "messages"), (RESPONSES, "input")])
def test_prompts_are_messages_of_three_roles(path, key):
    dialect = Dialect("m", has_token_ids=False, path=path)
    plan = make_plan(dialect=dialect, writer=TextWriter(4.0), answers=TEXTS)
    request = next(one for one in plan.requests if one.turn == 2)
    content = json.loads(request.encode())
    assert request.path == path
    assert [one["role"] for one in content[key]] == ["system", "user", "assistant", "user"]
    first = next(one for one in plan.requests if one.session == request.session and one.turn == 1)
    assert json.loads(first.encode())[key] == content[key][:2]
    assert content[key][2]["content"] == TEXTS[first.index].text
    assert ("max_output_tokens" in content) is (path == RESPONSES)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_each_user_has_an_image_before_the_text_which_plans_keep_once(tmp_path, path):
    (tmp_path / "a.png").write_bytes(b"no pixels")
    places = (str(tmp_path / "a.png"), "https://host/b.jpg")
    workload = WORKLOAD.model_copy(update={"images": places, "system_tokens": 0})
    dialect = Dialect("m", has_token_ids=False, path=path)
    script = build_script(workload, TextWriter(4.0), seed=0)
    plan = Plan.make(script, Launches(interval_s=1), dialect, answers=TEXTS, request_timeout_s=1.0)
    urls = ("data:image/png;base64,bm8gcGl4ZWxz", "https://host/b.jpg")
    for request in plan.requests:
        first, *later = json.loads(request.encode())["input" if path == RESPONSES else "messages"]
        image, text = first["content"]
        url = urls[request.session % 2]
        assert (first["role"], text["text"]) == ("user", "".join(request.parts[2:4]))
        assert image == (
            {"type": "input_image", "image_url": url}
            if path == RESPONSES
            else {"type": "image_url", "image_url": {"url": url}}
        )
        assert [type(one["content"]) for one in later] == [str] * len(later)
    written = json.loads(json.dumps(plan.to_json()))
    assert [written["contents"].count(url) for url in urls] == [1, 1]
    assert Plan.from_json(written) == plan


def test_random_times_have_the_mean_of_the_fixed_ones_and_follow_the_seed():
    fixed, poisson, bursts = (Launches(interval_s=0.5, burstiness=one, seed=7) for one in (None, 1.0, 0.1))
    assert fixed.times_s(4) == [0.0, 0.5, 1.0, 1.5]
    spread = []
    for one in (poisson, bursts):
        times = one.times_s(1000)
        assert times == sorted(times) == one.times_s(1000)
        assert (times[0], times[-1]) == (0.0, pytest.approx(499.5))
        assert times != replace(one, seed=8).times_s(1000)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        spread.append(stdev(gaps) / fmean(gaps))
    assert 0.85 < spread[0] < 1.15  # of a Poisson process it is 1, of this gamma distribution 10 ** 0.5
    assert 2.4 < spread[1] < 4.0
    assert [one.intended_s for one in make_plan(launches=poisson).requests] == poisson.times_s(6)


@pytest.mark.parametrize(("first_s", "final_s"), [(1.0, 0.25), (0.1, 2.0)])
def test_the_rate_of_a_ramp_changes_linearly_in_time(first_s, final_s):
    ramp, count = Launches(interval_s=first_s, ramp_to_s=final_s, seed=7), 2001
    times = ramp.times_s(count)
    whole_s = 2 * (count - 1) / (1 / first_s + 1 / final_s)
    assert (times[0], times[-1]) == (0.0, pytest.approx(whole_s, abs=1e-5))
    for share in (0.1, 0.5, 0.9):
        start_s, end_s = (share - 0.05) * whole_s, (share + 0.05) * whole_s
        expected = (1 / first_s + (1 / final_s - 1 / first_s) * share) * 0.1 * whole_s
        assert sum(start_s <= one < end_s for one in times) == pytest.approx(expected, abs=1)
    random_times = replace(ramp, burstiness=1.0).times_s(count)
    assert random_times == sorted(random_times) != times
    assert random_times[-1] == times[-1]
    assert sum(one < whole_s / 2 for one in random_times) == pytest.approx(sum(one < whole_s / 2 for one in times), 0.1)
    assert make_plan(launches=ramp).duration_s == pytest.approx(ramp.times_s(6)[-1] + final_s)
    assert Launches(interval_s=first_s, ramp_to_s=final_s).times_s(1) == [0.0]


def test_a_part_that_many_prompts_have_is_written_once():
    plan = make_plan()
    written = plan.to_json()
    system = next(index for index, part in enumerate(written["contents"]) if len(part) == WORKLOAD.system_tokens)
    assert [one["parts"][0] for one in written["requests"]] == [system] * 6
    whole = sum(request.prompt_tokens or 0 for request in plan.requests)
    assert sum(map(len, written["contents"])) < 0.75 * whole


def test_what_is_no_plan_is_refused():
    whole = make_plan().to_json()
    for key in ("requests", "contents", "launches", "warmup"):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Plan.from_json({name: value for name, value in whole.items() if name != key})


def test_a_request_outside_a_schedule_is_due_at_once():
    request = unplanned(Dialect("m"), ((1, 2), (3,)), 2)
    assert (request.intended_s, request.prompt_tokens, body(request)["prompt"]) == (0.0, 3, [1, 2, 3])
    assert unplanned(Dialect("m", has_token_ids=False), ("a b",), 2).prompt_tokens is None
