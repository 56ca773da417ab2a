"""A latent (MLA) cache. vLLM's reference attention for it on CPUs computes prompts only as a whole.

Its answers after a prompt and its answers after the same tokens one by one are not the same numbers, with no connector
anywhere. What a hit brings back can therefore be compared only with what the same engine said when it came to these
tokens one by one: a request whose prompt is an earlier conversation goes on exactly as that one did.
"""

from random import Random

import pytest
from traffic import tokens
from vllm_server import CONNECTOR, EXTERNAL_HITS, VllmServer, host_blocks

from kvbm_cli.make_model import materialise

BLOCK_TOKENS = 16  # the only size of that attention
TALKS = [(tokens(Random(seed), length), 64) for seed, length in enumerate((500, 200, 1000, 77))]


@pytest.fixture(scope="module")
def server():
    model = materialise("vllm-mla")
    with VllmServer(model, blocks=200, connector=CONNECTOR, environment=host_blocks(600), max_model_len=2048) as server:
        yield server


def test_a_conversation_that_comes_back_goes_on_as_it_did(server):
    before = server.metrics()
    originals = [server.ask(prompt, count) for prompt, count in TALKS]
    server.wait_until("all blocks on the host", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
    cached = 0
    for (prompt, _), original in zip(TALKS, originals, strict=True):
        whole = (len(prompt) + 40) // BLOCK_TOKENS * BLOCK_TOKENS
        for length in (whole, whole + 1):  # of the first, vLLM computes the last token again
            known = length - len(prompt)
            again = server.ask((*prompt, *original.tokens[:known]), 8)
            assert again.tokens == original.tokens[known : known + 8]
            assert again.logprobs == original.logprobs[known : known + 8]
            assert again.cached == whole
            cached += whole
    assert server.metrics()[EXTERNAL_HITS] - before.get(EXTERNAL_HITS, 0.0) == cached


def test_a_hit_after_which_more_than_a_token_is_left_is_not_taken(server):
    prompt = tokens(Random(9), 300)
    first = server.ask(prompt, 8)
    server.wait_until("all blocks on the host", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
    again = server.ask(prompt, 8)
    assert again.cached == 0
    assert again.tokens == first.tokens
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)
