"""Engines and disk processes that are killed or stopped while an engine answers: 500 answers, all of them compared.

`nox -s vllm -- tests/vllm/test_kills.py -n 0 -m soak` runs it in V1, `vllm_v2` in V2. With KVBM_WRITE_RESULTS=1 the
results are written to bench/results/<machine>-vllm-kills.json, or -vllm-kills-v2.json.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from random import Random
from threading import Timer

import psutil
import pytest
from engine_process import EngineProcess
from kept_results import KeptResults, row_of
from model_runner import IS_V2
from pairs import Faults
from state_models import BLOCK, COMMON
from traffic import assert_equal, conversations, take_turns
from vllm_server import CONNECTOR
from wandering_engine import WanderingEngine

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]
SESSION, RESULTS = ("vllm_v2", "vllm-kills-v2") if IS_V2 else ("vllm", "vllm-kills")
COMMAND = f"nox -s {SESSION} -- tests/vllm/test_kills.py -n 0 -m soak"
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
    children = psutil.Process(engine._process.pid).children(recursive=True)  # what a user would see in `ps`
    for disk in (child for child in children if "kvbm.tiers.disk.service.server" in child.cmdline()):
        if blow == "kill the disk process":
            disk.kill()
        else:
            disk.send_signal(signal.SIGSTOP)
            Timer(STOPPED_S, os.kill, (disk.pid, signal.SIGCONT)).start()


def test_answers_after_blows_are_those_of_an_engine_without_cache(engine_of, tmp_path):
    plain = engine_of(enable_prefix_caching=False)
    truth = {}
    for first in range(0, len(TALKS), 5):
        truth |= take_turns(plain.answer, TALKS[first : first + 5])
    tiers = {"host": {"blocks": 60}, "disk": {"blocks": 400, "directory": str(tmp_path / "disk")}}
    cache = {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}
    source, results, engine, loaded = Random("kills"), KeptResults(RESULTS, COMMAND), None, 0.0
    for number in range(ROUNDS):
        blow = BLOWS[number % len(BLOWS)]
        engine = engine or engine_of(connector=CONNECTOR, cache=cache)
        if blow == "kill the engine":  # the answers are those of the next one
            timer = Timer(source.uniform(1, 6), strike, (engine, blow))
            timer.start()
            with suppress(AssertionError):  # vLLM ended
                while timer.is_alive():
                    engine.wander(source.sample(list(truth), 5), f"{number} before")
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
