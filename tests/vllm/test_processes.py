"""`kvbm serve` in front of a real vLLM: whoever is killed, it notices, says so, and leaves nothing but blocks on disk.

What a vLLM under load has is written down just before the blow: every process, every file in shared memory that one of
them holds, the directory of its sockets, its port. Afterwards none of that may exist.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import psutil
import pytest
from kvbm_serve import PROGRAM, QUIET, started
from traffic import assert_equal, tokens
from vllm_server import BLOCK_TOKENS, VllmClient

from kvbm.engines.make_model import materialise
from kvbm_cli.system.guard_process import GUARD

START_TIMEOUT_S = 600
END_TIMEOUT_S = 60
SHARED_MEMORY = Path("/dev/shm")
MODEL = "vllm-25m"
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]  # every test starts a server of its own
PROFILE = """\
engine:
  kind: vllm
  model: {model}
  arguments:
    served_model_name: m
    dtype: float32
    block_size: 128
    max_model_len: 2048
    num_gpu_blocks_override: 40
    kv_cache_memory_bytes: 256M
    enforce_eager: true
tiers: {{host: {{blocks: 64}}, disk: {{blocks: 200, directory: {disk}}}}}
onboard: {{policy: always}}  # however fast this machine computes
server: {{port: auto}}
"""


@dataclass(frozen=True, slots=True)
class Serving:
    """A healthy `kvbm serve`, and the process of its vLLM's API server."""

    program: subprocess.Popen[str] | psutil.Process
    url: str
    stderr: Path

    @property
    def client(self) -> VllmClient:
        return VllmClient(self.url, "m")

    @property
    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.program.pid).children(recursive=True)

    def find(self, role: str) -> psutil.Process:
        """`api`, `VLLM::EngineCore`, `VLLM::Worker`: what the process calls itself."""
        matching = [process for process in self.processes if role in " ".join(process.cmdline())]
        assert len(matching) == 1, matching
        return matching[0]


@dataclass(frozen=True, slots=True)
class Possessions:
    processes: list[psutil.Process]
    shared_files: list[Path]
    directory: Path
    port: int

    @classmethod
    def of(cls, serving: Serving) -> Possessions:
        processes = serving.processes
        held = {inode for process in processes for inode in _mapped_inodes(process.pid)}
        files = [Path(entry) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in held]
        directory = Path(serving.find("api_server").environ()["TMPDIR"])
        assert len(processes) >= 4, "the API server, its engine core, a worker and the guard"
        assert len(files) >= 3, "two queues and a semaphore at least"
        assert any(path.is_socket() for path in directory.iterdir())
        port = urlsplit(serving.url).port
        assert port is not None
        return cls(processes, files, directory, port)

    def left(self) -> list[object]:
        with socket.socket() as probe:
            is_open = probe.connect_ex(("127.0.0.1", self.port)) == 0
        return [
            *(process for process in self.processes if _is_alive(process)),
            *(path for path in [*self.shared_files, self.directory] if path.exists()),
            *(["the port"] if is_open else []),
        ]


def _mapped_inodes(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if str(SHARED_MEMORY) in line}


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def model() -> Path:
    return materialise(MODEL)


def environment(directory: Path) -> dict[str, str]:
    quick = {"VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_SERVER_DEV_MODE": "1"}
    return {**os.environ, "HOME": str(directory), **QUIET, **quick}


