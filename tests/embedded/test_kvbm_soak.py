"""Hundreds of requests with one percent of all copies failing: every output equal, nothing left over, memory flat."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from bookkeeping import check_leader
from kvbm_engine import assert_same, prompt, running

from kvbm.types import Tier

pytestmark = pytest.mark.soak
USERS = 8
TURNS = 40


def conversations(engine) -> list[list[tuple[int, float]]]:
    def talk(user: int) -> list[int]:
        randomness, said, history = random.Random(user), [], prompt(user, 200, shared=96)
        for turn in range(TURNS):
            answer = engine.ask(history, max_tokens=randomness.randrange(8, 40))
            said += answer.said()
            history = history + answer.tokens + prompt(1000 * user + turn, randomness.randrange(8, 60))
            if len(history) > 500:
                history = prompt(user, 200, shared=96)
        return said

    with ThreadPoolExecutor(USERS) as pool:
        return list(pool.map(talk, range(USERS)))


@pytest.mark.parametrize("kv_layout", ["block_first", "layer_first"])
def test_hundreds_of_requests_under_failing_copies(kv_layout):
    with running(host_blocks=None, num_blocks=60) as engine:
        expected = conversations(engine)
    with running(host_blocks=600, num_blocks=60, kv_layout=kv_layout) as engine:
        randomness = random.Random(1)
        for call in range(100_000):
            if randomness.random() < 0.01:
                engine.copier.at(call, randomness.choice(["fail", "short", "die", "odd"]))
        memory_bytes = []
        for _ in range(4):
            assert_same(conversations(engine), expected)
            engine.settle()
            check_leader(engine.leader)
            memory_bytes.append(psutil.Process().memory_info().rss)
        counters = engine.counters
        assert counters.onboard_blocks > 1000
        assert counters.offload_failed_blocks + counters.onboard_failed_blocks > 0
        assert engine.leader.blocks()[Tier.HOST]["pinned"] == engine.leader.blocks()[Tier.HOST]["moving"] == 0
        assert memory_bytes[-1] < memory_bytes[1] + 16 * 2**20, memory_bytes
