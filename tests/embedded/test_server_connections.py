"""Clients that end their side, leave, send no HTTP, or take every descriptor."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiohttp import web
from server_rig import COMPLETIONS, Client, WrittenEngine, eventually, serve

from kvbm.embedded.http.connections import INTERIM, READ_BYTES, BoundedSite, Connection, front

pytest.importorskip("transformers")

DESCRIPTORS = 96
CLIENTS = 300
WATCHED_S = 2.0


def request_of(version: str = "1.1", *, stream: bool = False) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_ends_its_side_gets_its_answer(version: str, stream: bool) -> None:
    engine = WrittenEngine(is_paced=True)

    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request_of(version, stream=stream))
        writer.write_eof()
        engine.permit(1)
        await eventually(lambda: bool(engine.submitted))
        await asyncio.sleep(0.2)
        engine.permit(3)
        answer = await reader.read()
        writer.close()
        assert (b"[DONE]" if stream else b'"finish_reason":"length"') in answer.replace(b": ", b":")
        assert answer.removeprefix(INTERIM).count(b"HTTP/1.") >= 1
        assert engine.aborted == []

    serve(engine, use)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("has_ended", [False, True], ids=["at once", "after its side"])
def test_a_client_that_leaves_ends_its_request_although_nothing_is_computed(stream: bool, has_ended: bool) -> None:
    engine = WrittenEngine(is_paced=True)

    async def use(client: Client) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request_of(stream=stream))
        if has_ended:
            writer.write_eof()
        engine.permit(1)
        await eventually(lambda: bool(engine.submitted))
        await asyncio.sleep(0.1)
        writer.close()
        await eventually(lambda: len(engine.aborted) == 1)

    serve(engine, use)


def test_a_client_that_ends_its_side_in_the_middle_of_a_request_is_closed() -> None:
    async def use(client: Client) -> None:
        for part in (request_of()[:-1], request_of()[:20], b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(part)
            writer.write_eof()
            assert b"200 OK" not in await reader.read()
            writer.close()

    serve(WrittenEngine(), use)


def test_a_body_of_many_chunks_is_read_in_pieces_between_which_others_get_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces: list[int] = []
    received = Connection.data_received

    def data_received(connection: Connection, data: bytes) -> None:
        pieces.append(len(data))
        received(connection, data)

    monkeypatch.setattr(Connection, "data_received", data_received)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()

    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(head + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()

    serve(WrittenEngine(), use)
    assert sum(pieces) > 300_000
    assert max(pieces) <= READ_BYTES


@pytest.mark.parametrize("path", ["/health", "/none"])
def test_an_unknown_expectation_is_ignored(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode() + b"Expect: \xff\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.split()[1] == (b"200" if path == "/health" else b"404")

    serve(WrittenEngine(), use)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("addresses", "error"),
    [
        (["127.0.0.1", "192.0.2.1"], None),  # the second is not of this machine
        (["192.0.2.1", "127.0.0.1"], None),
        (["192.0.2.1"], errno.EADDRNOTAVAIL),
        (["192.0.2.1", "used"], errno.EADDRINUSE),
    ],
)
def test_a_name_with_an_address_that_is_not_here_is_served_on_the_others(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], error: int | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:

        async def scenario() -> None:
            found = [("127.0.0.1", used.getsockname()[1]) if one == "used" else (one, 0) for one in addresses]

            async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", one) for one in found]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
            runner = front(web.Application())
            await runner.setup()
            try:
                await BoundedSite(runner, "a-name", 0).start()
                assert [one[0] for one in runner.addresses] == ["127.0.0.1"]
            finally:
                await runner.cleanup()

        if error is None:
            asyncio.run(scenario())
        else:
            with pytest.raises(OSError) as caught:
                asyncio.run(scenario())
            assert caught.value.errno == error


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("begin", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"])
def test_more_clients_than_descriptors_cost_neither_log_nor_time_and_others_are_answered(
    tmp_path: Path, begin: bytes
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    with log.open("wb") as file, ExitStack() as stack:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "server_rig.py"), str(port), "0", "1"],
            stderr=file,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
        stack.callback(server.wait)
        stack.callback(server.kill)
        while b"serving" not in log.read_bytes():
            assert server.poll() is None
            time.sleep(0.05)
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)).sendall(begin)
        before_s = cpu_s(server.pid)
        time.sleep(WATCHED_S)
        assert cpu_s(server.pid) - before_s < WATCHED_S / 10
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in client.recv(100)
    assert log.stat().st_size < 10_000
