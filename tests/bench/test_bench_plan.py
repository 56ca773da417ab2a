from __future__ import annotations

import json
import random
import zlib

import pytest
from bench_rig import WORKLOAD

from kvbm_cli.bench.schedule import Plan, RecordedAnswer, Script, random_text, random_tokens

ANSWERS = [[RecordedAnswer((user, turn, 1, 2, 3, 4)) for turn in (1, 2)] for user in range(3)]


def by_byte(text: str) -> list[int]:
    return list(text.encode())


def by_pair(text: str) -> list[int]:
    data = text.encode()
    return [data[index] for index in range(0, len(data), 2)]


def make_plan(*, seed: int = 0, interval_s: float = 0.5) -> Plan:
    workload = WORKLOAD.model_copy(update={"seed": seed})
    script = Script.write(workload, by_byte)
    return Plan.make(workload, script, model="m", answers=ANSWERS, interval_s=interval_s)


@pytest.mark.parametrize("tokenize", [by_byte, by_pair])
@pytest.mark.parametrize("count", [0, 1, 17, 2048])
def test_token_counts_are_exact_whatever_the_tokenizer(tokenize, count):
    assert len(random_tokens(random.Random(0), count, tokenize)) == count


def test_text_has_high_entropy():
    text = random_text(random.Random(3), 20_000).encode()
    assert len(zlib.compress(text, 9)) > 0.7 * len(text)


def test_two_users_share_nothing_but_the_system_prompt():
    script = Script.write(WORKLOAD, by_byte)
    first, second = script.prompt(0, 1, []), script.prompt(1, 1, [])
    assert first[:32] == second[:32]
    equal = sum(a == b for a, b in zip(first[32:], second[32:], strict=True))
    assert equal < 0.1 * len(first)


def test_a_prompt_repeats_earlier_questions_and_recorded_answers_token_for_token():
    plan = make_plan()
    first, second = (json.loads(plan.requests[index].body)["prompt"] for index in (1, 4))
    assert (plan.requests[1].key, plan.requests[4].key) == ((1, 1), (1, 2))
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + 6] == list(ANSWERS[1][0].token_ids)
    assert len(second) == WORKLOAD.prompt_tokens(2) == plan.requests[4].prompt_tokens


def test_users_take_turns_at_fixed_times():
    plan = make_plan(interval_s=0.5)
    assert [request.key for request in plan.requests] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    assert [request.intended_s for request in plan.requests] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def test_a_request_asks_for_a_greedy_stream_of_fixed_length():
    body = json.loads(make_plan().requests[0].body)
    del body["prompt"]
    assert body == {
        "model": "m",
        "max_tokens": 6,
        "min_tokens": 6,
        "ignore_eos": True,
        "temperature": 0.0,
        "logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_the_same_seed_gives_the_same_digest_and_another_seed_another():
    assert make_plan().digest == make_plan().digest
    assert make_plan().digest != make_plan(seed=1).digest
    assert make_plan().digest != make_plan(interval_s=0.51).digest


def test_the_written_plan_is_enough_to_send_the_same_again():
    plan = make_plan()
    written = json.loads(json.dumps(plan.to_json()))
    for request, line in zip(plan.requests, written["requests"], strict=True):
        user = written["users"][line["user"]]
        prompt = [*written["system"], *user["history"]]
        for turn in range(line["turn"] - 1):
            prompt += [*user["questions"][turn], *user["answers"][turn]]
        prompt += user["questions"][line["turn"] - 1]
        assert json.loads(request.body)["prompt"] == prompt
    assert written["digest"] == plan.digest
