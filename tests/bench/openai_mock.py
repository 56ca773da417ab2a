"""An OpenAI server without a model: it streams known tokens at known times and records when it received and wrote what.

It serves /v1/completions (text or token ids) and /v1/chat/completions, streamed or whole, /v1/models and /health.
A token of a prompt is a word of its text; the answer follows from the prompt alone. `Answer` describes one answer,
faults included. `OpenAIMock(answer)` gives the same answer to all requests; `by_number` replaces it for single requests
(0, 1, ... in order of arrival). Stamps are `time.monotonic()` in seconds: all processes of a machine share this clock.

Used in a thread of the test (`with OpenAIMock() as mock: mock.base_url, mock.arrivals`), or as a program:
`python openai_mock.py --port N --answer JSON --by-number JSON`, which also serves its record at /arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

MODEL = "mock"
VOCABULARY = 1000


@dataclass(frozen=True)
class Answer:
    """How a request is answered: the first chunk `first_ms` after the request, each further one `token_ms` per token of
    it after the one before."""

    first_ms: float = 5.0
    token_ms: float = 1.0
    tokens: int | None = None  # None: as many as max_tokens allows
    tokens_per_chunk: int = 1
    first_chunk_tokens: int | None = None  # None: as the others
    reasoning_tokens: int = 0  # chat only: the first tokens arrive as `reasoning_key`
    reasoning_key: str = "reasoning_content"
    cached_tokens: int | None = None  # None: usage has no prompt_tokens_details
    finish_reason: str = "length"
    sends_usage: bool = True
    sends_role_chunk: bool = True  # chat only: first a chunk without text, as vLLM does
    chunks_per_write: int = 1  # more: events wait for each other and share one write
    split_utf8: bool = False  # token texts are "€", and a write ends inside each of them
    status: int = 200  # 4xx, 5xx: an error object
    stall_after: int | None = None  # silent from this chunk on; the connection stays open
    cut_after: int | None = None  # the connection is closed in place of this chunk
    error_event_after: int | None = None  # an error object is streamed in place of this chunk, which ends the stream


@dataclass
class Arrival:
    """What the mock saw and did for one request; stamps are None until they happen."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    first_byte_s: float
    complete_s: float
    token_ids: list[int] = field(default_factory=list)
    first_write_s: float | None = None  # right before the first chunk with a token is written
    token_writes_s: list[float] = field(default_factory=list)  # one per chunk with tokens
    end_s: float | None = None  # right before the last byte is written
    client_left: bool = False


def words(text: str) -> list[str]:
    return text.split()


def prompt_of(body: Mapping[str, Any]) -> list[Any]:
    """The prompt as a list with one item per token."""
    if "messages" in body:
        texts = []
        for message in body["messages"]:
            content = message.get("content") or ""
            texts += [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        return words(" ".join(texts))
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)):
        assert len(prompt) == 1, "one prompt per request"
        prompt = prompt[0]
    return words(prompt) if isinstance(prompt, str) else list(prompt)


def answer_tokens(prompt: list[Any], count: int) -> list[int]:
    seed = hashlib.sha256(json.dumps(prompt).encode()).digest()
    return [
        int.from_bytes(hashlib.sha256(seed + index.to_bytes(4)).digest()[:4]) % VOCABULARY for index in range(count)
    ]


def token_text(token: int, answer: Answer) -> str:
    return "€" if answer.split_utf8 else f" w{token}"


def chunks_of(tokens: list[int], answer: Answer) -> list[list[int]]:
    first = answer.first_chunk_tokens or answer.tokens_per_chunk
    rest = range(first, len(tokens), answer.tokens_per_chunk)
    return [tokens[:first], *(tokens[start : start + answer.tokens_per_chunk] for start in rest)] if tokens else []