@contextlib.contextmanager
def serving(directory: Path, model: Path) -> Iterator[Serving]:
    (directory / "mine.yaml").write_text(PROFILE.format(model=model, disk=directory / "disk"))
    with started(directory, environment(directory)) as (program, url):
        yield Serving(program, url, directory / "stderr")


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Three clients that ask again and again, until nobody answers any more. Returns when one was answered."""
    answered, stopped = threading.Event(), threading.Event()

    def client(number: int) -> None:
        body = {"model": "m", "max_tokens": 64, "ignore_eos": True}
        while not stopped.is_set():
            body["prompt"] = [(number * 977 + index * 31 + answered.is_set()) % 4000 for index in range(700)]
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                urllib.request.urlopen(request, timeout=END_TIMEOUT_S).read()
            except (OSError, http.client.HTTPException, ValueError):  # the answer ends early, or never begins
                return
            answered.set()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in clients:
        thread.start()
    try:
        assert answered.wait(START_TIMEOUT_S)
        yield
    finally:
        stopped.set()
        for thread in clients:
            thread.join()


CACHED_BLOCKS = 5
CACHED = CACHED_BLOCKS * BLOCK_TOKENS
OFTEN, ONCE = (tokens(Random(number), CACHED + 60) for number in range(2))
WRITTEN, OFFLOADED = "kvbm_offload_blocks_h2d", "kvbm_offload_blocks_d2h"


def blocks_on_disk(directory: Path) -> int:
    command = [*PROGRAM, "cache", "ls", "--dir", str(directory / "disk"), "--json"]
    (cache,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return int(cache["blocks"])


def test_a_killed_command_and_one_that_ends_in_order_leave_nothing_but_blocks_on_disk(
    tmp_path: Path, model: Path
) -> None:
    """The second finds what the first had written, and writes what the policy had not chosen before it ends."""
    with serving(tmp_path, model) as served, served.client as client:
        truth = {"often": client.ask(OFTEN), "once": client.ask(ONCE)}
        assert [answer.cached for answer in truth.values()] == [0, 0]
        client.wait_until("rest", lambda metrics: metrics[OFFLOADED] >= 2 * CACHED_BLOCKS)
        assert client.reset_prefix_cache(external=False)
        assert client.ask(OFTEN).cached == CACHED  # its second use lets it through to the disk
        client.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= CACHED_BLOCKS)
        with load(served.url):
            possessions = Possessions.of(served)
            guard = next(process for process in possessions.processes if str(GUARD) in process.cmdline())
            served.program.kill()
            guard.wait(END_TIMEOUT_S)
            assert possessions.left() == []
    with serving(tmp_path, model) as served, served.client as client:
        again = {"often": client.ask(OFTEN)}
        assert again["often"].cached == CACHED
        assert client.hits_by_source() == {"disk": CACHED}
        again["once"] = client.ask(ONCE)
        assert again["once"].cached == 0, "it was never asked for twice"
        assert_equal(again, truth)
        client.wait_until("rest", lambda metrics: metrics[OFFLOADED] >= CACHED_BLOCKS)
        assert client.metrics()["kvbm_disk_checksum_failures"] == 0
        before = blocks_on_disk(tmp_path)
        possessions = Possessions.of(served)
        served.program.send_signal(signal.SIGTERM)
        assert served.program.wait(END_TIMEOUT_S) == 0
        assert possessions.left() == []
    assert "error:" not in served.stderr.read_text()
    assert blocks_on_disk(tmp_path) == before + CACHED_BLOCKS


@pytest.mark.parametrize("victim", ["api_server", "VLLM::EngineCore", "VLLM::Worker"])
def test_a_killed_process_of_vllm_ends_the_command_with_an_error(tmp_path: Path, model: Path, victim: str) -> None:
    with serving(tmp_path, model) as served, load(served.url):
        possessions = Possessions.of(served)
        served.find(victim).send_signal(signal.SIGKILL)
        exit_code = served.program.wait(END_TIMEOUT_S)
        assert possessions.left() == []
        assert exit_code == (128 + signal.SIGKILL if victim == "api_server" else 1)
    assert re.search(r"error: the engine exited unexpectedly, with exit code \d+ after", served.stderr.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_vllm_in_order_and_nothing_is_left(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    """What it serves it finishes: the answers are not cut off. The scheduler's side of the connector is closed."""
    with serving(tmp_path, model) as served:
        with load(served.url):
            possessions = Possessions.of(served)
        served.program.send_signal(number)
        assert served.program.wait(END_TIMEOUT_S) == 0
        assert possessions.left() == []
    assert "error:" not in served.stderr.read_text()


def test_a_second_interrupt_kills_vllm_at_once(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as served, load(served.url):
        possessions = Possessions.of(served)
        served.program.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            served.program.wait(0.3)
        served.program.send_signal(signal.SIGINT)
        assert served.program.wait(END_TIMEOUT_S) in (0, 128 + signal.SIGKILL)
        assert possessions.left() == []


def kvbm(directory: Path, *arguments: str) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run(
        [*PROGRAM, *arguments], cwd=directory, env=environment(directory), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_detached_vllm_is_seen_and_read_and_nothing_is_left_of_it(tmp_path: Path, model: Path, end: str) -> None:
    (tmp_path / "mine.yaml").write_text(PROFILE.format(model=model, disk=tmp_path / "disk"))
    url = json.loads(kvbm(tmp_path, "serve", "-p", "./mine.yaml", "--detach", "--json"))["url"]
    (seen,) = json.loads(kvbm(tmp_path, "status", "--json"))
    launcher = psutil.Process(seen["pid"])
    try:
        assert (seen["url"], seen["state"]) == (url, "healthy")
        with VllmClient(url, "m") as client:
            assert client.ask(ONCE).cached == 0
        assert "POST /v1/completions" in kvbm(tmp_path, "logs")
        possessions = Possessions.of(Serving(launcher, url, tmp_path / "stderr"))
        if end == "stop":
            kvbm(tmp_path, "stop")
        else:
            launcher.kill()
            psutil.wait_procs(possessions.processes, END_TIMEOUT_S)
        assert possessions.left() == []
        assert not _is_alive(launcher)
        assert json.loads(kvbm(tmp_path, "status", "--json")) == []
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher.kill()
