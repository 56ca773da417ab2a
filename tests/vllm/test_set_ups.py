"""Engines as users start them by hand: other connectors next to ours, several ranks or engines, inside a process.

Each test starts a server of its own, which takes half a minute. The truth is the first answer of the same server, which
found nothing in a cache.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import psutil
import pytest
from pairs import OFFLOADED, ONBOARDED, ONBOARDS_FAILED, adapters_of
from traffic import Request, asker, assert_equal, repeat, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, EXTERNAL_HITS, VllmServer, host_blocks

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
CACHED = 5 * BLOCK_TOKENS
REQUESTS = [Request(tokens(Random(f"set-up {number}"), CACHED + 60), 8) for number in range(12)]
STOPPED_S = 10.0
IN_PROCESS = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    connector, prompt = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2048, num_gpu_blocks_override=100,
              kv_transfer_config=connector)
    found = []
    for options in ({}, {"reset_connector": True}, {"reset_running_requests": True}):
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1), use_tqdm=False)
        is_reset = llm.reset_prefix_cache(**options)
        (again,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1), use_tqdm=False)
        found.append([is_reset, again.num_cached_tokens])
    print("found", json.dumps(found))
"""


def server(*arguments, connector=CONNECTOR, **options):
    return VllmServer(
        materialise("vllm-25m"),
        *arguments,
        blocks=40,
        max_model_len=2048,
        connector=connector,
        environment=host_blocks(300),
        **options,
    )


def multi(*children):
    parent = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return parent | {"kv_connector_extra_config": {"connectors": children}}


def example(directory):
    """ExampleConnector, which loads synchronously, from files."""
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(directory)}}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both"} | extra


@pytest.mark.parametrize("is_first", [True, False])
def test_another_connector_next_to_ours_in_a_multi_connector(is_first, tmp_path):
    other = example(tmp_path)
    children = [CONNECTOR, other] if is_first else [other, CONNECTOR]
    with server("--max-num-batched-tokens", "2048", connector=multi(*children)) as engine:
        truth = repeat(asker(engine), REQUESTS)
        for _ in range(2):
            assert engine.reset_prefix_cache(external=False)
            assert_equal(repeat(asker(engine), REQUESTS), truth)
        metrics = engine.metrics()
        assert metrics["kvbm_offload_blocks_d2h"] >= 30
        assert (metrics["kvbm_onboard_blocks_h2d"] > 0) == is_first, "the first child with a hit loads it"
        assert metrics[EXTERNAL_HITS] > 0


@pytest.mark.soak
@pytest.mark.parametrize("set_up", ["two ranks", "adapters", "another connector"])
def test_blocks_that_vllm_evicts_come_back_with_on_evict(set_up, tmp_path):
    contents = {"tiers": {"host": {"blocks": 120}}, "offload": {"to_host": "on_evict"}}
    connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}
    arguments = {"two ranks": ("--tensor-parallel-size", "2"), "adapters": adapters_of("ab")}.get(set_up, ())
    if set_up == "another connector":
        connector = multi(connector, example(tmp_path))
    step = "2048" if set_up == "another connector" else "512"  # ExampleConnector wants a whole prompt in a step
    with server("--max-num-batched-tokens", step, *arguments, connector=connector) as engine:

        def ask(request):
            adapter = {"model": "ab"[request.prompt[0] % 2]} if set_up == "adapters" else {}
            return engine.ask(request.prompt, request.max_tokens, **adapter)

        truth = repeat(ask, REQUESTS[:3], concurrency=1)
        assert engine.metrics().get(OFFLOADED, 0) == 0, "G1 has room for more"
        truth |= repeat(ask, REQUESTS[3:], concurrency=1)
        assert [answer.cached for answer in truth.values()] == [0] * len(REQUESTS)
        for _ in range(2):
            assert_equal(repeat(ask, REQUESTS), truth)
        metrics = engine.metrics()
        assert min(metrics[OFFLOADED], metrics[ONBOARDED]) >= 20, metrics
        assert metrics["kvbm_disabled"] == metrics[ONBOARDS_FAILED] == 0


@pytest.mark.parametrize("has_own_process", [False, True])
def test_an_engine_in_the_users_process_resets_right_after_an_answer(has_own_process, tmp_path):
    """Without a process of its own it runs no step after the answer."""
    (program := tmp_path / "program.py").write_text(IN_PROCESS)
    environment = {
        **os.environ,
        **host_blocks(100),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_own_process)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join((str(Path.cwd()), os.environ.get("PYTHONPATH", ""))),
    }
    arguments = [str(materialise("vllm-25m")), json.dumps([CONNECTOR, list(REQUESTS[0].prompt)])]
    ended = subprocess.run([sys.executable, str(program), *arguments], env=environment, capture_output=True, text=True)
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("found ")] or [ended.stderr[-3000:]]
    assert json.loads(line.removeprefix("found ")) == [[True, CACHED], [True, 0], [True, CACHED]]


def ranks_of(engine):
    children = psutil.Process(engine.process.pid).children(recursive=True)
    return sorted((one for one in children if "VLLM::Worker" in " ".join(one.cmdline())), key=lambda one: one.pid)


def test_a_rank_that_is_stopped_for_a_while_delays_answers_and_changes_none():
    with server("--tensor-parallel-size", "2") as engine, ThreadPoolExecutor(1) as pool:
        truth = repeat(asker(engine), REQUESTS)
        for rank in ranks_of(engine):
            answers = pool.submit(repeat, asker(engine), REQUESTS)
            time.sleep(0.3)
            rank.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            assert not answers.done()
            rank.send_signal(signal.SIGCONT)
            assert_equal(answers.result(), truth)
        assert engine.reset_prefix_cache(external=True)
        assert_equal(repeat(asker(engine), REQUESTS), truth)
        metrics = engine.metrics()
        assert metrics["kvbm_onboard_blocks_h2d"] > 0
        assert metrics["kvbm_disabled"] == metrics["kvbm_onboard_failed_blocks"] == 0


def test_two_engines_of_one_server_use_one_directory(tmp_path):
    tiers = {"host": {"blocks": 60}, "disk": {"blocks": 200, "directory": str(tmp_path)}}
    contents = {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}
    connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}
    with server("--data-parallel-size", "2", connector=connector) as engine:
        truth = repeat(asker(engine), REQUESTS)
        for _ in range(3):
            assert engine.reset_prefix_cache(external=False)
            assert_equal(repeat(asker(engine), REQUESTS), truth)
        assert len(list(tmp_path.glob("**/arena"))) == 2
        metrics = engine.metrics()
        assert metrics["kvbm_offload_blocks_h2d"] > 0
        assert metrics["kvbm_onboard_blocks_h2d"] > 0
