"""Engines and disk processes that are killed or stopped while an engine answers: 500 answers, all of them compared.

`nox -s vllm -- tests/vllm/test_kills.py -n 0 -m soak` runs it in V1, `vllm_v2` in V2. With KVBM_WRITE_RESULTS=1 the
results are written to bench/results/<machine>-vllm-kills.json, or -vllm-kills-v2.json.
"""

from __future__ import annotations

import signal
from random import Random
from threading import Timer

import pytest
from engine_process import EngineProcess
from kept_results import KeptResults, row_of
from pairs import Faults
from state_models import BLOCK, COMMON
from traffic import Request, assert_equal, conversations, take_turns_in_groups
from vllm_server import CONNECTOR, disk_process
from waiting import eventually
from wandering_engine import WanderingEngine

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]
COMMAND = "nox -s vllm -- tests/vllm/test_kills.py -n 0 -m soak"
TALKS = conversations(25, turns=4, seed=29, block_tokens=BLOCK)
BLOWS = ("kill the engine", "kill the disk process", "stop the disk process")
ROUNDS, ASKED = 25, 20
ENGINE = COMMON | {"dtype": "float32", "num_gpu_blocks_override": 30}
STOPPED_S = 3.0  # longer than reads may take


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Starts a process with an engine, after the one before has ended."""
    processes = []

    def end() -> None:
        if processes:
            processes.pop().__exit__()

    def start(**options: object) -> EngineProcess:
        end()
        directory = tmp_path_factory.mktemp("killed")
        processes.append(EngineProcess(directory, Faults(directory).path, kind=WanderingEngine))
        processes[-1].start("vllm-25m", **ENGINE, **options)
        return processes[-1]

    yield start
    end()


def strike(engine: EngineProcess, blow: str) -> None:
    if blow == "kill the engine":
        engine.kill()
        return
    disk = eventually(lambda: disk_process(engine.pid))  # after one was killed, the next one starts later
    if blow == "kill the disk process":
        disk.kill()
    else:
        disk.send_signal(signal.SIGSTOP)
        Timer(STOPPED_S, disk.send_signal, (signal.SIGCONT,)).start()


def wander_on(engine: EngineProcess, source: Random, requests: list[Request], seed: str) -> None:
    while True:
        engine.wander(source.sample(requests, 5), seed)


def test_answers_after_blows_are_those_of_an_engine_without_cache(engine_of, tmp_path):
    plain = engine_of(enable_prefix_caching=False)
    truth = take_turns_in_groups(plain.answer, TALKS)
    tiers = {"host": {"blocks": 60}, "disk": {"blocks": 400, "directory": str(tmp_path / "disk")}}
    cache = {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}
    source, results, engine, loaded = Random("kills"), KeptResults("vllm-kills", COMMAND), None, 0.0
    for number in range(ROUNDS):
        blow = BLOWS[number % len(BLOWS)]
        engine = engine or engine_of(connector=CONNECTOR, cache=cache)
        if blow == "kill the engine":  # the answers are those of the next one
            timer = Timer(source.uniform(1, 6), strike, (engine, blow))
            timer.start()
            with pytest.raises(AssertionError, match="vLLM ended"):
                wander_on(engine, source, list(truth), f"{number} before")
            timer.join()
            engine = engine_of(connector=CONNECTOR, cache=cache)
        else:
            timer = Timer(source.uniform(0, 4), strike, (engine, blow))
            timer.start()
        before = engine.totals().get("hits", 0)
        asked = source.sample(list(truth), ASKED)
        answers = dict(zip(asked, engine.wander(asked, str(number)), strict=True))
        timer.join()
        comparison = assert_equal(answers, {request: truth[request] for request in asked})
        hits = engine.totals()["hits"] - before
        assert engine.totals().get("faults", 0) == 0
        loaded += hits
        print(number, blow, comparison, f"{hits:.0f} tokens loaded", engine.totals().get("onboard_disk_blocks"))
        results.add({"round": number, "blow": blow, **row_of(comparison), "tokens_loaded": hits})
    assert loaded > 0, "nothing was loaded"
