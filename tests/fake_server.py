"""A fake HTTP server on 127.0.0.1, in a thread of its own: a subclass overrides `answer`.

It knows HTTP/1.1 with connections that stay open, and what a test must see or cause: when the bytes of a request
arrived, events of a stream at chosen times, an answer that never ends, a client that leaves. Nothing is parsed that a
subclass does not ask for. Stamps are `time.monotonic()` in seconds: all processes of a machine share this clock.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self


@dataclass(kw_only=True)
class Request:
    method: str
    path: str  # without the query
    query: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    connection: int
    first_byte_s: float
    complete_s: float

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)


class FakeServer:
    """A context manager, which raises what an answer has raised. `port` 0 takes a free one. With `tls`, it speaks
    HTTPS. Its address ends with `prefix`, which `answer` does not see."""

    tls: ssl.SSLContext | None = None
    prefix = ""

    def __init__(self, *, port: int = 0, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, port
        self.connections: set[Connection] = set()
        self.connection_count = 0
        self.failures: list[Exception] = []
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def answer(self, request: Request, connection: Connection) -> None:
        """Called once per request, in the server's thread; cancelled when the client leaves."""
        connection.reply(200)

    def client_left(self, request: Request) -> None:
        """Called when a client leaves before its answer has ended."""

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}{self.prefix}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60), "the server did not start within 60 s"
        return self

    def __exit__(self, kind: object, *ended: object) -> None:
        self.close()
        if self.failures and kind is None:
            raise self.failures[0]

    def serve_forever(self) -> None:
        """As a program. Wakes up, because a thread of the server may get the signal of a process that was stopped."""
        with self:
            while True:
                time.sleep(0.2)

    def close(self) -> None:
        """End every connection at once. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await self._loop.create_server(lambda: Connection(self), self.host, self.port, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        while tasks := asyncio.all_tasks() - {
            asyncio.current_task()
        }:  # answers, and connections that are being accepted:
            self._end_connections()  # Python 3.11 leaves their sockets open if the server closes meanwhile
            await asyncio.wait(tasks)
        server.close()
        self._end_connections()

    def _end_connections(self) -> None:
        for connection in list(self.connections):
            connection.end()


class Connection(asyncio.Protocol):
    """One connection: parses requests, answers one after the other, and writes what the server says."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        server.connection_count += 1
        self._number = server.connection_count
        self._buffer = b""
        self._first_byte_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._task is not None and not self._task.done():
            assert self._request is not None
            self._server.client_left(self._request)
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._buffer:
            self._first_byte_s = now
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        assert not self._buffer, "the server does not serve pipelined requests"
        method, target, _ = first.split(" ")
        path, _, query = target.partition("?")
        assert path.startswith(self._server.prefix), path
        path = path.removeprefix(self._server.prefix)
        self._request = Request(
            method=method,
            path=path,
            query=query,
            headers=headers,
            body=rest[:length],
            connection=self._number,
            first_byte_s=self._first_byte_s,
            complete_s=now,
        )
        self._task = asyncio.create_task(self._answer(self._request))

    async def _answer(self, request: Request) -> None:
        try:
            await self._server.answer(request, self)
        except Exception as error:
            self._server.failures.append(error)
            self.end()

    def reply(self, status: int, content: object = b"", **headers: str) -> None:
        """A whole answer: bytes, a text, or what becomes JSON."""
        text = content if isinstance(content, bytes | str) else json.dumps(content)
        data = text if isinstance(text, bytes) else text.encode()
        assert self._request is not None
        self.write(
            _head(status, {**headers, "Content-Length": str(len(data))})
            + (b"" if self._request.method == "HEAD" else data)
        )

    def start_stream(self) -> None:
        self.write(_head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}))

    def event(self, content: bytes) -> None:
        self.chunk(b"data: " + content + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.write(b"0\r\n\r\n")

    def close(self) -> None:
        """After what was written."""
        assert self._transport is not None
        self._transport.close()

    def end(self) -> None:
        """At once, with its answer."""
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()

    @property
    def unsent_bytes(self) -> int:
        assert self._transport is not None
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    return f"HTTP/1.1 {status} x\r\n{''.join(lines)}\r\n".encode()


async def until(at_s: float) -> None:
    """Sleep until a time of `time.monotonic()`; not at all if it has passed."""
    if (delay_s := at_s - time.monotonic()) > 0:
        await asyncio.sleep(delay_s)