class OpenAIMock:
    """Serves on 127.0.0.1 from a thread of its own; a context manager."""

    def __init__(
        self, answer: Answer | None = None, *, by_number: Mapping[int, Answer] | None = None, port: int = 0
    ) -> None:
        self.answer = answer or Answer()
        self.by_number = dict(by_number or {})
        self.arrivals: list[Arrival] = []
        self._port = port
        self._connections = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.open: set[Connection] = set()

    def __enter__(self) -> OpenAIMock:
        self._thread.start()
        assert self._ready.wait(10), "the mock did not start within 10 s"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await self._loop.create_server(lambda: Connection(self), "127.0.0.1", self._port)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = [connection.end() for connection in self.open]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    def next_connection(self) -> int:
        self._connections += 1
        return self._connections

    def answer_for(self, number: int) -> Answer:
        return self.by_number.get(number, self.answer)


class Connection(asyncio.Protocol):
    """One connection: parses requests, and answers one after the other."""

    def __init__(self, mock: OpenAIMock) -> None:
        self._mock = mock
        self._number = mock.next_connection()
        self._buffer = b""
        self._first_byte_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._arrival: Arrival | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._mock.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._mock.open.discard(self)
        if self._task is not None and not self._task.done():
            assert self._arrival is not None
            self._arrival.client_left = True
            self._task.cancel()

    def end(self) -> asyncio.Task[None] | None:
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task

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
        assert not self._buffer, "the mock does not serve pipelined requests"
        self._dispatch(first.split(" ")[1].split("?")[0], headers, rest[:length], now)

    def _dispatch(self, path: str, headers: dict[str, str], data: bytes, now: float) -> None:
        mock = self._mock
        if path in ("/v1/completions", "/v1/chat/completions"):
            arrival = Arrival(
                len(mock.arrivals), path, headers, json.loads(data), self._number, self._first_byte_s, complete_s=now
            )
            mock.arrivals.append(arrival)
            self._arrival = arrival
            self._task = asyncio.create_task(self._respond(arrival, mock.answer_for(arrival.number)))
        elif path == "/v1/models":
            self._whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]})
        elif path == "/arrivals":
            self._whole(200, [asdict(arrival) for arrival in mock.arrivals])
        else:
            self._whole(200 if path == "/health" else 404, {})

    def _whole(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self._write(
            f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def _respond(self, arrival: Arrival, answer: Answer) -> None:
        if answer.status != 200:
            self._whole(answer.status, {"error": {"message": "requested by the test", "code": answer.status}})
            return
        prompt = prompt_of(arrival.body)
        allowed = arrival.body.get("max_completion_tokens") or arrival.body.get("max_tokens") or 16
        arrival.token_ids = answer_tokens(prompt, min(allowed, answer.tokens if answer.tokens is not None else allowed))
        usage = usage_of(len(prompt), len(arrival.token_ids), answer)
        if arrival.body.get("stream"):
            await self._stream(arrival, answer, usage)
        else:
            await _until(arrival.complete_s + (answer.first_ms + answer.token_ms * len(arrival.token_ids)) / 1e3)
            arrival.first_write_s = arrival.end_s = time.monotonic()
            self._whole(200, whole_body(arrival, answer, usage))

    async def _stream(self, arrival: Arrival, answer: Answer, usage: dict[str, Any]) -> None:
        self._write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        waiting: list[bytes] = []
        if "chat" in arrival.path and answer.sends_role_chunk:
            self._event(event_body(arrival, {"delta": {"role": "assistant", "content": ""}}))
        chunks = chunks_of(arrival.token_ids, answer)
        at = arrival.complete_s + answer.first_ms / 1e3
        written = 0
        for number, tokens in enumerate(chunks):
            await _until(at)
            if number == answer.stall_after:
                await asyncio.sleep(3600)
            if number == answer.cut_after:
                assert self._transport is not None
                self._transport.close()
                return
            if number == answer.error_event_after:
                self._event(b'{"error": {"message": "requested by the test", "code": 500}}')
                break
            choice = choice_of(arrival, answer, tokens, written, is_last=number == len(chunks) - 1)
            waiting.append(event_body(arrival, choice))
            written += len(tokens)
            at += answer.token_ms * len(chunks[min(number + 1, len(chunks) - 1)]) / 1e3
            if len(waiting) >= answer.chunks_per_write or number == len(chunks) - 1:
                await self._tokens(arrival, waiting, answer)
                waiting = []
        arrival.end_s = time.monotonic()
        if answer.sends_usage and (arrival.body.get("stream_options") or {}).get("include_usage"):
            self._event(json.dumps(frame(arrival) | {"choices": [], "usage": usage}).encode())
        self._event(b"[DONE]")
        self._write(b"0\r\n\r\n")

    async def _tokens(self, arrival: Arrival, bodies: list[bytes], answer: Answer) -> None:
        """Write the events of `bodies` at once, or cut inside the first character of more than one byte."""
        data = b"".join(b"data: " + body + b"\n\n" for body in bodies)
        now = time.monotonic()
        arrival.first_write_s = arrival.first_write_s or now
        arrival.token_writes_s += [now] * len(bodies)
        middle = data.index("€".encode()) + 1 if answer.split_utf8 else len(data)
        self._chunk(data[:middle])
        if middle < len(data):
            await asyncio.sleep(0.002)
            self._chunk(data[middle:])

    def _event(self, body: bytes) -> None:
        self._chunk(b"data: " + body + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self._write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def _until(at_s: float) -> None:
    delay = at_s - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)


def frame(arrival: Arrival) -> dict[str, Any]:
    kind = "chat.completion" if "chat" in arrival.path else "text_completion"
    chunk = ".chunk" if "chat" in arrival.path and arrival.body.get("stream") else ""
    return {"id": f"mock-{arrival.number}", "object": kind + chunk, "created": 0, "model": arrival.body.get("model")}


def event_body(arrival: Arrival, choice: dict[str, Any]) -> bytes:
    whole = frame(arrival) | {"choices": [{"index": 0, "finish_reason": None} | choice]}
    return json.dumps(whole, ensure_ascii=False).encode()


def usage_of(prompt_tokens: int, output_tokens: int, answer: Answer) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    usage["total_tokens"] = prompt_tokens + output_tokens
    if answer.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
    return usage


def choice_of(arrival: Arrival, answer: Answer, tokens: list[int], start: int, *, is_last: bool) -> dict[str, Any]:
    """The choice of a chunk whose first token is number `start` of the answer."""
    texts = [token_text(token, answer) for token in tokens]
    choice: dict[str, Any] = {"finish_reason": answer.finish_reason if is_last else None}
    if arrival.body.get("return_token_ids"):
        choice["token_ids"] = tokens
    if "chat" not in arrival.path:
        choice["text"] = "".join(texts)
        if arrival.body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": texts, "token_logprobs": [-0.5] * len(tokens)}
        return choice
    reasoning = texts[: max(0, answer.reasoning_tokens - start)]
    parts = {answer.reasoning_key: "".join(reasoning), "content": "".join(texts[len(reasoning) :])}
    choice["delta"] = {key: text for key, text in parts.items() if text}
    if arrival.body.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": text, "logprob": -0.5} for text in texts]}
    return choice


def whole_body(arrival: Arrival, answer: Answer, usage: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0} | choice_of(arrival, answer, arrival.token_ids, 0, is_last=True)
    if "delta" in choice:
        choice["message"] = {"role": "assistant"} | choice.pop("delta")
    return frame(arrival) | {"choices": [choice]} | ({"usage": usage} if answer.sends_usage else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--answer", type=json.loads, default={}, help="fields of Answer")
    parser.add_argument("--by-number", type=json.loads, default={}, help="number: fields that differ from --answer")
    given = parser.parse_args()
    answer = Answer(**given.answer)
    by_number = {int(number): replace(answer, **fields) for number, fields in given.by_number.items()}
    with OpenAIMock(answer, by_number=by_number, port=given.port):
        threading.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
