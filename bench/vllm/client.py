"""The client of all measurements in this directory: one streamed request at a time, each on a new connection.

The connection is made and the body encoded before the clock starts. The clock stops right after the read that returned
the first token, before parsing. Prompts are token ids, so their length is exact and no tokenizer runs.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server import MODEL_NAME, Server

VOCABULARY = range(300, 4000)


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    total_s: float
    tokens: tuple[str, ...]
    log_probabilities: tuple[float, ...]
    sent_at: float


def random_prompt(seed: object, token_count: int) -> list[int]:
    choice = random.Random(str(seed))
    return [choice.choice(VOCABULARY) for _ in range(token_count)]


def complete(
    server: Server,
    prompt: Sequence[int],
    *,
    token_count: int = 8,
    salt: str | None = None,
    fields: Mapping[str, object] | None = None,
) -> Answer:
    """Request `token_count` tokens, greedily. No cache has the blocks of a prompt with a new `salt`. `fields` are
    further ones of the body."""
    body = json.dumps(
        {
            **(fields or {}),
            **({} if salt is None else {"cache_salt": salt}),
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": token_count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
    ).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sent_at, started = time.monotonic(), time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        line = next_event(response)
        ttft_s = time.perf_counter() - started
        events = [line]
        while not (line := next_event(response)).startswith(b"data: [DONE]"):
            events.append(line)
        total_s = time.perf_counter() - started
    finally:
        connection.close()
    return _answer(events, ttft_s, total_s, sent_at)


def complete_quietly(server: Server, prompt: Sequence[int], *, token_count: int) -> None:
    """Request `token_count` tokens in one answer, without a stream: many clients then take little of the machine."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": token_count, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200 or not json.loads(answer)["choices"]:
        raise RuntimeError(f"HTTP {response.status}: {answer[:300]!r}")


def next_event(response: http.client.HTTPResponse) -> bytes:
    """The next line with data; any other response, such as an error, ends the measurement."""
    while line := response.readline():
        if line.startswith(b"data: "):
            return line
        if line.strip():
            raise RuntimeError(f"HTTP {response.status}: {line!r}")
    raise RuntimeError(f"HTTP {response.status}: the stream ended early")


def _answer(events: list[bytes], ttft_s: float, total_s: float, sent_at: float) -> Answer:
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in events]
    if any("error" in chunk for chunk in chunks) or not chunks[0]["choices"][0]["logprobs"]["tokens"]:
        raise RuntimeError(f"not a stream of tokens: {events[0]!r}")
    found = [
        chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["logprobs"]
    ]
    return Answer(
        ttft_s=ttft_s,
        total_s=total_s,
        tokens=tuple(token for part in found for token in part["tokens"]),
        log_probabilities=tuple(value for part in found for value in part["token_logprobs"]),
        sent_at=sent_at,
    )
