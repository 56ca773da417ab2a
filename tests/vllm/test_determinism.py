"""Answers with the cache are the answers without: tokens and log-probabilities, while blocks go out and come back.

One pair of servers for everything short: a LoRA-capable model of one KV cache group, prompts computed in chunks, a G1
for two or three of eight requests at a time. test_hybrid.py is the same for a model with a sliding window.
"""

from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import sleep

import pytest
from pairs import (
    OFFLOADED,
    OFFLOADS_FAILED,
    ONBOARDED,
    ONBOARDS_FAILED,
    PREEMPTIONS,
    Moved,
    adapters_of,
    assert_cache_was_used,
    is_at_rest,
    pair_of,
)
from traffic import TOLERANCE, Conversation, asker, assert_equal, compare, conversations, repeat, tokens
from vllm_server import BLOCK_TOKENS, EXTERNAL_HITS

pytestmark = pytest.mark.timeout(900)  # the first test starts two servers, which takes long on a busy machine
TALKS = conversations(14, turns=3)
PROMPT = range(100, 100 + 5 * BLOCK_TOKENS + 60)
CACHED = 5 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def pair(plain):
    chunks = ("--max-num-batched-tokens", "512")
    with pair_of("vllm-25m", *adapters_of("ab"), blocks=40, tested_arguments=chunks, reference=plain) as pair:
        yield pair


@pytest.fixture(autouse=True)
def _starts_empty(pair):
    """Whatever a test did, the next one finds a server at rest and empty caches."""
    pair.faults.order()
    pair.forget()


def test_answers_are_those_of_a_server_without_cache(pair):
    _, moved = pair.check(TALKS)
    assert_cache_was_used(moved, at_least_blocks=20)
    assert moved[OFFLOADS_FAILED] == moved[ONBOARDS_FAILED] == 0


def test_preempted_requests_go_on_as_if_nothing_had_been(pair):
    """They fill G1 to the last block, and then each needs one more."""
    talks = [Conversation((tokens(Random(number), 3 * BLOCK_TOKENS - 4),), (12,)) for number in range(13)]
    truth = pair.truth(talks)
    before = pair.tested.metrics()
    assert_equal(repeat(asker(pair.tested), list(truth), concurrency=13), truth)
    pair.settle()
    moved = Moved(before, pair.tested.metrics())
    assert moved[PREEMPTIONS] > 0, str(moved)
    assert moved[ONBOARDED] > 0, str(moved)


def test_copies_that_fail_are_recomputed(pair):
    pair.faults.order(fail_every=10)
    _, moved = pair.check(TALKS)
    assert_cache_was_used(moved, at_least_blocks=20)
    assert moved[OFFLOADS_FAILED] > 0, str(moved)
    assert moved[ONBOARDS_FAILED] > 0, str(moved)


def test_wrong_bytes_would_be_noticed(pair):
    """The equality above can fail: a copier that brings blocks in another order, and says nothing, is found out."""
    truth = pair.truth(TALKS[:5])
    repeat(asker(pair.tested), list(truth))
    pair.forget_g1()
    pair.faults.order(lie=True)
    before = pair.tested.metrics()[ONBOARDED]
    comparison = compare(repeat(asker(pair.tested), list(truth)), truth)
    assert pair.tested.metrics()[ONBOARDED] > before
    assert len(comparison.wrong) >= len(truth) // 2, comparison


@pytest.mark.parametrize("length", [4 * BLOCK_TOKENS - 1, 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS + 1])
def test_a_prompt_that_ends_at_a_block_comes_back_whole(pair, length):
    """vLLM computes its last token again, in the block that was brought."""
    truth = pair.reference.ask(PROMPT[:length])
    first = pair.tested.ask(PROMPT[:length])
    pair.forget_g1()
    again = pair.tested.ask(PROMPT[:length])
    assert (first.cached, again.cached) == (0, length // BLOCK_TOKENS * BLOCK_TOKENS)
    assert_equal({0: first, 1: again}, {0: truth, 1: truth})


def test_equal_prompts_at_once_are_all_answered_right(pair):
    pair.tested.ask(PROMPT)
    pair.forget_g1()
    truth = pair.reference.ask(PROMPT)
    before = pair.tested.metrics()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(pair.tested.ask, [PROMPT] * 6))
    assert_equal(dict(enumerate(answers)), dict.fromkeys(range(6), truth))
    pair.settle()
    assert Moved(before, pair.tested.metrics())[ONBOARDED] < 6 * len(PROMPT) // BLOCK_TOKENS, "each brought its own"


