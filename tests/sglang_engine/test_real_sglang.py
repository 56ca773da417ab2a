"""A real SGLang on a CPU, with stand-ins for its kernels: scheduler, radix tree, storage threads and server are real.

`nox -s sglang` runs it. It takes minutes, and is skipped without SGLang. Prompts of 700 tokens are ten full pages of
64. The model computes in float32, so that equal KV gives equal tokens.
"""

from __future__ import annotations

import os
import random
import signal
import time
from importlib import metadata
from pathlib import Path

import pytest
from sglang_server import PAGE, disk_at, plain, profile_of, serving

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("requires SGLang: `nox -s sglang`", allow_module_level=True)

PROMPT = 700
HIT = PROMPT // PAGE * PAGE
PROMPTS = [[random.Random(7919 * number + i).randrange(10, 4000) for i in range(PROMPT)] for number in range(10)]

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """Return the answers of SGLang without its hierarchical cache."""
    with plain(model, tmp_path_factory.mktemp("plain") / "log") as server:
        answers = [server.ask(prompt).answer.tokens for prompt in PROMPTS]
    assert len(set(answers)) > 1, "the model answers everything alike"
    return answers


def test_pages_survive_a_restart_faults_cost_misses_and_every_answer_is_right(model, expected, tmp_path):
    disk = tmp_path / "disk"
    with serving(profile_of(model, disk_at(disk)), tmp_path / "log") as server:
        assert "blocks will not stay on disk" not in server.log.read_text()
        assert [server.ask(prompt).answer.tokens for prompt in PROMPTS] == expected
        server.wait_for("kvbm_offload_blocks_h2d", 10 * len(PROMPTS))
        sources = set()
        for number in (9, 3, 0):  # the newest, one that has left device memory, the oldest
            reply = server.ask(PROMPTS[number])
            assert reply.answer.tokens == expected[number]
            assert sum(reply.cached.values()) == HIT
            sources |= {name for name, value in reply.cached.items() if value == HIT}
        assert sources == {"device", "host", "storage"}

        pid = server.disk_process()
        os.kill(pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            assert server.ask(PROMPTS[5]).answer.tokens == expected[5]
            assert time.monotonic() - began_s < 30
        finally:
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        assert server.ask(PROMPTS[6]).answer.tokens == expected[6]
        server.wait_for("kvbm_disk_restarts", 1)
        assert server.counters()["kvbm_faults"] == 0

    _flip_a_byte(disk)
    with serving(profile_of(model, disk_at(disk)), tmp_path / "log") as server:
        hits = []
        for number, prompt in enumerate(PROMPTS):
            reply = server.ask(prompt)
            assert reply.answer.tokens == expected[number]
            hits.append(reply.cached["storage"])
        assert hits.count(HIT) >= len(PROMPTS) - 1, hits
        counters = server.counters()
        assert counters["kvbm_faults"] == 0
        assert counters["kvbm_disk_checksum_failures"] <= 1


def test_the_storage_is_detached_attached_and_cleared_while_the_server_runs(model, expected, tmp_path):
    with serving(profile_of(model, disk_at(tmp_path / "disk")), tmp_path / "log") as server:
        for prompt in PROMPTS[:2]:
            server.ask(prompt)
        server.wait_for("kvbm_offload_blocks_h2d", 20)
        server.detach()
        server.flush()
        assert server.ask(PROMPTS[0]).cached["storage"] == 0

        server.attach()
        server.flush()
        reply = server.ask(PROMPTS[0])
        assert (reply.answer.tokens, reply.cached["storage"]) == (expected[0], HIT)

        server.clear()
        server.flush()
        reply = server.ask(PROMPTS[1])
        assert (reply.answer.tokens, sum(reply.cached.values())) == (expected[1], 0)
        server.wait_until_written()
        server.flush()
        assert server.ask(PROMPTS[1]).cached["storage"] == HIT

        server.detach()
        status, text = server.try_attach(tiers=disk_at(tmp_path / "disk", capacity="16B"))
        assert status == 400
        assert "smaller than one block" in text
        assert server.ask(PROMPTS[2]).answer.tokens == expected[2]
        server.attach()
        assert server.counters()["kvbm_faults"] == 0


def test_the_cache_is_flushed_right_after_the_first_request_of_a_new_machine(model, tmp_path):
    """Where SGLang has not yet compiled its extension that names pages."""
    place = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    with serving(profile_of(model, disk_at(tmp_path / "disk"), environment=place), tmp_path / "log") as server:
        computed = server.ask(PROMPTS[0]).answer.tokens
        server.flush()
        reply = server.ask(PROMPTS[0])
        assert (reply.answer.tokens, reply.cached["storage"]) == (computed, HIT)


def test_two_engines_share_a_directory(model, expected, tmp_path):
    """The second answers from what the first has computed."""
    tiers = {"host": {"capacity": "512MiB"}, "shared": {"url": f"file://{tmp_path}/shared"}}
    offload = {"to_shared": "always"}
    profiles = [profile_of(model, {**tiers, **disk_at(tmp_path / name)}, offload=offload) for name in ("a", "b")]
    with serving(profiles[0], tmp_path / "a.log") as first:
        for prompt in PROMPTS[:3]:
            first.ask(prompt)
        first.wait_for("kvbm_offload_blocks_d2o", 30)
        with serving(profiles[1], tmp_path / "b.log") as second:
            for number in range(3):
                reply = second.ask(PROMPTS[number])
                assert (reply.answer.tokens, reply.cached["storage"]) == (expected[number], HIT)
            assert second.counters()["kvbm_onboard_blocks_o2d"] == 30
            second.ask(PROMPTS[3])
            second.wait_for("kvbm_offload_blocks_d2o", 10)
            first.flush()
            deadline_s = time.monotonic() + 60  # the first looks for new objects at times
            while (reply := first.ask(PROMPTS[3])).cached["storage"] != HIT:
                assert reply.answer.tokens == expected[3]
                assert time.monotonic() < deadline_s, reply
                first.flush()
            assert reply.answer.tokens == expected[3]


def test_two_ranks_keep_a_part_of_each_page(model, tmp_path):
    """Both with a disk of their own. Sums over two ranks differ from those of one in the last bits."""
    two = {"tp_size": 2, "hicache_storage_prefetch_policy": "wait_complete"}
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    profile = profile_of(model, disk_at(tmp_path / "disk"), arguments=two, environment=bound)
    with serving(profile, tmp_path / "log") as server:
        computed = [server.ask(prompt) for prompt in PROMPTS[:4]]
        assert not any(sum(reply.cached.values()) for reply in computed)
        for rank in range(2):
            server.wait_for("kvbm_offload_blocks_h2d", 40, rank=rank)
    with serving(profile, tmp_path / "log") as server:
        for before, prompt in zip(computed, PROMPTS[:4], strict=True):
            reply = server.ask(prompt)
            assert (reply.answer.tokens, reply.cached["storage"]) == (before.answer.tokens, HIT)
        for rank in range(2):
            counters = server.counters(rank=rank)
            assert counters["kvbm_onboard_blocks_d2d"] == 40
            assert counters["kvbm_faults"] == 0


def _flip_a_byte(directory: Path) -> None:
    """Damage one page on disk, in the middle of the arena's used part."""
    (arena,) = (path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 1 << 27)
    with arena.open("r+b") as file:
        file.seek(20 << 20)
        byte = file.read(1)
        file.seek(20 << 20)
        file.write(bytes([byte[0] ^ 1]))
