"""`/pause?mode=keep` and `/sleep?mode=keep` of a real vLLM while a load is under way."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from model_runner import IS_V2
from traffic import assert_equal, tokens
from vllm_server import BLOCK_TOKENS, FAULTS_FILE, FAULTY_CONNECTOR, VllmServer, host_blocks

from kvbm.engines.make_model import materialise
from kvbm.engines.vllm.waiting_requests import preempt_waiting

TRIES, RUNNING_TOKENS = 4, 30 if IS_V2 else 100
PROMPTS = [tokens(Random(number), 8 * BLOCK_TOKENS + 60) for number in range(3)]
PAUSES = ("/pause?mode=keep", "/sleep?level=1&mode=keep")


def hold(faults: Path, what: str | None) -> None:
    """Change the file at once: the engine reads it in each step."""
    new = faults.with_suffix(".new")
    new.write_text(json.dumps({"hold": what} if what else {}))
    new.replace(faults)


class Cache:
    def __init__(self) -> None:
        self.freed: list[str] = []

    def free(self, request: SimpleNamespace) -> None:
        self.freed.append(request.request_id)


@pytest.mark.parametrize(
    ("pause", "ended", "freed"),
    [
        ("PAUSED_ALL", {"loading"}, ["loading", "loaded"]),
        ("PAUSED_ALL", set(), []),  # its copy may still write
        ("UNPAUSED", {"loading"}, []),
    ],
)
def test_waiting_requests_lose_their_blocks_only_if_nothing_writes_to_them(pause, ended, freed):
    def request(name: str, status: str) -> SimpleNamespace:
        return SimpleNamespace(request_id=name, status=SimpleNamespace(name=status), num_computed_tokens=128)

    loading, loaded = request("loading", "WAITING_FOR_REMOTE_KVS"), request("loaded", "WAITING")
    requests = [loading, loaded, request("running", "RUNNING")]
    scheduler = SimpleNamespace(
        pause_state=SimpleNamespace(name=pause),
        requests={one.request_id: one for one in requests},
        kv_holding_waiting=[loading, loaded],
        finished_recving_kv_req_ids=set(ended),
        failed_recving_kv_req_ids=set(),
        kv_cache_manager=Cache(),
    )
    preempt_waiting(scheduler)
    assert scheduler.kv_cache_manager.freed == freed
    assert [one.request_id for one in requests if not one.num_computed_tokens] == freed
    assert scheduler.failed_recving_kv_req_ids == {"loading"} & set(freed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_pause_that_keeps_requests_succeeds_while_a_load_is_under_way(tmp_path):
    faults = tmp_path / "faults"
    hold(faults, None)
    environment = host_blocks(300) | {FAULTS_FILE: str(faults)}
    with (
        VllmServer(materialise("vllm-25m"), blocks=60, connector=FAULTY_CONNECTOR, environment=environment) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        truth = [server.ask(prompt) for prompt in PROMPTS]
        for number in range(TRIES):
            again = [server.ask(prompt) for prompt in PROMPTS]  # their blocks are offloaded again after each reset
            assert_equal(dict(enumerate(again)), dict(enumerate(truth)))
            server.wait_until("copies", lambda metrics: metrics["kvbm_host_blocks"] > 0)
            time.sleep(0.3)
            assert server.reset_prefix_cache(external=False)
            hold(faults, "onboard")
            running = pool.submit(server.ask, tokens(Random(99 + number), 40), RUNNING_TOKENS)
            waiting = [pool.submit(server.ask, prompt) for prompt in PROMPTS[:2]]
            server.wait_until("waiting", lambda metrics: metrics["vllm:num_requests_waiting"] >= 2)
            pause = pool.submit(server.http.post, PAUSES[number % 2])
            time.sleep(0.2 * (number % 3))
            hold(faults, None)
            assert pause.result().status_code == 200, f"{pause.result().text}\n{server.log_tail()}"
            assert server.http.post("/resume" if number % 2 == 0 else "/wake_up").status_code == 200
            assert_equal(dict(enumerate(one.result() for one in waiting)), dict(enumerate(truth[:2])))
            running.result()
