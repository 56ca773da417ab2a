"""Hints of clients in a real vLLM: over HTTP, in vLLM's sessions, and in `kv_hints`, which only its engine API has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from random import Random

import pytest
from traffic import tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer

from kvbm.engines.make_model import materialise

CONTENTS = {"tiers": {"host": {"blocks": 24, "eviction": "adaptive"}}, "offload": {"to_host": "always"}}
HINTED = CONNECTOR | {"kv_connector_extra_config": {"kvbm": CONTENTS}}
BLOCKS = 4
RETAIN = {"retain_s": 1900}

IN_THE_ENGINE = """
import asyncio, json, sys
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

async def main():
    model, connector, prompts, payload = json.loads(sys.argv[1])
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=model, dtype="float32", enforce_eager=True, max_model_len=2048, num_gpu_blocks_override=40,
        kv_transfer_config=connector))
    async def ask(number, prompt, hints=None):
        asked = engine.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, temperature=0), str(number),
                                kv_hints=hints)
        async for output in asked:
            last = output
        return last.num_cached_tokens
    action = KvHintAction("1", "kvbm", "1", payload)
    await ask("hinted", prompts[0], KvHintsEnvelope("1", "1", [action]))
    for number, prompt in enumerate(prompts[1:]):
        await ask(number, prompt)
    await engine.reset_prefix_cache()
    print("found", json.dumps([await ask("again", prompts[0]), await ask("other", prompts[1])]))
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


def prompts(seed: int, count: int) -> list[list[int]]:
    random_ = Random(seed)
    return [tokens(random_, BLOCKS * BLOCK_TOKENS + 10) for _ in range(count)]


@pytest.fixture(scope="module")
def server():
    with VllmServer(materialise("vllm-25m"), blocks=40, connector=HINTED) as running:
        yield running


def cached_after_others(server, prompt, seed, **fields):
    """How many tokens of a prompt are found after others that host memory has no room for."""
    truth = server.ask(prompt, **fields)
    for other in prompts(seed, 8):
        server.ask(other)
    assert server.reset_prefix_cache(external=False)
    again = server.ask(prompt)
    assert again.tokens == truth.tokens
    return again.cached


def test_a_retained_prompt_is_found_and_another_one_is_not(server):
    hinted, plain = prompts(1, 2)
    assert cached_after_others(server, plain, 2) == 0
    fields = {"kv_transfer_params": {"kvbm": RETAIN}}
    assert cached_after_others(server, hinted, 3, **fields) == BLOCKS * BLOCK_TOKENS
    metrics = server.metrics()
    assert (metrics["kvbm_hinted_requests"], metrics["kvbm_invalid_hints"], metrics["kvbm_hints_off"]) == (1, 0, 0)


def test_sessions_of_vllm_are_sessions_and_can_be_ended(server):
    before = server.metrics()["kvbm_hinted_requests"]
    (prompt,) = prompts(4, 1)
    server.ask(prompt, session_id="in the body", kv_transfer_params={"kvbm": RETAIN})
    body = server.request(prompts(5, 1)[0], 4, kv_transfer_params={"kvbm": {"end": ["in the body"]}})
    server.http.post("/v1/completions", json=body, headers={"X-Session-ID": "in the header"}).raise_for_status()
    assert server.metrics()["kvbm_hinted_requests"] == before + 2
    for other in prompts(6, 8):
        server.ask(other)
    assert server.reset_prefix_cache(external=False)
    assert server.ask(prompt).cached == 0


@pytest.mark.parametrize("wrong", [5, "for ever", {"retain_s": []}, {"lock": True}, [RETAIN]])
def test_a_wrong_hint_changes_no_answer(server, wrong):
    (prompt,) = prompts(7, 1)
    before = server.metrics()["kvbm_invalid_hints"]
    truth = server.ask(prompt)
    assert server.ask(prompt, kv_transfer_params={"kvbm": wrong}).tokens == truth.tokens
    assert server.metrics()["kvbm_invalid_hints"] == before + 1


@pytest.mark.slow
def test_kv_hints_of_the_engine_api(tmp_path):
    asked = [materialise("vllm-25m"), HINTED, prompts(8, 9), RETAIN]
    argument = json.dumps([str(asked[0]), *asked[1:]])
    script = tmp_path / "in_the_engine.py"
    script.write_text(IN_THE_ENGINE)
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    ended = subprocess.run(
        [sys.executable, str(script), argument], env=environment, capture_output=True, text=True, timeout=500
    )
    found = [line for line in ended.stdout.splitlines() if line.startswith("found ")]
    assert found, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert json.loads(found[0].removeprefix("found ")) == [BLOCKS * BLOCK_TOKENS, 0]
