"""Blocks on disk outlive vLLM, however it ends: three servers, one after the other, on one directory.

test_processes.py has two that `kvbm serve` starts, test_restart_in_vllm.py is the short form.
"""

import os
import signal
from random import Random

import pytest
from traffic import assert_equal, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, EXTERNAL_HITS, VllmServer

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
CACHED = 5 * BLOCK_TOKENS
OFTEN, ONCE = (tokens(Random(number), CACHED + 60) for number in range(2))
WRITTEN, FETCHED = "kvbm_offload_blocks_h2d", "kvbm_onboard_blocks_d2d"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a server with the same directory, as somebody does who writes vLLM's command line."""
    tiers = {"host": {"blocks": 60}, "disk": {"blocks": 200, "directory": str(tmp_path_factory.mktemp("disk"))}}
    contents = {"tiers": tiers, "onboard": {"policy": "always"}}  # however slow a busy machine reads
    connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}
    arguments = ("--shutdown-timeout", "30")  # by default vLLM kills the process that would write the rest, at once
    return lambda: VllmServer(materialise("vllm-25m"), *arguments, blocks=40, connector=connector)


def kill(server):
    """All of it at once."""
    os.killpg(server.process.pid, signal.SIGKILL)


def test_what_was_written_is_found_after_a_kill_and_what_was_not_after_an_end_in_order(start):
    with start() as server:
        truth = {"often": server.ask(OFTEN), "once": server.ask(ONCE)}
        assert [answer.cached for answer in truth.values()] == [0, 0]
        server.wait_until("rest", lambda metrics: metrics["kvbm_offload_blocks_d2h"] >= 10)
        assert server.reset_prefix_cache(external=False)
        assert server.ask(OFTEN).cached == CACHED  # its second use lets it through to the disk
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= CACHED // BLOCK_TOKENS)
        assert server.hits_by_source() == {"host": CACHED}
        kill(server)
    with start() as server:
        again = server.ask(OFTEN)
        assert again.cached == CACHED
        assert_equal({"often": again}, {"often": truth["often"]})
        assert server.hits_by_source() == {"disk": CACHED}
        metrics = server.metrics()
        assert (metrics[FETCHED], metrics[EXTERNAL_HITS]) == (CACHED // BLOCK_TOKENS, CACHED)
        assert metrics["kvbm_disk_cache_hit_rate"] == 1.0
        once = server.ask(ONCE)
        assert once.cached == 0, "it was never asked for twice"
        assert_equal({"once": once}, {"once": truth["once"]})
        server.wait_until("rest", lambda metrics: metrics["kvbm_offload_blocks_d2h"] >= CACHED // BLOCK_TOKENS)
    with start() as server:  # the one before was stopped in order, which wrote the rest
        answers = {"often": server.ask(OFTEN), "once": server.ask(ONCE)}
        assert [answer.cached for answer in answers.values()] == [CACHED, CACHED]
        assert_equal(answers, truth)
        assert server.hits_by_source() == {"disk": 2 * CACHED}
        assert server.metrics()["kvbm_disk_checksum_failures"] == 0
        assert server.reset_prefix_cache(external=True)
        assert server.ask(OFTEN).cached == 0
