"""An OpenAI server without a model for overhead.py: streams 20 one-token events per request and stamps its work.

It costs little, so that the client is the limit: a raw asyncio protocol that writes prepared bytes. /stamps returns and
forgets, per request, its X-Request-Id, when the request was complete, and when its first event was written, in seconds
of `time.perf_counter()`, which is one clock for all processes of a machine. With --bodies, it also returns when the
first bytes of the request arrived, and its body.

With --slots, it has a known capacity instead: a request waits for one of the slots, holds it for the service time, and
is then answered at once. Service times have a lognormal distribution with the given mean. The times follow from the
arrivals alone, so that a busy machine delays an answer and changes no capacity.

    python bench/client/server.py --first-ms 50 --token-ms 20      # prints its port
    python bench/client/server.py --slots 4 --service-ms 100 --spread 0.2 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import time

TOKENS = 20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FRAME = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": "mock"}
USAGE = {"prompt_tokens": 200, "completion_tokens": TOKENS, "total_tokens": 200 + TOKENS}


def chunk(payload: bytes) -> bytes:
    data = b"data: " + payload + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(token: int) -> bytes:
    choice = {"index": 0, "text": f" w{token}", "logprobs": None, "finish_reason": None, "stop_reason": None}
    if token == TOKENS - 1:
        choice["finish_reason"] = "length"
    return chunk(json.dumps({**FRAME, "choices": [{**choice, "token_ids": [token]}], "usage": None}).encode())


EVENTS = [event(token) for token in range(TOKENS)]
END = chunk(json.dumps({**FRAME, "choices": [], "usage": USAGE}).encode()) + chunk(b"[DONE]") + b"0\r\n\r\n"


class Slots:
    """Serves as many requests at a time as it has slots, in the order of their arrival."""

    def __init__(self, count: int, service_s: float, spread: float, seed: int) -> None:
        self._free_at = [0.0] * count
        self._service_s, self._spread, self._random = service_s, spread, random.Random(seed)

    def end_of(self, now: float) -> float:
        """When a request that arrives now has been served."""
        start = max(now, self._free_at[0])
        service_s = self._service_s * self._random.lognormvariate(-(self._spread**2) / 2, self._spread)
        heapq.heapreplace(self._free_at, start + service_s)
        return start + service_s


class Connection(asyncio.Protocol):
    def __init__(
        self,
        first_s: float,
        token_s: float,
        stamps: list[list[object]],
        *,
        keeps_bodies: bool,
        slots: Slots | None,
    ) -> None:
        self._first_s, self._token_s, self._stamps = first_s, token_s, stamps
        self._keeps_bodies, self._slots = keeps_bodies, slots
        self._buffer, self._arrived = b"", 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._arrived = self._arrived if self._buffer else now
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines[1:])
        if len(body) < int(headers.get(b"content-length", 0)):
            return
        self._buffer = b""
        if lines[0].startswith(b"post /v1/"):
            stamp: list[object] = [headers.get(b"x-request-id", b"").decode(), now, None]
            stamp += [self._arrived, body.decode()] if self._keeps_bodies else []
            self._stamps.append(stamp)
            self._answer(stamp)
        else:
            self._plain(lines[0].split(b" ")[1])

    def _answer(self, stamp: list[object]) -> None:
        loop = asyncio.get_running_loop()
        if self._slots is not None:
            loop.call_at(self._slots.end_of(loop.time()), self._answer_whole, stamp)
        elif self._token_s or self._first_s:
            loop.call_later(self._first_s, self._next, stamp, 0)
        else:
            self._answer_whole(stamp)

    def _answer_whole(self, stamp: list[object]) -> None:
        if self._transport.is_closing():
            return
        stamp[2] = time.perf_counter()
        self._transport.write(HEAD + EVENTS[0])
        for data in EVENTS[1:]:
            self._transport.write(data)
        self._transport.write(END)

    def _next(self, stamp: list[object], token: int) -> None:
        if self._transport.is_closing():
            return
        if token == 0:
            stamp[2] = time.perf_counter()
        last = token == TOKENS - 1
        self._transport.write((HEAD if token == 0 else b"") + EVENTS[token] + (END if last else b""))
        if not last:
            asyncio.get_running_loop().call_later(self._token_s, self._next, stamp, token + 1)

    def _plain(self, path: bytes) -> None:
        value: object = {"object": "list", "data": [{"id": "mock", "object": "model"}]}
        if path == b"/stamps":
            value = [*self._stamps]
            self._stamps.clear()
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._transport.write(head.encode() + data)


async def serve(first_s: float, token_s: float, *, keeps_bodies: bool, slots: Slots | None) -> None:
    stamps: list[list[object]] = []
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(first_s, token_s, stamps, keeps_bodies=keeps_bodies, slots=slots)

    server = await loop.create_server(connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-ms", type=float, default=0.0)
    parser.add_argument("--token-ms", type=float, default=0.0)
    parser.add_argument("--bodies", action="store_true")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--service-ms", type=float, default=100.0)
    parser.add_argument("--spread", type=float, default=0.0, help="standard deviation of the logarithm")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    slots = Slots(given.slots, given.service_ms / 1e3, given.spread, given.seed) if given.slots else None
    asyncio.run(serve(given.first_ms / 1e3, given.token_ms / 1e3, keeps_bodies=given.bodies, slots=slots))


if __name__ == "__main__":
    main()
