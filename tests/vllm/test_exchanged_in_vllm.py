"""Weights that are exchanged between two starts of a real vLLM or during one: answers are those of the loaded weights.

Each way runs two engines on one disk: before the exchange or during it, and after it. Their answers are compared with
those of engines without a cache, one for each of two models of equal sizes and times.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from exchanges import (
    WEIGHTS,
    bind,
    direct,
    directory,
    grandparent,
    hard_link,
    link,
    mapped,
    overlay,
    overwritten,
    parent,
    placed,
    replaced,
    save_twin,
)
from pairs import NO_CACHE
from traffic import assert_equal, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer

from kvbm_cli.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
CACHED = 2 * BLOCK_TOKENS
PROMPTS = [tokens(Random(number), CACHED + 30) for number in range(8)]
WRITTEN = "kvbm_offload_blocks_h2d"
LOADED = "Loading weights took"
DOUBT = "blocks will not stay on disk"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two models of equal sizes and times; the second differs in some rows of the embedding."""
    one = shutil.copytree(materialise("vllm-25m"), tmp_path_factory.mktemp("saved") / "v1")
    save_twin(one, sorted({token for prompt in PROMPTS for token in prompt[:5]}))
    return one.parent


@pytest.fixture(scope="module")
def truth(saved):
    """Answers of engines without a cache, by model."""
    found = {}
    for name in ("v1", "v2"):
        with VllmServer(saved / name, NO_CACHE) as server:
            found[name] = dict(enumerate(server.ask_all(PROMPTS, concurrency=1)))
    one, two = found["v1"], found["v2"]
    assert all(max(abs(a - b) for a, b in zip(one[i].logprobs, two[i].logprobs, strict=True)) > 0.01 for i in one)
    return found


@pytest.fixture
def home(saved, tmp_path):
    yield from placed(saved, tmp_path)


def connector_on(disk=None, store=None):
    tiers = {"host": {"blocks": 60}}
    if disk is not None:
        tiers["disk"] = {"blocks": 100, "directory": str(disk)}
    if store is not None:
        tiers["shared"] = {"url": f"file://{store}", "protection": "none"}
    always = {"to_disk": "always", "to_shared": "always"}
    contents = {"tiers": tiers, "offload": always, "onboard": {"policy": "always"}}
    return CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}


def run(model, disk, during=None, home=None):
    """Answers of one engine, how many tokens it did not compute, and whether its blocks outlive it."""
    with VllmServer(model, blocks=40, connector=connector_on(disk), wait=False) as server:
        if during is not None:
            until(lambda: LOADED in server.log())
            during(home)
        server.wait_healthy()
        until_ready(server)
        answers = dict(enumerate(server.ask_all(PROMPTS, concurrency=1)))
        blocks = sum(CACHED - answer.cached for answer in answers.values()) // BLOCK_TOKENS
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= blocks)
        keeps = DOUBT not in server.log()
        os.killpg(server.process.pid, signal.SIGKILL)
    return answers, sum(answer.cached for answer in answers.values()), keeps


def until_ready(server):
    """The disk tier may start after the engine."""
    server.wait_until("a disk", lambda metrics: metrics["kvbm_disk_off"] == 0)


def until(is_so, limit_s=300.0):
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


WAYS = [parent, grandparent, directory, link, hard_link, replaced, overwritten, mapped, direct, bind, overlay]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["between", "during"])
def test_every_answer_is_that_of_the_loaded_weights(home, truth, tmp_path, way, when):
    if way in (bind, overlay) and os.geteuid() != 0:
        pytest.skip("needs root")
    model, disk = home / "models" / "current", tmp_path / "disk"
    if when == "between":
        answers, _, keeps = run(model, disk)
        assert keeps
        way(home)
    else:
        answers, _, keeps = run(model, disk, way, home)
        assert not keeps, "the files are not those that were loaded"
    compared = assert_equal(answers, truth["v1"]).requests
    answers, cached, _ = run(model, disk)
    compared += assert_equal(answers, truth["v2"]).requests
    assert cached == 0
    print(f"{compared} compared, 0 wrong: {way.__name__}, {when}")


def test_unchanged_weights_find_their_blocks(home, truth, tmp_path):
    model, disk = home / "models" / "current", tmp_path / "disk"
    for expected in (0, len(PROMPTS) * CACHED):
        answers, cached, keeps = run(model, disk)
        assert_equal(answers, truth["v1"])
        assert (cached, keeps) == (expected, True)
        (home / "busy").write_text("")


def test_weights_on_tmpfs_leave_nothing_for_the_next_start(home, truth, tmp_path):
    """A store through a mapping moves no time there."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        model = shutil.copytree(home / "models" / "v1", place / "model")
        weights = np.memmap(model / WEIGHTS, mode="r+", dtype=np.uint8)
        weights[:] = np.array(weights)
        answers, _, keeps = run(model, tmp_path / "disk")
        assert not keeps
        assert_equal(answers, truth["v1"])
        weights[:] = np.fromfile(home / "models" / "v2" / WEIGHTS, np.uint8)
        answers, cached, _ = run(model, tmp_path / "disk")
        assert_equal(answers, truth["v2"])
        assert cached == 0
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("way", [parent, overwritten])
def test_engines_on_one_store_of_which_one_gets_other_weights(home, truth, tmp_path, way):
    connector = connector_on(store=tmp_path / "store")
    with VllmServer(home / "models" / "current", blocks=40, connector=connector) as first:
        one = dict(enumerate(first.ask_all(PROMPTS, concurrency=1)))
        until(lambda: first.metrics().get("kvbm_offload_blocks_d2o", 0) > 0)
        way(home)
        with VllmServer(home / "models" / "current", blocks=40, connector=connector) as second:
            two = dict(enumerate(second.ask_all(PROMPTS, concurrency=1)))
            assert sum(answer.cached for answer in two.values()) == 0
        again = dict(enumerate(first.ask_all(PROMPTS, concurrency=1)))
    assert_equal(one, truth["v1"])
    assert_equal(again, truth["v1"])
    assert_equal(two, truth["v2"])