def test_a_request_that_reads_no_cache_gets_logprobs_of_its_prompt_and_others_load_its_blocks(pair):
    """vLLM sets `skip_reading_prefix_cache` for a request with `prompt_logprobs`, which only computed tokens have."""
    before, answers = pair.tested.metrics(), []
    for server in (pair.reference, pair.tested, pair.tested):
        body = server.completion(PROMPT, prompt_logprobs=0)
        answers.append([logprob(entry) for entry in body["choices"][0]["prompt_logprobs"][1:]])
        pair.forget_g1()
    truth, *found = answers
    for one in found:
        assert max(abs(mine - right) for mine, right in zip(one, truth, strict=True)) < TOLERANCE
    moved = Moved(before, pair.tested.metrics())
    assert moved[ONBOARDED] == moved[EXTERNAL_HITS] == 0, str(moved)
    again = pair.tested.ask(PROMPT)
    assert again.cached == CACHED
    assert_equal({0: again}, {0: pair.reference.ask(PROMPT)})


def test_a_client_can_ask_for_no_load_and_no_offload(pair):
    pair.tested.ask(PROMPT, kv_transfer_params={"max_offload_tokens": 2 * BLOCK_TOKENS})
    pair.forget_g1()
    assert pair.tested.ask(PROMPT, kv_transfer_params={"max_load_tokens": 0, "max_offload_tokens": 0}).cached == 0
    pair.forget_g1()
    assert pair.tested.ask(PROMPT).cached == 2 * BLOCK_TOKENS


def test_adapters_and_the_base_model_share_no_block(pair):
    names = ("a", "b", pair.reference.model)
    truth = {name: pair.reference.ask(PROMPT, model=name) for name in names}
    assert len({answer.tokens for answer in truth.values()}) == 3, "the adapters change nothing"
    for name in names:
        first = pair.tested.ask(PROMPT, model=name)
        pair.forget_g1()
        again = pair.tested.ask(PROMPT, model=name)
        pair.settle()
        assert (first.cached, again.cached) == (0, CACHED)
        assert_equal({name: first}, {name: truth[name]})
        assert_equal({name: again}, {name: truth[name]})


def test_tenants_with_different_salts_share_no_block(pair):
    truth = pair.reference.ask(PROMPT)
    for salt in ("tenant one", "tenant two"):
        assert pair.tested.ask(PROMPT, cache_salt=salt).cached == 0
        pair.forget_g1()
        again = pair.tested.ask(PROMPT, cache_salt=salt)
        assert again.cached == CACHED
        assert_equal({salt: again}, {salt: truth})


def test_nothing_is_found_after_an_external_reset(pair):
    pair.tested.ask(PROMPT)
    pair.forget_g1()
    assert pair.tested.ask(PROMPT).cached == CACHED
    pair.forget()
    before = pair.tested.metrics()[EXTERNAL_HITS]
    assert pair.tested.ask(PROMPT).cached == 0
    assert pair.tested.metrics()[EXTERNAL_HITS] == before


def test_both_caches_can_be_emptied_right_after_an_answer(pair):
    """The copies of its blocks may still run."""
    truth = pair.reference.ask(PROMPT)
    for external, cached in ((False, CACHED), (True, 0)):
        pair.tested.ask(PROMPT)
        assert pair.tested.reset_prefix_cache(external=external)
        again = pair.tested.ask(PROMPT)
        assert again.cached == cached
        assert_equal({0: again}, {0: truth})


def test_resets_under_load_change_no_answer(pair):
    """vLLM refuses to forget blocks that a request uses; what the connector holds goes in any case."""
    truth = pair.truth(TALKS)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(repeat, asker(pair.tested), list(truth))
        resets = 0
        while not running.done():
            pair.tested.reset_prefix_cache(external=True)
            resets += 1
            sleep(0.5)
        assert_equal(running.result(), truth)
    assert resets > 3
    pair.settle()
    assert pair.tested.metrics()["kvbm_resets"] >= resets


