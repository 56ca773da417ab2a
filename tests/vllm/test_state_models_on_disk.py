"""Snapshots on disk outlive vLLM, as attention blocks do; what is damaged, or belongs to other states, is a miss.

The model is Qwen3-Next: three groups with states and one with attention, in blocks of 256 tokens. vLLM for CPUs can
store its states in bfloat16, which it refuses for Mamba-2. The truth is the first answer, under a salt of its own.
"""

import os
import signal
from random import Random

import pytest
from disk_blocks import block_hashes, damage, slots_by_hash
from traffic import assert_equal, tokens
from vllm_server import CONNECTOR, EXTERNAL_HITS, VllmServer

from kvbm.engines.make_model import materialise

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of torch, at vLLM's import
]
BLOCK_TOKENS = 256
BLOCKS = 5
CACHED = BLOCKS * BLOCK_TOKENS
GROUPS = 4
STORED = BLOCKS + GROUPS - 1  # blocks of a prompt: its attention, and a snapshot of each state group
SLOTS = 200
OFTEN, ONCE = (tokens(Random(f"state {number}"), CACHED + 60) for number in range(2))
OFFLOADED, WRITTEN, FETCHED = "kvbm_offload_blocks_d2h", "kvbm_offload_blocks_h2d", "kvbm_onboard_blocks_d2d"
ONBOARDED = "kvbm_onboard_blocks_h2d"
CHECKSUM_FAILURES = "kvbm_disk_checksum_failures"


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def start(directory):
    """Starts a server with the same directory."""

    def start(*arguments, **environment):
        tiers = {"host": {"blocks": 60}, "disk": {"blocks": SLOTS, "directory": str(directory)}}
        contents = {"tiers": tiers, "onboard": {"policy": "always"}}  # however slow a busy machine reads
        return VllmServer(
            materialise("vllm-qwen3-next"),
            *("--dtype", "bfloat16", "--block-size", str(BLOCK_TOKENS)),
            *("--shutdown-timeout", "30"),  # by default vLLM kills the process that would write the rest, at once
            *arguments,
            blocks=40,
            connector=CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}},
            environment=environment,
            max_model_len=2048,
        )

    return start


def answer(server, prompt):
    """The answer of a server that has to find it itself."""
    return server.ask(prompt, 16, cache_salt="truth")


def wait_for(server, name, count):
    """Wait for so many blocks. The disk is looked at in steps, so there are some."""

    def has_come(metrics):
        server.ask((7, 8, 9), 1)
        return metrics[name] >= count

    server.wait_until(f"{count} {name}", has_come)


def use_twice(server):
    """Its second use lets a block through to the disk."""
    offloaded = server.metrics()[OFFLOADED]
    assert server.ask(OFTEN, 16).cached == 0
    wait_for(server, OFFLOADED, offloaded + STORED)
    assert server.reset_prefix_cache(external=False)
    assert server.ask(OFTEN, 16).cached == CACHED
    wait_for(server, WRITTEN, STORED)


def test_snapshots_are_found_after_a_kill_and_after_an_end_in_order(start):
    with start() as server:
        truth = {"often": answer(server, OFTEN), "once": answer(server, ONCE)}
        use_twice(server)
        os.killpg(server.process.pid, signal.SIGKILL)
    with start() as server:
        again = server.ask(OFTEN, 16)
        assert again.cached == CACHED, server.log_tail(200)
        assert_equal({"often": again}, {"often": truth["often"]})
        assert server.hits_by_source() == {"disk": CACHED}
        metrics = server.metrics()
        assert (metrics[FETCHED], metrics[EXTERNAL_HITS]) == (STORED, CACHED)
        assert server.ask(ONCE, 16).cached == 0, "it was never asked for twice"
        wait_for(server, OFFLOADED, STORED)
    with start() as server:
        answers = {"often": server.ask(OFTEN, 16), "once": server.ask(ONCE, 16)}
        assert [found.cached for found in answers.values()] == [CACHED, CACHED]
        assert_equal(answers, truth)
        assert server.hits_by_source() == {"disk": 2 * CACHED}
        assert server.metrics()[CHECKSUM_FAILURES] == 0


@pytest.mark.parametrize("kind", ["snapshot", "attention"])
def test_damaged_blocks_are_misses(start, directory, tmp_path, kind):
    with start() as server:
        truth = {0: answer(server, OFTEN)}
        use_twice(server)
    hashes = block_hashes(OFTEN, BLOCK_TOKENS)
    stored = slots_by_hash(directory, tmp_path)
    (attention,) = (one for one in stored if one.startswith(hashes[0]))
    states = [one for one in stored if one.startswith(hashes[-1]) and one[-1:] != attention[-1:]]
    assert len(states) == GROUPS - 1
    damage(directory, tmp_path, attention if kind == "attention" else states[0], SLOTS)
    with start() as server:
        assert_equal({0: server.ask(OFTEN, 16)}, truth)
        metrics = server.metrics()
        assert metrics[CHECKSUM_FAILURES] == 1
        assert metrics[ONBOARDED] == 0, "a load without one of its blocks is no load; vLLM's metrics still count a hit"
        wait_for(server, OFFLOADED, 1)
        assert server.reset_prefix_cache(external=False)
        again = server.ask(OFTEN, 16)
        assert again.cached == CACHED, "it has been computed and stored again"
        assert_equal({0: again}, truth)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(("--mamba-ssm-cache-dtype", "bfloat16"), {}), ((), {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})],
    ids=["dtype", "layout"],
)
def test_states_of_another_form_are_not_used(start, arguments, environment):
    """They have the same size, if padded, and the same names."""
    with start() as server:
        truth = {0: answer(server, OFTEN)}
        use_twice(server)
    with start(*arguments, **environment) as server:
        other = {0: answer(server, OFTEN)}
        found = server.ask(OFTEN, 16)
        assert found.cached == 0
        assert_equal({0: found}, other)
    with start() as server:
        again = server.ask(OFTEN, 16)
        assert again.cached == CACHED
        assert_equal({0: again}, truth)
