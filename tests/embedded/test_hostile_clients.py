"""Clients that try to stop the others or to fill the log, against the process of the embedded engine and the proxy."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from waiting import eventually

from kvbm_cli.engine.process import choose_port
from kvbm_cli.system.http_client import get, request

HUGE = "\n" * 5_000_000
LOGGED_BYTES = 100_000
COMPLETIONS = "/v1/completions"
BODIES = {
    "a limit of 5 MB": {"prompt": [1], "kv_transfer_params": {"max_load_tokens": HUGE}},
    "an object as limit": {"prompt": [1], "kv_transfer_params": {"max_load_tokens": {"a": [HUGE]}}},
    "lists as limit": {"prompt": [1], "kv_transfer_params": {"max_offload_tokens": [[]] * 5000}},
    "parameters": {"prompt": [1], "kv_transfer_params": dict.fromkeys(map(str, range(500_000)), 1)},
    "an unknown field": {"prompt": [1], HUGE: 1},
    "a field's value": {"prompt": [1], "temperature": HUGE},
    "a model": {"prompt": [1], "model": HUGE},
    "a stop string": {"prompt": [1], "stop": [HUGE, 1]},
    "a role": {"messages": [{"role": HUGE, "content": "a"}]},
    "a template's key": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {HUGE: 1}},
}
HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
BYTES = {
    "no HTTP": b"\x16\x03\x01\x00\x01\r\n\r\n",
    "path": b"GET /" + b"\xff%0a" * 1500 + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "method": b"X" * 5000 + b" / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "encoding": HEAD + b"Content-Encoding: " + b"\x1b[2J" * 1500 + b"\r\n\r\n",
    "header": HEAD + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
    "length": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
}


@contextmanager
def started(log: Path, *command: str, port: int) -> Iterator[str]:
    with log.open("wb") as file:
        server = subprocess.Popen([sys.executable, *command], stderr=file, stdout=file)
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: server.poll() is not None or get(f"{url}/health", timeout_s=5.0).status == 200)
        assert server.poll() is None, log.read_text()
        yield url
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["engine", "proxy"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    port, log = choose_port("127.0.0.1", 0), tmp_path / "log"
    command = [str(Path(__file__).parent / "server_rig.py"), str(port), "0", "1"]
    if request.param == "proxy":
        nobody = f"http://127.0.0.1:{choose_port('127.0.0.1', 0)}"
        command = ["-m", "kvbm_cli.disaggregated.proxy", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prefill", nobody, "--decode", nobody]
    with started(log, *command, port=port) as url:
        yield url, log


def test_no_request_is_echoed_whole_or_fills_the_log(server: tuple[str, Path]) -> None:
    url, log = server
    for name, body in BODIES.items():
        path = "/v1/chat/completions" if "messages" in body else COMPLETIONS
        answer = request("POST", url + path, content=body, timeout_s=60.0)
        assert len(answer.body) < 2000, name
        assert answer.status in (200, 400, 404, 413, 502), (name, answer)  # 502: the proxy has no engine
        assert "\n" not in json.loads(answer.body).get("error", {}).get("message", ""), name
    for name, content in BYTES.items():
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as client:
                with suppress(OSError):
                    client.sendall(content)
                answer_bytes = client.recv(65536)
            assert b" 500 " not in answer_bytes[:20], name
            assert b"\x1b" not in answer_bytes, name
    assert get(f"{url}/health", timeout_s=10.0).status == 200
    assert log.stat().st_size < LOGGED_BYTES
    assert "Traceback" not in log.read_text()