def test_a_reset_while_blocks_arrive_makes_the_request_compute_them(pair):
    truth = pair.reference.ask(PROMPT)
    pair.tested.ask(PROMPT)
    pair.forget_g1()
    pair.faults.order(hold="onboard")
    before = pair.tested.metrics()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.tested.ask, PROMPT)
        pair.tested.wait_until("a held block", lambda metrics: metrics["vllm:kv_cache_usage_perc"] > 0)
        pair.tested.reset_prefix_cache(external=True)
        pair.faults.order()
        assert_equal({0: answer.result()}, {0: truth})
    pair.settle()
    moved = Moved(before, pair.tested.metrics())
    assert (moved[ONBOARDED], moved[ONBOARDS_FAILED]) == (0, CACHED // BLOCK_TOKENS)


@pytest.mark.soak
def test_requests_that_a_reset_throws_out_are_answered_right(pair):
    """`reset_running_requests` preempts all there is; vLLM says 500 if a copy holds blocks then, and goes on."""
    truth = pair.truth(conversations(6, turns=1, seed=5))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(repeat, asker(pair.tested), list(truth))
        codes = set()
        while not running.done():
            query = {"reset_running_requests": "true", "reset_external": "true"}
            codes.add(pair.tested.http.post("/reset_prefix_cache", params=query).status_code)
            sleep(1.0)
        assert_equal(running.result(), truth)
    assert codes <= {200, 500}


def test_an_engine_that_slept_has_forgotten_and_answers_right(pair):
    """On the CPU vLLM keeps its memory when it sleeps, but it stops, clears both caches, and goes on."""
    truth = pair.reference.ask(PROMPT)
    pair.tested.ask(PROMPT)
    assert pair.tested.http.post("/sleep", params={"level": 1}).status_code == 200
    assert pair.tested.http.post("/wake_up").status_code == 200
    again = pair.tested.ask(PROMPT)
    assert again.cached == 0
    assert_equal({0: again}, {0: truth})


def test_a_client_that_leaves_a_running_request_leaves_nothing_behind(pair):
    with pair.tested.stream(PROMPT, max_tokens=400) as chunks:
        next(chunks)
    pair.settle()
    assert_equal({0: pair.tested.ask(PROMPT)}, {0: pair.reference.ask(PROMPT)})


def test_a_client_that_leaves_while_waiting_leaves_nothing_behind(pair):
    others = conversations(8, turns=1, seed=3)
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(repeat, asker(pair.tested), list(pair.truth(others)))
        pair.tested.wait_until("load", lambda metrics: metrics["vllm:num_requests_running"] > 2)
        for _ in range(4):
            pair.tested.leave(PROMPT, after_s=0.1)
        assert_equal(busy.result(), pair.truth(others))
    pair.settle()


@pytest.mark.parametrize("kind", ["onboard", "offload"])
def test_a_client_that_leaves_while_its_blocks_move_leaves_nothing_behind(pair, kind):
    """Blocks under a copy are not given to others, however long it takes; then all of them come back.

    The other answers are computed before: an idle engine asks for the result of a copy only so many times.
    """
    others = conversations(6, turns=1, seed=5)
    truth = pair.truth(others)
    if kind == "onboard":
        pair.tested.ask(PROMPT)
        pair.forget_g1()
    pair.faults.order(hold=kind)
    pair.tested.leave(PROMPT, after_s=3)
    pair.tested.wait_until("a held block", lambda metrics: metrics["vllm:kv_cache_usage_perc"] > 0)
    held = repeat(asker(pair.tested), list(truth))
    assert not is_at_rest(pair.tested.metrics()), "the copy is not held"
    pair.faults.order()
    assert_equal(held, truth)
    pair.settle()
    before = pair.tested.metrics()[OFFLOADED]
    assert_equal({0: pair.tested.ask(PROMPT)}, {0: pair.reference.ask(PROMPT)})
    assert pair.tested.metrics()[OFFLOADED] >= before


def logprob(entry):
    """Of the one token that an entry of `prompt_logprobs` has."""
    return next(iter(entry.values()))["logprob"]
