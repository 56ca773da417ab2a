"""KvbmTier inside a real vLLM, below its own OffloadingConnector: blocks on disk come back, and never lie.

vLLM's offloading refuses CPUs; bench/peers/native_on_cpu.py replaces its copier. test_secondary_tier.py has the rest.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from threading import Thread

import pytest
from kept_results import KeptResults, row_of
from pairs import MAX_MODEL_LEN
from test_identity_in_vllm import call, differs, kill, models  # noqa: F401  (a fixture)
from traffic import asker, assert_equal, conversations, hold, repeat, tokens, total
from vllm_server import BLOCK_TOKENS, EXTERNAL_HITS, VllmServer

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.timeout(900)]
HERE = Path(__file__).parent
PEERS = HERE.parents[1] / "bench" / "peers"
CACHED = 5 * BLOCK_TOKENS
PROMPTS = [tokens(Random(number), CACHED + 60) for number in range(4)]
MODEL_BLOCK_BYTES = 2 << 20


def offloading(directory, *, rows=16, **options):
    tiers = {"disk": {"blocks": 300, "directory": str(directory)}}
    ours = {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}, **options}
    tier = {"type": "KvbmTier", "module_path": "kvbm.vllm_integration.secondary_tier", "kvbm": ours}
    extra = {"spec_name": "NativeOnCpu", "spec_module_path": "native_on_cpu", "secondary_tiers": [tier]}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "cpu_bytes_to_use": rows * MODEL_BLOCK_BYTES},
    }


def start(directory, model=None, *arguments, rows=16, blocks=40, **keys):
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1], PEERS)))}
    return VllmServer(
        model or materialise("vllm-25m"),
        *("--shutdown-timeout", "30", *arguments),
        blocks=blocks,
        connector=offloading(directory, rows=rows),
        environment=environment,
        **keys,
    )


def test_conversations_are_answered_as_without_a_cache_and_after_a_restart(plain, tmp_path):
    plain.wait_healthy()
    talks = hold(asker(plain), conversations(4, turns=2, seed=7))
    with start(tmp_path) as server:
        assert_equal(repeat(asker(server), list(talks)), talks)
        assert server.reset_prefix_cache(external=False)
        assert_equal(repeat(asker(server), list(talks)), talks)
        hits = server.metrics()[EXTERNAL_HITS]
        assert hits > 0
    with start(tmp_path) as server:
        assert_equal(repeat(asker(server), list(talks)), talks)
        assert server.hits_by_source()["disk"] > 0


@pytest.fixture(scope="module")
def results():
    return KeptResults("vllm-tier-soak", "nox -s vllm -- tests/vllm/test_native_offloading.py -m soak")


@pytest.fixture(scope="module")
def truth():
    with VllmServer(materialise("vllm-25m"), "--no-enable-prefix-caching", max_model_len=MAX_MODEL_LEN) as server:
        return hold(asker(server), conversations(32, turns=4, seed=54))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hundred_and_fifty_answers_are_those_without_a_cache(truth, ranks, results, tmp_path):
    """Conversations with shared beginnings, some with a salt, twice, while other clients hang up."""
    with start(tmp_path, None, "--tensor-parallel-size", str(ranks), rows=24, max_model_len=MAX_MODEL_LEN) as server:

        def ask(request):
            salt = {"cache_salt": "a"} if request.prompt[-1] % 3 == 0 else {}
            return server.ask(request.prompt, request.max_tokens, **salt)

        def hang_up():
            for request in list(truth)[:: len(truth) // 12]:
                server.leave(request.prompt, after_s=0.5)

        comparisons = []
        for _ in range(2):
            leaving = Thread(target=hang_up)
            leaving.start()
            comparisons.append(assert_equal(repeat(ask, list(truth)), truth))
            leaving.join()
        hits = server.hits_by_source()
        assert hits["disk"] > 100 * BLOCK_TOKENS, hits
        results.add({"ranks": ranks, **row_of(total(comparisons)), "hits": hits})


@pytest.mark.soak
@pytest.mark.slow
def test_other_weights_never_answer(models, tmp_path):  # noqa: F811
    model, tuned = models
    disk, prompt = tmp_path / "disk", PROMPTS[0]
    disk.mkdir()
    with start(disk, model) as server:
        old = server.ask(prompt)
        kill(server)
    with start(disk, tuned) as server:
        new = server.ask(prompt)
        assert new.cached == 0
        assert differs(new, old)
        call(server, "reload_weights", weights_path=str(model))
        assert server.reset_prefix_cache(external=True), "vLLM itself keeps what it has in its host memory"
        again = server.ask(prompt)
        assert again.cached == 0
        assert_equal({"prompt": again}, {"prompt": old})
    with start(disk, tuned) as server:
        last = server.ask(prompt)
        assert last.cached == 0, "nothing outlives an engine whose weights have changed"
        assert_equal({"prompt": last}, {"prompt": new})
