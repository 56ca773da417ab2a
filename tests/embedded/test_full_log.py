"""A log that is not read: its pipe is full, and neither the engine nor the processes next to it wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from bookkeeping import tier_of
from kvbm_engine import prompt, running
from waiting import eventually

import kvbm
from kvbm.types import Tier
from kvbm_cli.engine.process import choose_port

WAIT_S = 60.0
LOADABLE = 192  # tokens of the whole blocks of a prompt of 200

NOISY = """\
import sys

def make_noisy(owner, name):
    call = getattr(owner, name)

    def noisy(*arguments):
        print("noise", file=sys.stderr)
        return call(*arguments)

    setattr(owner, name, noisy)

if "kvbm.tiers.disk.service.server" in sys.orig_argv:
    from kvbm.tiers.disk.storage import DiskStorage
    make_noisy(DiskStorage, "poll")
elif "kvbm.engines.embedded.worker_process" in sys.orig_argv:
    from kvbm.device.worker import Worker
    make_noisy(Worker, "poll")
"""


@contextmanager
def full_pipe():
    """The two ends of a pipe that takes no more."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 4096)
    os.set_blocking(write, True)
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


def ask(port: int, path: str, body: dict | None = None) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read().decode()


def is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        return ask(port, "/health")[0] == 200
    return False


@pytest.mark.soak
def test_an_engine_serves_and_ends_although_its_log_is_not_read():
    port = choose_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "kvbm.engines.embedded", "--model", "synthetic:tiny", "--no-verify"]
    with full_pipe() as (_, write):
        engine = subprocess.Popen([*command, "--port", str(port)], stdout=write, stderr=write)
        try:
            eventually(lambda: engine.poll() is not None or is_healthy(port), "a line of the log holds up the start")
            assert engine.poll() is None
            status, _ = ask(port, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4})
            assert status == 200
            engine.send_signal(signal.SIGTERM)
            assert engine.wait(WAIT_S) == 0
        finally:
            engine.kill()
            engine.wait()


@pytest.fixture
def noisy_processes(tmp_path, monkeypatch):
    """The worker process and the disk process write lines all the time."""
    (tmp_path / "sitecustomize.py").write_text(NOISY)
    tree = Path(kvbm.__file__).parents[1]  # `sitecustomize` imports kvbm before its process knows the path of this one
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{tree}")


@contextmanager
def stderr_is(fd: int):
    """For processes that start meanwhile."""
    saved = os.dup(2)
    os.dup2(fd, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def test_worker_and_disk_process_go_on_although_their_log_is_not_read(tmp_path, noisy_processes):
    disk = {"directory": str(tmp_path / "disk"), "blocks": 100}
    with contextlib.ExitStack() as stack:
        _, write = stack.enter_context(full_pipe())
        with stderr_is(write):
            engine = stack.enter_context(
                running(host_blocks=100, worker_process=True, disk=disk, offload={"to_disk": "always"})
            )
        engine.ask(prompt(1, 200))
        engine.settle()
        engine.forget_g1()
        assert engine.ask(prompt(1, 200)).last.num_external_tokens == LOADABLE
        engine.settle()
        counters = tier_of(engine.leader, Tier.DISK).disk.counters
        assert counters.bytes_written > 0
        assert counters.times_off == 0
