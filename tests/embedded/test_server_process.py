"""The server's process: start, signals, a dying engine, and the words of everything that cannot start."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_rig import DEADLY_TOKEN
from terminal import assert_said, given_in
from waiting import eventually

from kvbm.engines.embedded.__main__ import main
from kvbm_cli.engine.process import choose_port

RIG = Path(__file__).with_name("server_rig.py")
WAIT_S = 20.0


class Process:
    """A server in a process of its own; `log` is what it has written to stderr."""

    def __init__(self, child: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.child = child
        self.port = port
        self._log_path = log_path

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def wait_until(self, status: str) -> None:
        eventually(lambda: self.child.poll() is not None or self.health() == status)
        assert self.child.poll() is None, self.log

    def health(self) -> str | None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            try:
                connection.request("GET", "/health")
                return str(json.loads(connection.getresponse().read())["status"])
            except OSError:
                return None

    @contextmanager
    def answering(self, first_token: int = 1) -> Iterator[http.client.HTTPResponse]:
        """A stream of forty tokens, two seconds long, that has begun."""
        body = {"prompt": [first_token], "max_tokens": 40, "stream": True, "return_token_ids": True}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            yield response

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def wait(self) -> int:
        return self.child.wait(WAIT_S)


@contextmanager
def running(log_path: Path, *, load_s: float = 0.0, drain_s: float = 10.0) -> Iterator[Process]:
    port = choose_port("127.0.0.1", 0)
    command = [sys.executable, str(RIG), str(port), str(load_s), str(drain_s)]
    with log_path.open("wb") as log, subprocess.Popen(command, stderr=log) as child:
        try:
            yield Process(child, port, log_path)
        finally:
            child.kill()


def token_count(stream: bytes) -> int:
    return stream.count(b'"token_ids":[')


def test_a_signal_lets_open_answers_end_and_takes_no_more(tmp_path: Path) -> None:
    with running(tmp_path / "log") as process:
        process.wait_until("ok")
        with process.answering() as response:
            start = response.readline()
            process.signal(signal.SIGTERM)
            eventually(lambda: process.health() is None)
            content = start + response.read()
        assert token_count(content) == 40
        assert content.endswith(b"data: [DONE]\n\n")
        assert process.wait() == 0
    assert "stopping; open requests: 1; a second signal ends them immediately" in process.log


def test_an_answer_that_takes_too_long_to_end_is_told(tmp_path: Path) -> None:
    with running(tmp_path / "log", drain_s=0.1) as process:
        process.wait_until("ok")
        with process.answering() as response:
            response.readline()
            process.signal(signal.SIGINT)
            content = response.read()
        assert token_count(content) < 40
        *_, error, done, _ = content.split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the server is shutting down"
        assert done == b"data: [DONE]"
        assert process.wait() == 0


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "log") as process:
        process.wait_until("ok")
        with process.answering() as response:
            response.readline()
            process.signal(signal.SIGTERM)
            while "stopping" not in process.log:
                time.sleep(0.01)
            process.signal(signal.SIGTERM)
            assert process.wait() == 128 + signal.SIGTERM
            with pytest.raises(http.client.IncompleteRead):
                response.read()


def test_a_signal_ends_a_server_that_is_still_loading(tmp_path: Path) -> None:
    with running(tmp_path / "log", load_s=0.5) as process:
        process.wait_until("loading")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert process.log == f"listening on http://127.0.0.1:{process.port}\n"


def test_a_dying_engine_ends_answers_and_process(tmp_path: Path) -> None:
    with running(tmp_path / "log") as process:
        process.wait_until("ok")
        with process.answering() as response:
            response.readline()
            with process.answering(first_token=DEADLY_TOKEN) as deadly:
                assert deadly.status == 500
                assert b"the engine failed: it met token 13" in deadly.read()
            assert b"the engine failed: it met token 13" in response.read()
        assert process.wait() == 1
    assert process.log.endswith("error: the engine failed: it met token 13\n")


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines on stderr of the command."""
    code = main(arguments)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return code, captured.err.splitlines()


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert shown(capfd, "--model", "synthetic:tiny", "--port", str(port)) == (
            1,
            [
                f"error: cannot listen on 127.0.0.1 port {port}: address already in use",
                "",
                "hint: choose a free port with `--port 0`",
            ],
        )


def test_an_address_of_another_machine_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = shown(capfd, "--model", "synthetic:tiny", "--host", "192.0.2.1", "--port", "0")
    assert code == 1
    assert lines[0].startswith("error: cannot listen on 192.0.2.1 port 0: cannot assign requested address")


def test_a_wrong_flag_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Each line that is given is refused by the words of the line at the same place below."""
    said = []
    for line in given_in("server/flags")["wrong flags"].splitlines():
        code, lines = shown(capfd, *json.loads(line))
        assert code == 2
        assert lines[-1] == "hint: see `python -m kvbm.engines.embedded --help` for all flags"
        said.append(lines[0])
    assert_said("server/flags", "wrong flags", "\n".join(said))


def test_the_help_says_what_a_flag_is_by_default_and_never_none(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capfd.readouterr().out.split())
    assert "(default: 2048)" in text
    assert "None" not in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "synthetic:huge"], 2, "error: `engine.model`: unknown model `synthetic:huge`"),
        (["--model", "/nowhere"], 2, "error: `engine.model`: there is no directory `/nowhere`"),
        (["--model", "synthetic:tiny", "--max-model-len", "99999"], 2, "error: `max_model_len` is 99999 tokens"),
        (["--model", "synthetic:tiny", "--connector", "{"], 2, "error: `--connector` is not a resolved profile"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    arguments: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    got, lines = shown(capfd, *arguments, "--port", "0")
    assert lines[0].startswith("listening on http://127.0.0.1:")
    assert lines[1].startswith(message)
    assert got == code
