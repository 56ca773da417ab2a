"""A latent (MLA) cache. vLLM's reference attention for it on CPUs computes prompts only as a whole.

Its answers after a prompt and its answers after the same tokens one by one are not the same numbers, with no connector
anywhere. What a hit brings back can therefore be compared only with what the same engine said when it came to these
tokens one by one: a request whose prompt is an earlier conversation goes on exactly as that one did.
"""

from random import Random

import pytest
from traffic import Request, tokens
from vllm_server import CONNECTOR

BLOCK_TOKENS = 16  # the only size of that attention
CACHE = {"tiers": {"host": {"blocks": 600}}, "onboard": {"policy": "always"}}
ENGINE = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 2048, "num_gpu_blocks_override": 200}
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
