"""Embedded engines on a real Mooncake Store: one finds what another computed, and no fault of the store stops it."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "shared"))

from kvbm_engine import assert_same, prompt, running
from mooncake_pool import mooncake_pool, wait_until

from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.object_store import Outgoing
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.stores.open import open_store

pytest.importorskip("mooncake.store", exc_type=ImportError)
pytestmark = pytest.mark.servers

SIZE = {"num_blocks": 100, "max_model_len": 1024}


@pytest.fixture
def pool(tmp_path):
    with mooncake_pool(tmp_path) as pool:
        store = open_store(pool.url, 1, KeySpace(bytes(16)), {}, writes=False)
        wait_until(lambda: store.put([Outgoing("first", [b"x"])])[0].outcome is Outcome.GOOD, "an owner is there")
        store.close()
        yield pool


def on(pool):
    always = {"offload": {"to_shared": "always"}, "onboard": {"policy": "always"}}
    return running(host_blocks=100, shared={"url": pool.url, "drain_s": 1}, **SIZE, **always)


def answers_without_cache(prompts):
    with running(**SIZE) as plain:
        return [plain.ask(one).said() for one in prompts]


def test_the_first_request_of_an_engine_hits_what_another_computed(pool):
    wanted = answers_without_cache([prompt(1, 600)])
    with on(pool) as first:
        said = [first.ask(prompt(1, 600)).said()]
        first.settle()
        assert first.counters.shared.offload_blocks > 0
        with on(pool) as second:
            said.append(second.ask(prompt(1, 600)).said())
            assert second.counters.shared.fetched_blocks > 0
    assert_same(said, wanted * 2)


@pytest.mark.parametrize("victim", ["owner", "master"])
@pytest.mark.parametrize("event", ["kill", "stop"])
def test_engines_answer_the_same_while_the_store_does_not(pool, victim, event):
    prompts = [prompt(number % 2, 600) for number in range(4)]
    wanted = answers_without_cache(prompts)
    with on(pool) as first:
        said = [first.ask(one).said() for one in prompts]
        first.settle()
        with on(pool) as second:
            getattr(pool, event)(getattr(pool, victim))
            said += [second.ask(one).said() for one in prompts]
            said += [first.ask(one).said() for one in prompts]
    assert_same(said, wanted * 3)
