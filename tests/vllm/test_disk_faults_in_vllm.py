"""A disk that fails under a real vLLM: answers are those without kvbm, nobody waits for it, and it is used again.

The faults are those of tests/embedded/disk_faults, in the process that does the disk's I/O. In CI the embedded engine
stands for vLLM (test_disk_in_engine.py, test_disk_breaks.py). One server and the plain one: a minute and a half.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from disk_blocks import block_hashes, damage
from traffic import Request, asker, assert_equal, conversations, hold, repeat, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
DISK_FAULTS = Path(__file__).parents[1] / "embedded" / "disk_faults"
LIMITS = {"errors_until_off": 3, "stall_s": 1.0, "probe_interval_s": 0.05}
ROWS = {
    "EIO": {"error": "EIO"},
    "ENOSPC": {"error": "ENOSPC", "for": "write"},
    "short": {"error": "short"},
    "wrong bytes": {"lie": True, "for": "read"},
    "stall": {"hold": True},
}
SLOTS = 300
TURN_IT_OFF = ("EIO", "ENOSPC", "stall")  # the others may end before there are enough of them
TALKS = conversations(6, turns=2, seed=11)
FETCHED, OFF, TIMES_OFF = "kvbm_onboard_blocks_d2d", "kvbm_disk_off", "kvbm_disk_times_off"
WRITTEN = "kvbm_offload_blocks_h2d"


class Disk:
    """Orders to the disk's process, in a file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "faults"
        self.order()

    def order(self, **faults: object) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"limits": LIMITS, **faults}))
        os.replace(new, self.path)


@pytest.fixture(scope="module")
def truth(plain):
    plain.wait_healthy()
    return hold(asker(plain), TALKS)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return Disk(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(truth, disk, directory):
    """More moves than fits in its memory, all of which is written to disk and read from it."""
    tiers = {"host": {"blocks": 16}, "disk": {"blocks": SLOTS, "directory": str(directory)}}
    contents = {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}
    connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, DISK_FAULTS))),
        "KVBM_TEST_DISK_FAULTS": str(disk.path),
    }
    model = materialise("vllm-25m")
    with VllmServer(model, blocks=40, connector=connector, environment=environment, max_model_len=2048) as server:
        assert_equal(repeat(asker(server), list(truth)), truth)
        yield server


def wait_for(server: VllmServer, condition: Callable[[dict[str, float]], bool]) -> None:
    """The state of the disk is looked at in steps, so there are some."""

    def has_come(metrics: dict[str, float]) -> bool:
        server.ask(tokens(Random("a step"), 5), 1)
        return condition(metrics)

    server.wait_until("another state of the disk", has_come)


@pytest.mark.parametrize("name", ROWS)
def test_a_disk_that_fails_changes_no_answer_and_is_used_again(server, truth, plain, disk, name):
    """A step that waited for a disk that hangs would not end before it works again, and so no answer would."""
    new = [Request(tokens(Random(f"{name} {number}"), 4 * BLOCK_TOKENS + 9), 8) for number in range(8)]
    expected = truth | repeat(asker(plain), new)
    before = server.metrics()
    disk.order(**ROWS[name])
    assert server.reset_prefix_cache(external=False)
    assert_equal(repeat(asker(server), list(expected)), expected)
    if name in TURN_IT_OFF:
        wait_for(server, lambda metrics: metrics[TIMES_OFF] > before[TIMES_OFF])
    if name == "wrong bytes":
        assert server.metrics()["kvbm_disk_checksum_failures"] > before["kvbm_disk_checksum_failures"]
    disk.order()
    wait_for(server, lambda metrics: not metrics[OFF])
    fetched = server.metrics()[FETCHED]
    for _ in range(2):
        server.wait_until("rest", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
        assert server.reset_prefix_cache(external=False)
        assert_equal(repeat(asker(server), list(truth)), truth)
    assert server.metrics()[FETCHED] > fetched, "it is used again"


def test_a_pause_while_the_disk_hangs_is_answered_as_by_vllm_alone(server, truth, disk):
    """The tier is off until the disk has deleted its blocks, and none of them is found afterwards."""
    former, written = tokens(Random("before a pause"), 4 * BLOCK_TOKENS + 9), server.metrics()[WRITTEN]
    server.ask(former)
    server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= written + 4)
    for number in range(2):  # the second pause finds a disk that is known to hang
        disk.order(hold=True)
        answer = server.http.post("/pause?mode=abort", timeout=60)
        assert answer.status_code == 200, f"pause {number}: {answer.text}"
        assert server.http.post("/resume", timeout=60).status_code == 200
    assert "stays off until its blocks are deleted" in server.log()
    wait_for(server, lambda metrics: metrics[OFF])
    asked = list(truth)
    assert_equal(repeat(asker(server), asked[:2]), {request: truth[request] for request in asked[:2]})
    disk.order()
    wait_for(server, lambda metrics: not metrics[OFF])
    assert server.ask(former).cached == 0


def test_of_a_load_that_fails_in_the_middle_the_blocks_before_are_used(server, plain, directory, tmp_path):
    prompt, good = tokens(Random("damaged"), 8 * BLOCK_TOKENS + 9), 5
    expected = repeat(asker(plain), [Request(prompt, 8)])
    server.wait_until("rest", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
    written = server.metrics()[WRITTEN]
    assert_equal(repeat(asker(server), list(expected)), expected)
    server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= written + 8)
    server.ask_all([tokens(Random(f"other {number}"), 4 * BLOCK_TOKENS) for number in range(8)], 1)
    damage(directory, tmp_path, block_hashes(prompt)[good], slots=SLOTS)
    server.wait_until("rest", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
    assert server.reset_prefix_cache(external=False)
    before, log_size = server.metrics(), len(server.log())
    assert_equal(repeat(asker(server), list(expected)), expected)
    after = server.metrics()
    assert after["kvbm_disk_checksum_failures"] == before["kvbm_disk_checksum_failures"] + 1
    assert after[FETCHED] == before[FETCHED] + good
    computed = (8 - good) * BLOCK_TOKENS  # vLLM's metrics still count these as cached
    assert f"1 request(s) rescheduled ({computed} tokens affected)" in server.log()[log_size:]
