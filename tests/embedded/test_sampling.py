"""Sampling: what a seed promises, and what the parameters mean."""

from collections import Counter

import pytest
import torch
from engine_rig import EngineRig, prompts_of

from kvbm import hashing
from kvbm.engines.embedded.engine import sampling
from kvbm.engines.embedded.engine.request import Request, SamplingParams

PROMPTS = prompts_of([30, 9, 44], vocabulary=256)


@pytest.fixture(scope="module")
def rig():
    with EngineRig("synthetic:tiny", num_blocks=64, verify=False, threads=1) as rig:
        yield rig


def request(seed: int = 0, **params) -> Request:
    settings = SamplingParams(**params)
    return Request("r", [1, 2, 3], settings, lambda output: None, 16, hashing.root(b"n"), seed, settings.max_tokens)


def draws(logits: list[float], count: int = 2000, **params) -> Counter:
    rows = torch.tensor([logits] * count)
    requests = [request(seed=seed, **params) for seed in range(count)]
    return Counter(token for token, _ in sampling.sample(rows, requests, ()))


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(rig):
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 7}
    alone = rig.generate(PROMPTS[:1], **params)[0].token_ids
    beside = [rig.add(prompt, max_tokens=20) for prompt in PROMPTS]
    rig.step()
    batched = rig.add(PROMPTS[0], **params)
    rig.run()
    assert batched.token_ids == alone
    assert all(result.is_finished for result in beside)
    assert rig.generate(PROMPTS[:1], **(params | {"seed": 8}))[0].token_ids != alone


def test_a_seed_gives_the_same_tokens_after_a_preemption(rig):
    params = {"max_tokens": 30, "temperature": 1.0, "seed": 7}
    alone = rig.generate(PROMPTS[:1], **params)[0].token_ids
    with EngineRig("synthetic:tiny", num_blocks=6, verify=False, threads=1) as small:
        first = small.add(PROMPTS[1], max_tokens=60)
        second = small.add(PROMPTS[0], **params)
        small.run()
        assert small.core.scheduler.counters.preemptions > 0
        assert first.is_finished
        assert second.token_ids == alone


def test_temperature_zero_is_the_likeliest_token():
    assert draws([0.0, 3.0, 1.0], temperature=0.0) == {1: 2000}


def test_frequencies_follow_the_probabilities():
    counts = draws([1.0, 2.0, 0.0, -20.0], temperature=1.0)
    expected = torch.tensor([1.0, 2.0, 0.0]).softmax(0).tolist()
    assert set(counts) == {0, 1, 2}
    for token, probability in enumerate(expected):
        assert abs(counts[token] / 2000 - probability) < 0.04


def test_a_high_temperature_flattens_and_a_low_one_sharpens():
    assert draws([0.0, 1.0], temperature=50.0)[0] > 850
    assert draws([0.0, 1.0], temperature=0.1)[0] < 20


def test_top_k_keeps_the_k_likeliest():
    assert set(draws([0.0, 0.1, 0.2, 0.3], temperature=1.0, top_k=2)) == {2, 3}


def test_top_p_keeps_the_fewest_that_reach_the_mass():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(draws(logits, temperature=1.0, top_p=0.75)) == {0, 1}
    assert set(draws(logits, temperature=1.0, top_p=0.01)) == {0}


def test_the_random_number_depends_on_seed_and_position_only():
    numbers = {sampling.uniform(seed, position) for seed in range(10) for position in range(10)}
    assert len(numbers) == 100
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert sampling.uniform(3, 5) == sampling.uniform(3, 5)


def test_stop_tokens_wait_for_min_tokens():
    rows = torch.tensor([[0.0, 5.0, 1.0]])
    assert sampling.sample(rows, [request(min_tokens=1)], [1])[0][0] == 2
    late = request(min_tokens=1)
    late.append(2)
    assert sampling.sample(rows, [late], [1])[0][0] == 1
    assert rows[0, 1] == 5.0


def test_logprobs_are_those_before_temperature_and_best_first():
    rows = torch.tensor([[0.0, 2.0, 1.0]])
    _, detail = sampling.sample(rows, [request(logprobs=2, temperature=0.5)], ())[0]
    truth = rows[0].log_softmax(0).tolist()
    assert [token for token, _ in detail.top] == [1, 2]
    assert detail.logprob == pytest.approx(truth[detail.token_id])
    assert [value for _, value in detail.top] == pytest.approx([truth[1], truth[2]])


def test_logprobs_reach_the_client(rig):
    result = rig.generate(PROMPTS[:1], max_tokens=3, logprobs=2)[0]
    details = [detail for output in result.outputs for detail in output.logprobs]
    assert [detail.token_id for detail in details] == result.token_ids
    assert all(detail.top[0] == (detail.token_id, detail.logprob) for detail in details)


def test_an_answer_ends_at_the_stop_token_unless_told_otherwise():
    with EngineRig("synthetic:tiny", num_blocks=64, verify=False, threads=1) as rig:
        tokens = rig.generate(PROMPTS[:1], max_tokens=6)[0].token_ids
        # Random weights never give the stop token of the tokenizer.
        rig.core._stop_token_ids = frozenset([tokens[3]])
        ended = rig.generate(PROMPTS[:1], max_tokens=6, ignore_eos=False)[0]
        assert ended.token_ids == tokens[: tokens.index(tokens[3]) + 1]
        assert ended.last.finish_reason == "stop"
        assert rig.generate(PROMPTS[:1], max_tokens=6, ignore_eos=True)[0].last.finish_reason == "length"
