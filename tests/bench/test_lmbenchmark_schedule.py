"""Facts of LMBenchmark's schedule, measured with its program, and prompts, byte by byte."""

from collections import Counter
from dataclasses import replace

import pytest
from lmbenchmark_clock import START_S, simulate

from kvbm_cli.bench.lmbenchmark import presets as prompts
from kvbm_cli.bench.lmbenchmark.multi_round import MultiRoundSchedule
from kvbm_cli.bench.lmbenchmark.presets import preset

LONG = replace(preset("lmbenchmark-long"), system_words=0, history_words=0)


def run(parameters, *, longest_answer_s=0.0):
    """(tick, user, text) of every launch."""
    schedule = MultiRoundSchedule(parameters)
    return simulate(
        lambda now: [(launch.user, launch.messages[-1]["content"]) for launch in schedule.step(now)],
        lambda user, now, text: schedule.answered(user, text),
        duration_s=parameters.duration_s,
        seed=1,
        longest_answer_s=longest_answer_s,
    )


@pytest.mark.parametrize(
    ("qps", "requests", "users_with_two_rounds"), [(0.1, 10, 0), (0.25, 26, 10), (1.0, 105, 19), (4.0, 415, 34)]
)
def test_requests_of_the_long_scenario_in_100_s(qps, requests, users_with_two_rounds):
    launches = run(replace(LONG, qps=qps))
    counts = Counter(user for _, user, _ in launches)
    assert (len(launches), sum(count >= 2 for count in counts.values())) == (requests, users_with_two_rounds)


def test_first_virtual_user_retires_at_once_unless_floats_round_down():
    def is_kept(parameters):
        schedule = MultiRoundSchedule(parameters)
        launches = [*schedule.step(START_S), *schedule.step(START_S + 2 * parameters.gap_s)]
        return 2 in {launch.user for launch in launches}

    kept = [hundredths / 100 for hundredths in range(1, 400) if is_kept(replace(LONG, qps=hundredths / 100))]
    assert kept[:11] == [0.07, 0.14, 0.28, 0.47, 0.56, 0.94, 1.12, 1.88, 1.89, 2.15, 2.24]
    assert len(kept) == 16
    short = preset("lmbenchmark-short")
    assert sum(is_kept(replace(short, qps=hundredths / 100)) for hundredths in range(1, 400)) == 26


def test_warm_up_of_the_long_scenario_sends_39_requests_of_users_3_to_22():
    launches = run(LONG.warm_up())
    assert len(launches) == 39
    assert {user for _, user, _ in launches} == set(range(3, 23))


def test_virtual_users_start_with_a_later_question_and_no_history():
    launches = run(replace(LONG, qps=1.0, duration_s=20.0))
    tick, user, text = launches[0]
    assert (tick, user) == (0, 17)  # the user that joins at the first tick
    assert text.endswith(prompts.question(1))
    first_of_3 = next(text for _, user, text in launches if user == 3)
    assert first_of_3 == prompts.opening(3, system_words=0, history_words=0) + prompts.question(19)
    second_of_17 = [text for _, user, text in launches if user == 17][1]
    assert second_of_17 == prompts.question(2)


def test_gap_must_be_exceeded():
    schedule = MultiRoundSchedule(replace(LONG, users=1, rounds=5, qps=2.0))
    assert [launch.question for launch in schedule.step(1000.0)] == [1]  # user 2 has retired or waits for its age
    schedule.answered(3, "x")
    assert [launch.user for launch in schedule.step(1000.5)] == []
    assert [launch.user for launch in schedule.step(1000.5 + 1e-9) if launch.user == 3] == [3]


def test_late_answer_postpones_the_user_and_is_noted():
    schedule = MultiRoundSchedule(replace(LONG, users=1, rounds=5, qps=1.0))
    schedule.step(1000.0)
    assert not [launch for launch in schedule.step(1001.1) if launch.user == 3]
    schedule.answered(3, "late")
    (launch,) = [launch for launch in schedule.step(1003.7) if launch.user == 3]
    assert launch.is_delayed
    assert launch.turn == 2
    schedule.answered(3, "in time")
    assert not [launch for launch in schedule.step(1004.6) if launch.user == 3]  # counts from 1003.7
    (launch,) = [launch for launch in schedule.step(1004.8) if launch.user == 3]
    assert not launch.is_delayed


def test_users_pile_up_unless_they_are_strict():
    overload = replace(LONG, users=3, rounds=3, qps=3.0, duration_s=30.0)
    piled_up = {user for _, user, _ in run(overload, longest_answer_s=20.0)}
    limited = {user for _, user, _ in run(replace(overload, strict_concurrent_users=True), longest_answer_s=20.0)}
    assert len(piled_up) > 40
    assert len(limited) < 15


def test_history_has_the_live_answers():
    schedule = MultiRoundSchedule(replace(LONG, users=1, rounds=5, qps=1.0))
    schedule.step(1000.0)
    schedule.answered(3, " once upon")
    (launch,) = [launch for launch in schedule.step(1001.1) if launch.user == 3]
    assert [(message["role"], message["content"]) for message in launch.messages] == [
        ("user", prompts.opening(3, system_words=0, history_words=0) + prompts.question(1)),
        ("assistant", " once upon"),
        ("user", prompts.question(2)),
    ]


def test_failed_question_is_withdrawn_and_the_session_continues():
    schedule = MultiRoundSchedule(replace(LONG, users=1, rounds=5, qps=1.0))
    schedule.step(1000.0)
    schedule.failed(3)
    (launch,) = [launch for launch in schedule.step(1001.1) if launch.user == 3]
    opening = prompts.opening(3, system_words=0, history_words=0)
    assert [message["content"] for message in launch.messages] == [opening + prompts.question(2)]


def test_prompt_bytes_of_the_long_scenario():
    text = prompts.opening(9, system_words=1000, history_words=20000) + prompts.question(1)
    prompt = prompts.joined([{"role": "user", "content": text}])
    assert (len(prompt), len(prompt.split())) == (63_162, 21_028)
    assert prompts.opening(2, system_words=0, history_words=2) == (
        "Hi, here's some system prompt: .For user 2, here are some other context: hi hi."
    )


def test_bodies_have_the_bytes_of_the_openai_client():
    messages = [
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": " a"},
        {"role": "user", "content": "b"},
    ]
    assert (
        prompts.completions_body("m", prompts.joined(messages), 5)
        == (
            '{"model":"m","stream":true,"prompt":"USER: é\\nASSISTANT:  a\\nUSER: b\\nASSISTANT:","max_tokens":5,'
            '"stream_options":{"include_usage":true},"temperature":0.0}'
        ).encode()
    )
    assert (
        prompts.chat_body("m", messages[:1], 5, temperature=0)
        == (
            '{"model":"m","stream":true,"messages":[{"role":"user","content":"é"}],"max_tokens":5,'
            '"stream_options":{"include_usage":true},"temperature":0}'
        ).encode()
    )
    assert prompts.engine_warm_up(3) == "WARMUP: Hi, I'm user 3. Here are some text: " + 100 * "hi " + "."
