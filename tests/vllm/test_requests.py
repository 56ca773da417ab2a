"""Requests that vLLM treats apart: those that read no cache, prompts of embeddings, and requests for embeddings."""

import base64
import io
from random import Random

import pytest
import torch
from pairs import Moved, pair_of
from traffic import TOLERANCE, assert_equal, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, EXTERNAL_HITS, answer_of

from kvbm.engines.make_model import MODELS

pytestmark = pytest.mark.timeout(900)
PROMPT = range(100, 100 + 3 * BLOCK_TOKENS + 60)
CACHED = 3 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def pair():
    with pair_of("vllm-25m", "--enable-prompt-embeds", blocks=40, connector=CONNECTOR) as pair:
        yield pair


def moved_by(pair, ask):
    """What `ask` returns, and what it moved."""
    before = pair.tested.metrics()
    answer = ask()
    pair.settle()
    return answer, Moved(before, pair.tested.metrics())


def embedded(seed):
    tensor = torch.randn(len(PROMPT), MODELS["vllm-25m"]["hidden_size"], generator=torch.Generator().manual_seed(seed))
    buffer = io.BytesIO()
    torch.save(tensor * MODELS["vllm-25m"]["initializer_range"], buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def answer_to(server, embeddings):
    request = server.request([], 8, prompt_embeds=embeddings) | {"prompt": None}
    body = server.http.post("/v1/completions", json=request).raise_for_status().json()
    return answer_of(body["choices"][0], body)


def test_prompts_of_embeddings_are_found_again_by_their_content(pair):
    """All have equal token ids, and vLLM's block hashes contain the embeddings."""
    pair.forget()
    one, other = embedded(1), embedded(2)
    truth = {name: answer_to(pair.reference, name) for name in (one, other)}
    assert truth[one].tokens != truth[other].tokens
    first = answer_to(pair.tested, one)
    pair.forget_g1()
    different = answer_to(pair.tested, other)
    pair.forget_g1()
    again = answer_to(pair.tested, one)
    assert (first.cached, different.cached, again.cached) == (0, 0, CACHED)
    assert_equal({0: first, 1: different, 2: again}, {0: truth[one], 1: truth[other], 2: truth[one]})


@pytest.fixture(scope="module")
def poolers():
    arguments = ("--runner", "pooling", "--convert", "embed")
    with pair_of("vllm-25m", *arguments, blocks=40, connector=CONNECTOR) as pair:
        assert "kvbm is disabled" not in pair.tested.log()
        yield pair


def pooled(server, task, prompt):
    request = {"model": server.model, "task": task, "input": list(prompt)}
    answer = server.http.post("/pooling", json=request)
    assert answer.status_code == 200, answer.text
    return torch.tensor(answer.json()["data"][0]["data"])


def test_the_embedding_of_a_prompt_is_that_of_an_engine_without_cache(poolers):
    poolers.forget()
    truth = pooled(poolers.reference, "embed", PROMPT)
    for hits in (0, CACHED):
        found, moved = moved_by(poolers, lambda: pooled(poolers.tested, "embed", PROMPT))
        assert moved[EXTERNAL_HITS] == hits, str(moved)
        assert torch.allclose(found, truth, atol=TOLERANCE)
        poolers.forget_g1()


# -- many --------------------------------------------------------------------------------------------------------------

REQUESTS, CONTENTS = 100, 20
LEAST_HITS = 40 * CACHED  # usual: 60 and more


def hits_of_many(pair, ask, assert_right):
    """Ask for contents by number, in an order by chance, and forget G1 after each five. Return the tokens from kvbm."""
    pair.forget()
    hits = 0.0
    for number, content in enumerate(Random(38).choices(range(CONTENTS), k=REQUESTS)):
        if number % 5 == 0:
            pair.forget_g1()
        found, moved = moved_by(pair, lambda content=content: ask(content))
        assert_right(content, found)
        hits += moved[EXTERNAL_HITS]
    print(f"{REQUESTS} requests, {hits:g} tokens from kvbm")
    return hits


def prompt_of(content):
    return tokens(Random(f"prompt {content}"), len(PROMPT))


@pytest.mark.soak
def test_many_prompts_of_embeddings_are_answered_right(pair):
    truth = [answer_to(pair.reference, embedded(content)) for content in range(CONTENTS)]

    def assert_right(content, found):
        assert_equal({0: found}, {0: truth[content]})

    assert hits_of_many(pair, lambda content: answer_to(pair.tested, embedded(content)), assert_right) >= LEAST_HITS


@pytest.mark.soak
def test_many_requests_with_and_without_logprobs_of_the_prompt_are_answered_right(pair):
    """Every second content is asked with them: it is computed, and its blocks are loaded for nobody."""

    def ask(server, content):
        body = server.completion(prompt_of(content), **({"prompt_logprobs": 0} if content % 2 else {}))
        choice = body["choices"][0]
        of_prompt = [next(iter(one.values()))["logprob"] for one in (choice.get("prompt_logprobs") or [])[1:]]
        return answer_of(choice, body), torch.tensor(of_prompt)

    truth = [ask(pair.reference, content) for content in range(CONTENTS)]

    def assert_right(content, found):
        assert_equal({0: found[0]}, {0: truth[content][0]})
        assert torch.allclose(found[1], truth[content][1], atol=TOLERANCE)
        assert len(found[1]) == (len(PROMPT) - 1 if content % 2 else 0)

    assert hits_of_many(pair, lambda content: ask(pair.tested, content), assert_right) >= LEAST_HITS / 2


@pytest.mark.soak
def test_many_embeddings_of_prompts_are_those_of_an_engine_without_cache(poolers):
    truth = [pooled(poolers.reference, "embed", prompt_of(content)) for content in range(CONTENTS)]

    def assert_right(content, found):
        assert torch.allclose(found, truth[content], atol=TOLERANCE)

    hits = hits_of_many(poolers, lambda content: pooled(poolers.tested, "embed", prompt_of(content)), assert_right)
    assert hits >= LEAST_HITS
