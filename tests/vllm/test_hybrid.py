"""A model with a sliding window: vLLM keeps several KV cache groups for it, which share one pool of blocks.

The connector is started as a user does it who writes vLLM's command line by hand: DynamoConnector and one variable.
"""

import pytest
from pairs import assert_cache_was_used, pair_of
from traffic import assert_equal, conversations
from vllm_server import BLOCK_TOKENS, CONNECTOR, EXTERNAL_HITS

pytestmark = pytest.mark.timeout(900)
PROMPT = range(100, 100 + 7 * BLOCK_TOKENS + 20)  # more than three windows
CACHED = 7 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def pair():
    with pair_of("vllm-swa", blocks=100, host=2000, connector=CONNECTOR) as pair:
        assert "kvbm is disabled" not in pair.tested.log()
        yield pair


def test_answers_with_a_sliding_window_are_those_of_a_server_without_cache(pair):
    _, moved = pair.check(conversations(10, turns=3, seed=2))
    assert_cache_was_used(moved, at_least_blocks=20)


def test_a_prompt_longer_than_the_window_comes_back_whole(pair):
    pair.forget()
    truth = pair.reference.ask(PROMPT)
    assert_equal({0: pair.tested.ask(PROMPT)}, {0: truth})
    pair.forget_g1()
    before = pair.tested.metrics()[EXTERNAL_HITS]
    again = pair.tested.ask(PROMPT)
    assert again.cached == CACHED
    assert pair.tested.metrics()[EXTERNAL_HITS] - before == CACHED
    assert_equal({0: again}, {0: truth})
