"""Two pipeline stages, each with half of the layers and a host segment of its own."""

import pytest
from model_runner import IS_V2
from pairs import OFFLOADS_FAILED, ONBOARDS_FAILED, assert_cache_was_used, pair_of
from traffic import conversations

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_V2, reason="V1 for CPUs: GPUModelRunner.sync_and_gather_intermediate_tensors asserts"),
]
STAGES = ("--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp")
TALKS = conversations(8, turns=2, seed=12)


@pytest.fixture(scope="module")
def pair(plain):
    with pair_of("vllm-25m", blocks=24, tested_arguments=STAGES, reference=plain) as pair:
        assert pair.tested.log().count("kvbm: rank") == 2
        yield pair


def test_answers_of_two_stages_are_those_of_one_without_a_cache(pair):
    _, moved = pair.check(TALKS)
    assert_cache_was_used(moved, at_least_blocks=4)


def test_copies_that_fail_in_a_stage_are_computed_again(pair):
    pair.faults.order(fail_every=10)
    try:
        _, moved = pair.check(TALKS)
    finally:
        pair.faults.order()
    assert moved[OFFLOADS_FAILED] + moved[ONBOARDS_FAILED] > 0, str(moved)
