"""A server of OpenAI's completions API on a raw socket that records every request and streams fixed answers.

It runs in a thread of its own, so that processes and drivers of the test can use it in the same way. The answer depends
on the body only: the same body gets the same text in every run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReceivedRequest:
    arrived_s: float
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def user(self) -> str | None:
        return self.headers.get("x-user-id")

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Behaviour:
    """`status_of` gives the HTTP status of the n-th request (from 0); `answer` overrides the whole event stream.

    The n-th request is answered when as many requests have arrived as `answers_after` gives.
    """

    first_token_s: float = 0.0
    chunks: int = 3
    has_usage: bool = True
    status_of: Callable[[int], int] = lambda position: 200
    answer: Callable[[ReceivedRequest], list[bytes]] | None = None
    answers_after: Callable[[int], int] = lambda position: 0


@dataclass
class RecordingServer:
    behaviour: Behaviour = field(default_factory=Behaviour)
    requests: list[ReceivedRequest] = field(default_factory=list)

    def __enter__(self) -> RecordingServer:
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**24)
        self._port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stopped.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = ReceivedRequest(time.time(), first.split()[1], headers, body)
                position = len(self.requests)
                self.requests.append(request)
                await self._answer(position, request, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has closed the connection, or the test is over
        finally:
            writer.close()
            self._connections.discard(asyncio.current_task())

    async def _answer(self, position: int, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        behaviour = self.behaviour
        status = behaviour.status_of(position)
        if status != 200:
            text = b'{"error":{"message":"refused by the test"}}'
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))
            await writer.drain()
            return
        while len(self.requests) < behaviour.answers_after(position):
            await asyncio.sleep(0.01)
        await asyncio.sleep(behaviour.first_token_s)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in (behaviour.answer or self.events)(request):
            data = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def events(self, request: ReceivedRequest) -> list[bytes]:
        is_chat = request.path.endswith("/chat/completions")
        texts = answer_texts(request.body, self.behaviour.chunks)
        events = [_event(is_chat, text, None) for text in texts] + [_event(is_chat, "", "length")]
        if self.behaviour.has_usage:
            usage = {"prompt_tokens": len(request.body), "completion_tokens": len(texts), "total_tokens": 0}
            events.append(json.dumps({**_envelope(is_chat), "choices": [], "usage": usage}).encode())
        return [*events, b"[DONE]"]


def answer_texts(body: bytes, chunks: int) -> list[str]:
    digest = hashlib.sha256(body).hexdigest()
    return [f" é{digest[position : position + 4]}" for position in range(chunks)]


def _envelope(is_chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "one", "object": kind, "created": 1, "model": "m"}


def _event(is_chat: bool, text: str, finish_reason: str | None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    choice |= {"delta": {"content": text}} if is_chat else {"text": text}
    return json.dumps({**_envelope(is_chat), "choices": [choice]}).encode()
