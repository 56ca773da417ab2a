"""Speculative decoding with drafters that have KV of their own: draft models, EAGLE, EAGLE3 and MTP.

Their layers are part of vLLM's KV cache, so kvbm keeps them with those of the target. vLLM calls the connector after
the drafter has run. Answers are those of vLLM with the same drafter, without connector and without cache.
"""

from __future__ import annotations

from random import Random

import pytest
from draft_models import drafter, target
from traffic import Request, assert_equal, conversations, take_turns, tokens
from vllm_server import CONNECTOR

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]
BLOCK = 64
BLOCKS = 6
CACHE = {"tiers": {"host": {"blocks": 1200}}, "onboard": {"policy": "always"}}
ENGINE = {"dtype": "float32", "block_size": BLOCK, "max_model_len": 2048, "max_num_seqs": 8, "async_scheduling": False}
TALKS = conversations(17, turns=3, seed=5, block_tokens=BLOCK)
BLOCKS_DROPPED_IN_G1 = {"draft_model": 0, "eagle": 1, "eagle3": 1, "mtp": 1}
"""Of a hit in G1, vLLM drops the last block if the drafter reads hidden states (`use_eagle_block_drop`): its KV of a
block's last token depends on the next token, which the block's hash does not cover. kvbm loads this block: the target's
KV is right, and a wrong guess changes no token of the answer."""


def start(engine, method, *, blocks, **more):
    engine.start(
        str(target(method)), num_gpu_blocks_override=blocks, speculative_config=drafter(method), **ENGINE, **more
    )


@pytest.fixture(params=BLOCKS_DROPPED_IN_G1)
def method(request):
    return request.param


@pytest.fixture
def engine(process):
    engine, faults = process
    faults.order()
    yield engine
    engine.stop()


def grown(engine, before):
    return {name: value - before.get(name, 0) for name, value in engine.totals().items()}


def test_conversations_get_the_answers_of_an_engine_without_cache(engine, method):
    start(engine, method, blocks=400, enable_prefix_caching=False)
    truth = take_turns(engine.answer, TALKS)
    assert engine.totals()["guessed"] > 0
    start(engine, method, blocks=50, connector=CONNECTOR, cache=CACHE)
    moved = {}
    for _ in range(2):
        before = engine.totals()
        comparison = assert_equal(dict(zip(truth, engine.answer(list(truth)), strict=True)), truth)
        engine.rest()
        moved = grown(engine, before)
        print(method, comparison, {name: value for name, value in moved.items() if value})
        engine.forget_g1()
    assert moved["hits"] > 20 * BLOCK, moved


def test_a_hit_is_as_long_as_in_g1_or_longer_by_the_block_that_vllm_drops(engine, method):
    length = BLOCKS * BLOCK + 20
    prompts = [Request(tokens(Random(f"{method} {number}"), length), 24) for number in range(4)]
    start(engine, method, blocks=400, enable_prefix_caching=True)
    engine.answer(prompts)
    baseline = [answer.cached for answer in engine.answer(prompts)]
    assert baseline == [(BLOCKS - BLOCKS_DROPPED_IN_G1[method]) * BLOCK] * len(prompts)
    start(engine, method, blocks=400, connector=CONNECTOR, cache=CACHE)
    guesses = []
    for cached in (0, BLOCKS * BLOCK):
        before = engine.totals()
        assert [answer.cached for answer in engine.answer(prompts)] == [cached] * len(prompts)
        engine.rest()
        guesses.append(grown(engine, before))
        if not cached:
            engine.forget_g1()
    dropped = BLOCKS_DROPPED_IN_G1[method] * BLOCK * len(prompts)
    before = engine.totals()
    assert [answer.cached for answer in engine.answer(prompts)] == [BLOCKS * BLOCK] * len(prompts)
    found = grown(engine, before)
    assert (found["local_hits"], found["hits"]) == (len(prompts) * BLOCKS * BLOCK - dropped, dropped), "kvbm adds these"
    computed, loaded = (one.get("right_guesses", 0) for one in guesses)
    print(method, baseline, computed, loaded)
    assert loaded >= 0.9 * computed, "the KV of the drafter is not what it had computed"
    assert method != "draft_model" or computed > 0
