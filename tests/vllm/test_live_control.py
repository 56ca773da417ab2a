"""Live control of a real vLLM: idle, under load, paused, and while the disk process is stopped."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
from kept_results import KeptResults
from traffic import tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer, host_blocks, stopped_disk
from waiting import eventually

from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.make_model import materialise

PROMPT = tokens(Random(5), 4 * BLOCK_TOKENS + 10)
IDLE_S = 60.0
KEPT = KeptResults(
    "vllm-live-control", ".venv/bin/python -m pytest -n 0 -m soak tests/vllm/test_live_control.py", key="case"
)


def control(directory: Path, **message: str) -> dict:
    (path,) = directory.glob("control-*.sock")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(json.dumps(message).encode() + b"\n")
        received = b""
        while more := connection.recv(1 << 16):
            received += more
    return json.loads(received)


def blocks(directory: Path) -> dict[str, int]:
    tiers = control(directory, verb="ls")["answer"]["tiers"]
    return {tier["tier"]: tier["states"]["evictable"] + tier["states"]["pinned"] for tier in tiers}


def is_on(directory: Path) -> bool:
    tiers = control(directory, verb="ls")["answer"]["tiers"]
    return next(tier["is_on"] for tier in tiers if tier["tier"] == "G3")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory, disk = tmp_path_factory.mktemp("control"), tmp_path_factory.mktemp("disk")
    environment = host_blocks(60) | {
        CONTROL_VARIABLE: str(directory),
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "100",
        "DYN_KVBM_DISK_CACHE_DIR": str(disk),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
    }
    with VllmServer(materialise("vllm-25m"), blocks=40, connector=CONNECTOR, environment=environment) as running:
        yield running, directory


def filled(running: VllmServer, directory: Path) -> None:
    """Put the prompt into host memory and on disk. Blocks that host memory has already would not be written to disk."""
    control(directory, verb="clear")
    running.reset_prefix_cache(external=False)
    running.ask(PROMPT)
    running.wait_until("disk", lambda metrics: metrics["kvbm_disk_blocks"] and blocks(directory)["G3"] >= 4)


def test_an_engine_that_has_been_idle_answers_and_clears(server):
    running, directory = server
    filled(running, directory)
    time.sleep(3)  # vLLM's core blocks on its queue at once
    assert blocks(directory) == {"G2": 4, "G3": 4}
    answer = control(directory, verb="clear")
    assert answer["answer"] == {"forgotten": {"G2": 4, "G3": 4}, "not_durable": ""}
    assert blocks(directory) == {"G2": 0, "G3": 0}


def test_an_engine_under_load_answers_every_message_or_says_why_not(server):
    running, directory = server
    ended = threading.Event()

    def load() -> None:
        random_ = Random(6)
        while not ended.is_set():
            running.ask_all([tokens(random_, 2 * BLOCK_TOKENS + 5) for _ in range(4)], max_tokens=16)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        answers = [control(directory, verb="ls") for _ in range(30)]
        control(directory, verb="clear")
    finally:
        ended.set()
        thread.join()
    assert all(("answer" in one) != ("refused" in one) for one in answers)
    assert sum("answer" in one for one in answers) > 0


def test_a_paused_engine_answers(server):
    running, directory = server
    running.http.post("/pause?mode=keep").raise_for_status()
    try:
        assert "answer" in control(directory, verb="ls")
    finally:
        running.http.post("/resume").raise_for_status()


def test_a_stopped_disk_process_holds_up_neither_the_answer_nor_the_engine(server):
    running, directory = server
    filled(running, directory)
    with stopped_disk(running.process.pid):
        assert blocks(directory)["G3"] >= 4
        answer = control(directory, verb="clear", tier="G3")["answer"]
        assert answer["forgotten"]["G3"] >= 4
        assert answer["not_durable"]
        assert blocks(directory)["G3"] == 0
        running.ask(PROMPT)
    eventually(lambda: is_on(directory))  # each message is a step, in which the answer of the disk is noticed


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("is_stopped", [False, True], ids=["the disk works", "the disk process is stopped"])
@pytest.mark.parametrize("verb", ["ls", "prefetch", "clear"])
def test_an_engine_that_has_been_idle_for_a_minute_answers(server, verb, is_stopped):
    """The time is written down. On a busy machine, an answer that needs longer than a second is a refusal."""
    running, directory = server
    filled(running, directory)
    message = {"verb": verb, **({"tokens": words(PROMPT)} if verb == "prefetch" else {})}
    with stopped_disk(running.process.pid) if is_stopped else nullcontext():
        time.sleep(IDLE_S)
        began_s = time.monotonic()
        answer = control(directory, **message)
        taken_s = time.monotonic() - began_s
    eventually(lambda: is_on(directory))
    KEPT.add(
        {
            "case": f"{verb}, idle for {IDLE_S:.0f} s, the disk process is {'stopped' if is_stopped else 'running'}",
            "seconds": round(taken_s, 3),
            "answer": answer,
        }
    )
    assert ("answer" in answer) != ("refused" in answer)


def words(prompt: list[int]) -> str:
    return " ".join(map(str, prompt))


def only_on_disk(running: VllmServer, directory: Path, prompt: list[int], **fields: object) -> None:
    """Ask once, and leave the blocks of the prompt on disk alone."""
    control(directory, verb="clear")
    assert running.reset_prefix_cache(external=False)
    running.ask(prompt, **fields)
    eventually(lambda: blocks(directory)["G3"] >= 4)
    control(directory, verb="clear", tier="G2")


def test_an_idle_engine_brings_a_prompt_from_disk_and_holds_it(server):
    running, directory = server
    prompt = tokens(Random(8), 4 * BLOCK_TOKENS + 10)
    only_on_disk(running, directory, prompt)
    time.sleep(3)
    began_s = time.monotonic()
    brought = control(directory, verb="prefetch", tokens=words(prompt))["answer"]
    assert time.monotonic() - began_s < 5  # it answers in 1 s, and says whether it still reads
    assert brought["blocks"] == 4
    eventually(lambda: blocks(directory)["G2"] == 4)
    pinned = control(directory, verb="pin", tokens=words(prompt), seconds="600")["answer"]
    assert (pinned["pinned"], pinned["is_reading"]) == (4, False)
    others = [tokens(Random(20 + number), 4 * BLOCK_TOKENS + 10) for number in range(20)]
    running.ask_all(others, max_tokens=2)
    assert running.reset_prefix_cache(external=False)
    assert running.ask(prompt).cached == 4 * BLOCK_TOKENS
    assert control(directory, verb="release")["answer"] == {"released": 4}


def test_a_hint_brings_a_prompt_back_in_an_engine_that_takes_no_steps(server):
    running, directory = server
    control(directory, verb="clear")
    assert running.reset_prefix_cache(external=False)
    prompt, random_ = tokens(Random(9), 4 * BLOCK_TOKENS + 10), Random(10)
    running.ask(prompt, kv_transfer_params={"kvbm": {"prefetch_s": 40}})
    asked_s = time.monotonic()
    running.ask_all([tokens(random_, 4 * BLOCK_TOKENS + 10) for _ in range(18)], max_tokens=2)  # which push it out
    if time.monotonic() - asked_s > 35:
        pytest.skip("the prompt may have been brought back before the others had been served")
    assert running.reset_prefix_cache(external=False)
    time.sleep(max(0.0, asked_s + 45 - time.monotonic()))  # nothing else wakes the engine
    before = running.hits_by_source().get("host", 0)
    running.ask(prompt)
    assert running.hits_by_source().get("host", 0) - before == 4 * BLOCK_TOKENS
