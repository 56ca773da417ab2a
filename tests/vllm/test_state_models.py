"""Models with states (Mamba-2, gated delta nets): a hit needs attention blocks and the snapshot at its end.

Every answer is compared with an engine that has neither connector nor prefix caching. With these weights a state
remembers; the last test of each model shows that a snapshot that was not loaded changes the answers.
"""

from __future__ import annotations

from random import Random

import pytest
from state_models import BLOCK, MODELS, SMALL, CheckedEngine, noise_of, right_answers, start_tested
from traffic import Request, conversations, tokens

pytestmark = pytest.mark.timeout(600)
TALKS = conversations(10, turns=4, seed=7, block_tokens=BLOCK)
ENDS_AT_BLOCK = [Request(tokens(Random(f"length {length}"), length), 8) for length in (255, 256, 257)]
PREFIX = tokens(Random("prefix"), 2 * BLOCK + 10)
BRANCHES = [Request(PREFIX + tokens(Random(f"branch {number}"), 90 + 40 * number), 8) for number in range(3)]
PROMPTS = [Request(tokens(Random(f"prompt {number}"), 210), 16) for number in range(6)]
GROWING = [Request(tokens(Random(f"growing {number}"), 9), 190) for number in range(6)]


SHORT = ("vllm-qwen3-next", "vllm-mamba2")  # the second has no attention


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in SHORT else pytest.mark.soak) for name in MODELS],
)
def model(request, process):
    engine, faults = process
    truth = right_answers(engine, request.param, TALKS, (*ENDS_AT_BLOCK, *BRANCHES, *PROMPTS, *GROWING))
    noise = noise_of(engine, request.param, truth, GROWING)
    blocks, host_blocks = SMALL[request.param]
    start_tested(engine, request.param, blocks=blocks, cache={"tiers": {"host": {"blocks": host_blocks}}})
    yield CheckedEngine(engine, faults, truth, request.param, noise)
    engine.stop()


@pytest.fixture
def tested(model):
    yield model
    model.faults.order()
    model.engine.rest()
    model.engine.forget()


def turns(tested):
    """The 40 requests of the conversations."""
    return list(tested.truth)[: len(TALKS) * len(TALKS[0].said)]


def test_forty_answers_are_those_of_an_engine_without_cache(tested):
    moved = tested.check(turns(tested))
    assert moved["hits"] >= 1000, moved
    assert moved["snapshots"] >= 10, moved
    assert moved["evicted_blocks"] > 0, "host memory was never full"


def test_a_prompt_that_ends_at_a_block_comes_back_up_to_its_last_token(tested):
    """vLLM computes the last token again, and a state must not contain it yet."""
    tested.check(ENDS_AT_BLOCK)
    tested.engine.forget_g1()
    moved = tested.check(ENDS_AT_BLOCK)
    assert moved["hits"] == (3 + 3 + 4) * BLOCK, moved


def test_the_third_request_with_a_prefix_hits_it(tested):
    """The second one finds blocks but no snapshot at the end of the prefix, and leaves one there. Without attention
    there are no blocks to find."""
    found = []
    for request in BRANCHES:
        found.append(tested.check([request])["hits"])
        tested.engine.forget_g1()
    assert found == [0, 0, 0 if tested.preset == "vllm-mamba2" else 2 * BLOCK]


def test_preempted_requests_are_answered_right(tested):
    moved = tested.check(GROWING, concurrency=len(GROWING))
    assert moved["preemptions"] > 0, moved


def test_copies_that_fail_are_recomputed(tested):
    tested.faults.order(fail_every=10)
    moved = tested.check(turns(tested))
    assert moved["snapshots"] > 0, moved
    assert moved["offload_failed_blocks"] > 0, moved
    assert moved["onboard_failed_blocks"] > 0, moved


@pytest.mark.parametrize("kind", ["onboard", "offload"])
def test_a_request_aborted_while_its_blocks_move_leaves_nothing_behind(tested, kind):
    request, others = PROMPTS[0], ENDS_AT_BLOCK
    if kind == "onboard":
        tested.check([request])
        tested.engine.forget_g1()
    tested.faults.order(hold=kind)
    aborted = tested.engine.add(request)
    tested.engine.step(20)
    tested.engine.abort(aborted)
    answers = tested.answer(others, 1)
    assert tested.engine.totals()["usage"] > 0, "the copy is not held"
    tested.faults.order()
    tested.assert_equal(answers)
    tested.engine.rest()
    assert tested.engine.totals()["usage"] == 0
    tested.check([request])


def test_a_snapshot_that_is_left_out_is_noticed(tested):
    """The equality above can fail: here the attention blocks of a hit are loaded, and the state is another prompt's."""
    tested.check(PROMPTS)
    tested.engine.forget_g1()
    tested.faults.order(leave_out="snapshots")
    before = tested.engine.totals()
    comparison = tested.compare(tested.answer(PROMPTS))
    after = tested.engine.totals()
    assert after["hits"] - before["hits"] == len(PROMPTS) * 3 * BLOCK
    assert after["snapshots"] == before["snapshots"]
    assert len(comparison.wrong) >= len(PROMPTS) // 2, comparison
