"""Blocks on disk outlive an engine of vLLM that ends in order: the next one in the same directory loads them.

test_disk.py and test_processes.py do this with servers, and kill them.
"""

from random import Random

import pytest
from traffic import Request, assert_equal, conversations, take_turns, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR
from waiting import eventually

pytestmark = pytest.mark.timeout(600)
PRESET = "vllm-25m"
TALKS = conversations(6, turns=2, seed=3)
LONG = Request(tokens(Random("restart"), 7 * BLOCK_TOKENS + 9), 8)
SHORT = Request(tokens(Random("short"), 9), 2)
ENGINE = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 2048, "num_gpu_blocks_override": 40}


def test_an_engine_loads_what_the_engine_before_has_written(process, tmp_path):
    engine, _ = process
    engine.start(PRESET, enable_prefix_caching=False, **ENGINE)
    truth = take_turns(engine.answer, TALKS)
    truth |= {LONG: engine.answer([LONG])[0]}
    engine.stop()
    tiers = {"host": {"blocks": 24}, "disk": {"blocks": 200, "directory": str(tmp_path / "disk")}}
    cache = {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}
    for has_blocks in (False, True):
        engine.start(PRESET, connector=CONNECTOR, cache=cache, **ENGINE)
        first = engine.answer([LONG])[0]
        assert engine.totals()["hits"] == 7 * BLOCK_TOKENS * has_blocks
        # On a busy machine, blocks may leave host memory before they are written. A write is counted in a later step.
        if not has_blocks:
            eventually(lambda: engine.answer([SHORT]) and engine.totals()["disk_offload_blocks"] >= 7)
        requests = [request for request in truth if request != LONG]
        answers = dict(zip(requests, engine.answer(requests), strict=True))
        assert_equal({LONG: first, **answers}, truth)
        totals = engine.totals()
        assert totals["evicted_blocks"] > 0, "host memory was never full"
        assert totals["disk_checksum_failures"] == totals["faults"] == 0, totals
        engine.stop()
    assert totals["onboard_disk_blocks"] > 7, totals
