"""A bug of the leader in a vLLM that serves: requests that wait for a load are answered, and vLLM runs on."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
from pairs import ONBOARDED, adapters_of, pair_of
from traffic import asker, assert_equal, conversations, repeat

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]  # starts two servers, which takes long on a busy machine


def test_an_exception_while_loads_wait_stops_no_request_and_turns_the_cache_off(plain):
    talks = conversations(6, turns=2)
    with pair_of("vllm-25m", *adapters_of("ab"), blocks=40, reference=plain) as pair, ThreadPoolExecutor(1) as pool:
        truth = pair.truth(talks)
        pair.check(talks)
        pair.forget_g1()
        pair.faults.order(hold="onboard")
        answers = pool.submit(repeat, asker(pair.tested), list(truth))
        sleep(3)
        assert not answers.done(), "no request waits for a load"
        pair.faults.order(hold="onboard", bug="settle")
        assert_equal(answers.result(120), truth)
        pair.faults.order()
        pair.settle()  # no G1 block stays held after the copies have ended
        found = pair.tested.metrics()
        assert found["kvbm_disabled"] == 1
        assert found["kvbm_faults"] >= 1
        _, moved = pair.check(talks)
        assert moved[ONBOARDED] == 0
