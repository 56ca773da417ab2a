"""Weights that change in a real SGLang: no page of the former ones is found. `nox -s sglang` runs it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from importlib import metadata

import pytest
from sglang_server import PAGE, disk_at, profile_of, serving

from kvbm.engines.launch_plan import metrics_url

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("requires SGLang: `nox -s sglang`", allow_module_level=True)

PROMPTS = [[random.Random(7919 * number + i).randrange(10, 4000) for i in range(700)] for number in range(10)]
PAGES = 700 // PAGE
READ_S = 3.0  # longer than kvbm waits for a disk
UPDATE = "/update_weights_from_disk"

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def other(model, tmp_path):
    """The same model with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, tmp_path / "other")
    for path in (tmp_path / "other").glob("*.safetensors"):
        noise = torch.Generator().manual_seed(1)
        weights = {
            name: one * (1 + 0.5 * torch.randn(one.shape, generator=noise)).to(one.dtype)
            for name, one in load_file(path).items()
        }
        save_file(weights, path, metadata={"format": "pt"})
    return tmp_path / "other"


def test_a_storage_that_is_attached_later_gives_no_page_of_former_weights(model, other, tmp_path):
    """A prefetch has read its pages when the weights change, and SGLang keeps its cache (`flush_cache: false`)."""
    waits = {"hicache_storage_prefetch_policy": "wait_complete"}
    profile = profile_of(model, disk_at(tmp_path / "disk"), arguments=waits)
    with serving(profile, tmp_path / "log", has_kvbm=False) as server:
        server.metrics_url = metrics_url(profile)
        former = [server.ask(prompt).answer.tokens for prompt in PROMPTS]
        server.flush()
        server.attach()
        for prompt in PROMPTS:  # more than kvbm's buffer holds
            server.ask(prompt)
        server.wait_for("kvbm_offload_blocks_h2d", PAGES * len(PROMPTS))
        number, reply = _changed_during_a_prefetch(server, other)
        assert reply.cached["storage"] == 0

        server.flush()
        again = server.ask(PROMPTS[number])
        assert sum(again.cached.values()) == 0
        assert again.answer.tokens == reply.answer.tokens != former[number]
        server.detach()
        server.attach()
        server.ask(PROMPTS[-1])
        server.flush()
        assert sum(server.ask(PROMPTS[-1]).cached.values()) == 0, "a storage that is attached again stores nothing"
        assert server.counters()["kvbm_faults"] == 0


def _changed_during_a_prefetch(server, other):
    """Return which prompt a request had that waited meanwhile, and its reply.

    The disk is stopped until SGLang is paused: a paused SGLang does not take what a prefetch has read. That may be too
    late for kvbm, which does not wait long for a disk; then the next prompt is tried.
    """
    for number, prompt in enumerate(PROMPTS):
        server.flush()
        before = server.counters()["kvbm_onboard_blocks_d2d"]
        replies, disk = [], server.disk_process()
        request = threading.Thread(target=lambda prompt=prompt, replies=replies: replies.append(server.ask(prompt)))
        os.kill(disk, signal.SIGSTOP)
        try:
            request.start()
            time.sleep(0.5)  # the prefetch begins
            server.post("/pause_generation", {"mode": "in_place"})
        finally:
            os.kill(disk, signal.SIGCONT)
        end_s = time.monotonic() + READ_S
        while not (has_read := server.counters()["kvbm_onboard_blocks_d2d"] - before == PAGES):
            if time.monotonic() > end_s:
                break
        is_due = has_read and not replies
        if is_due:
            status, text = server.try_call("POST", UPDATE, {"model_path": str(other), "flush_cache": False})
            assert status == 200, text
        server.post("/continue_generation", {})
        request.join()
        if is_due:
            return number, replies[0]
    raise AssertionError("no prefetch was under way while SGLang was paused")
