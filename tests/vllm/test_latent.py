"""A latent (MLA) cache, with both attention backends that vLLM has for it on CPUs.

The reference one, CPU_MLA, runs on every CPU. For it, vLLM computes prompts only as a whole, so what a hit brings back
is compared with what the same engine said when it came to these tokens one by one: a request whose prompt is an earlier
conversation goes on exactly as that one did.

AMX_MLA requires a CPU with AMX, where vLLM prefers it, and bfloat16. With it, vLLM continues prompts.
"""

from random import Random

import pytest
from engine_process import FOLLOWED_TOKENS
from traffic import Request, compare, own_noise, tokens
from vllm_server import CONNECTOR, FAULTY_CONNECTOR

from kvbm.identity.machine import cpu_flags

BLOCK_TOKENS = 16  # the only size of CPU_MLA
CACHE = {"tiers": {"host": {"blocks": 600}}, "onboard": {"policy": "always"}}
_COMMON = {"max_model_len": 2048, "num_gpu_blocks_override": 200}
ENGINE = {"dtype": "float32", "block_size": BLOCK_TOKENS, "attention_backend": "CPU_MLA", **_COMMON}
AMX_BLOCK_TOKENS = 32
AMX_ENGINE = {"dtype": "bfloat16", "block_size": AMX_BLOCK_TOKENS, **_COMMON}
TALKS = [Request(tokens(Random(seed), length), 64) for seed, length in enumerate((500, 200, 1000, 77))]


@pytest.fixture(scope="module")
def engine(process):
    engine, _ = process
    engine.start("vllm-mla", connector=CONNECTOR, cache=CACHE, **ENGINE)
    yield engine
    engine.stop()


def answer(engine, prompt, max_tokens):
    (found,) = engine.answer([Request(tuple(prompt), max_tokens)])
    return found


def test_a_conversation_that_comes_back_goes_on_as_it_did(engine):
    before = engine.totals()
    originals = [answer(engine, talk.prompt, talk.max_tokens) for talk in TALKS]
    engine.rest()
    engine.forget_g1()
    cached = 0
    for talk, original in zip(TALKS, originals, strict=True):
        whole = (len(talk.prompt) + 40) // BLOCK_TOKENS * BLOCK_TOKENS
        for length in (whole, whole + 1):  # of the first, vLLM computes the last token again
            known = length - len(talk.prompt)
            again = answer(engine, (*talk.prompt, *original.tokens[:known]), 8)
            assert again.tokens == original.tokens[known : known + 8]
            assert again.logprobs == original.logprobs[known : known + 8]
            assert again.cached == whole
            cached += whole
            engine.rest()
            engine.forget_g1()
    assert engine.totals()["hits"] - before.get("hits", 0.0) == cached


def test_a_hit_after_which_more_than_a_token_is_left_is_not_taken(engine):
    prompt = tokens(Random(9), 300)
    first = answer(engine, prompt, 8)
    engine.rest()
    engine.forget_g1()
    again = answer(engine, prompt, 8)
    assert again.cached == 0
    assert again.tokens == first.tokens
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)


@pytest.fixture
def amx(process):
    """The process, what an engine with AMX_MLA and without any cache says to the conversations, and its noise. They are
    beginnings, and these once more with the answer and something new."""
    if "amx_tile" not in cpu_flags():
        pytest.skip("this CPU has no AMX")
    engine, faults = process
    engine.start("vllm-mla", enable_prefix_caching=False, logits_processors=[FOLLOWED_TOKENS], **AMX_ENGINE)
    truth = {}
    for talk in TALKS:
        truth[talk] = answer(engine, talk.prompt, talk.max_tokens)
        known = (*talk.prompt, *truth[talk].tokens)
        longer = Request((*known, *tokens(Random(len(known)), 90)), 16)
        truth[longer] = answer(engine, longer.prompt, longer.max_tokens)
    noise = own_noise(engine.answer, truth)
    engine.start("vllm-mla", connector=FAULTY_CONNECTOR, cache=CACHE, logits_processors=[FOLLOWED_TOKENS], **AMX_ENGINE)
    yield engine, faults, truth, noise
    faults.order()
    engine.stop()


def test_with_amx_prompts_go_on_after_a_hit_as_without_a_cache(amx):
    engine, faults, truth, noise = amx

    def repeat():
        answers = {}
        for request, wanted in truth.items():
            (answers[request],) = engine.answer([request], 1, [wanted.tokens])
            engine.rest()
            engine.forget_g1()
        return answers, compare(answers, truth, 2 * noise, has_followed=True)

    answers, comparison = repeat()
    assert not comparison.wrong, comparison
    assert comparison.tokens == sum(request.max_tokens for request in truth)
    found = [answer.cached for answer in answers.values()]
    assert found[::2] == [0] * len(TALKS)
    computed = [len(talk.prompt) + talk.max_tokens - 1 for talk in TALKS]  # the last token never is
    assert found[1::2] == [count // AMX_BLOCK_TOKENS * AMX_BLOCK_TOKENS for count in computed]
    assert engine.totals()["hits"] == sum(found)
    faults.order(lie=True)
    assert len(repeat()[1].wrong) >= len(TALKS), "the comparison cannot fail"
