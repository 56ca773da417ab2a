"""A real SGLang on a CPU, with stand-ins for its kernels: scheduler, radix tree, storage threads and server are real.

`nox -s sglang` runs it. It takes minutes, and is skipped without SGLang. Prompts of 700 tokens are ten full pages of
64. The model computes in float32, so that equal KV gives equal tokens.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from kvbm.config.schema import Profile
from kvbm.sglang_integration import launch

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("requires SGLang: `nox -s sglang`", allow_module_level=True)

PAGE, PROMPT, HIT = 64, 700, 640
PROMPTS = [[random.Random(7919 * number + i).randrange(10, 4000) for i in range(PROMPT)] for number in range(10)]
START_S = 400.0


def free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Server:
    def __init__(self, base_url: str, metrics_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.base_url, self.metrics_url, self.process, self.log = base_url, metrics_url, process, log

    def ask(self, prompt: list[int]) -> tuple[object, dict[str, int]]:
        """Return the answer, and the cached tokens by where they came from."""
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        request = urllib.request.Request(
            f"{self.base_url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            found = json.loads(answer.read())
        return found.get("output_ids") or found["text"], found["meta_info"].get("cached_tokens_details") or {}

    def counters(self) -> dict[str, float]:
        text = urllib.request.urlopen(self.metrics_url, timeout=30).read().decode()
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kvbm_"))
        return {name: float(value) for name, value in rows}

    def disk_process(self) -> int:
        """The disk I/O process, which is a descendant of the server."""
        found = subprocess.run(["pgrep", "-f", "kvbm.disk.service"], capture_output=True, text=True).stdout.split()
        mine = [int(pid) for pid in found if self._is_descendant(int(pid))]
        assert len(mine) == 1, found
        return mine[0]

    def _is_descendant(self, pid: int) -> bool:
        while pid > 1:
            if pid == self.process.pid:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return False

    def wait_for(self, name: str, least: float) -> None:
        end_s = time.monotonic() + 60
        while self.counters().get(name, 0) < least:
            assert time.monotonic() < end_s, (name, self.counters())
            time.sleep(0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "vllm-25m"
    program = f"import runpy, {launch.CPU_MODULE}; runpy.run_module('kvbm_cli.make_model', run_name='__main__')"
    # with the stand-ins, torchvision needs no CUDA
    subprocess.run([sys.executable, "-P", "-c", program, "vllm-25m", str(directory)], check=True)
    return directory


@contextmanager
def serving(model: Path, directory: Path, *, storage: bool = True) -> Iterator[Server]:
    port, metrics_port = free_ports()
    arguments = {
        "dtype": "float32",
        "page_size": PAGE,
        "max_total_tokens": 3200,
        "device": "cpu",
        "random_seed": 1,
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "skip_server_warmup": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_ratio": 2,
        "hicache_storage_backend_extra_config": {"prefetch_threshold": PAGE},
    }
    engine = {"kind": "sglang", "model": str(model), "cpu_stand_ins": True, "arguments": arguments}
    profile = Profile.model_validate(
        {
            "engine": {**engine, "python": sys.executable},
            "tiers": {"disk": {"directory": str(directory), "capacity": "1GB"}},
            "metrics": {"serve": True, "port": metrics_port},
        }
    )
    plan = launch.plan(profile, connector=storage, port=port)
    argv = plan.argv if storage else tuple(word for word in plan.argv if word != "--enable-hierarchical-cache")
    log = directory.parent / f"{directory.name}-{port}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **plan.environment, "OMP_NUM_THREADS": "1"},
        )
    server = Server(plan.base_url, plan.metrics_url, process, log)
    try:
        end_s = time.monotonic() + START_S
        while not _is_healthy(plan.health_url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end_s, log.read_text()[-3000:]
            time.sleep(1)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.timeout(1500)
def test_pages_survive_a_restart_faults_cost_misses_and_every_answer_is_right(model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with serving(model, tmp_path / "none", storage=False) as server:
        expected = [server.ask(prompt)[0] for prompt in PROMPTS]
    assert len({json.dumps(one) for one in expected}) > 1, "the model answers everything alike"

    with serving(model, disk) as server:
        assert "blocks will not stay on disk" not in server.log.read_text()
        assert [server.ask(prompt)[0] for prompt in PROMPTS] == expected
        server.wait_for("kvbm_offload_blocks_h2d", 10 * len(PROMPTS))
        sources = set()
        for number in (9, 3, 0):  # the newest, one that has left device memory, the oldest
            answer, cached = server.ask(PROMPTS[number])
            assert answer == expected[number]
            assert sum(value for name, value in cached.items() if name != "storage_backend") == HIT
            sources |= {name for name, value in cached.items() if value == HIT}
        assert sources == {"device", "host", "storage"}

        pid = server.disk_process()
        os.kill(pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            assert server.ask(PROMPTS[5])[0] == expected[5]
            assert time.monotonic() - began_s < 30
        finally:
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        assert server.ask(PROMPTS[6])[0] == expected[6]
        server.wait_for("kvbm_disk_restarts", 1)
        assert server.counters()["kvbm_faults"] == 0

    _flip_a_byte(disk)
    with serving(model, disk) as server:
        hits = []
        for number, prompt in enumerate(PROMPTS):
            answer, cached = server.ask(prompt)
            assert answer == expected[number]
            hits.append(cached.get("storage", 0))
        assert hits.count(HIT) >= len(PROMPTS) - 1, hits
        counters = server.counters()
        assert counters["kvbm_faults"] == 0
        assert counters["kvbm_disk_checksum_failures"] <= 1


def _flip_a_byte(directory: Path) -> None:
    """Damage one page on disk, in the middle of the arena's used part."""
    (arena,) = (path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 1 << 27)
    with arena.open("r+b") as file:
        file.seek(20 << 20)
        byte = file.read(1)
        file.seek(20 << 20)
        file.write(bytes([byte[0] ^ 1]))
