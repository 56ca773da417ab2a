"""An OpenAI server without a model: it streams known tokens at known times and records when it received and wrote what.

It serves /v1/completions (text or token ids) and /v1/chat/completions, streamed or whole, /v1/models and /health.
A token of a prompt is a word of its text; the answer follows from the prompt alone. `Answer` describes one answer,
faults included. `OpenAIMock(answer)` gives the same answer to all requests; `by_number` replaces it for single requests
(0, 1, ... in order of arrival).

Used in a thread of the test (`with OpenAIMock() as mock: mock.url, mock.arrivals`), or as a program:
`python openai_mock.py --port N --answer JSON --by-number JSON`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # as a program

from fake_server import Connection, FakeServer, Request, until

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
    reasoning_tokens: int = 0  # chat only: the first tokens arrive as `reasoning_content`
    cached_tokens: int | None = None  # None: usage has no prompt_tokens_details
    finish_reason: str = "length"
    sends_usage: bool = True
    chunks_per_write: int = 1  # more: events wait for each other and share one write
    split_utf8: bool = False  # token texts are "€", and a write ends inside each of them
    status: int = 200  # 4xx, 5xx: an error object
    stall_after: int | None = None  # silent from this chunk on; the connection stays open
    cut_after: int | None = None  # the connection is closed in place of this chunk
    error_event_after: int | None = None  # an error object is streamed in place of this chunk, which ends the stream


@dataclass(kw_only=True)
class Arrival(Request):
    """What the mock saw and did for one request; stamps are None until they happen."""

    number: int
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


class OpenAIMock(FakeServer):
    def __init__(
        self, answer: Answer | None = None, *, by_number: Mapping[int, Answer] | None = None, port: int = 0
    ) -> None:
        super().__init__(port=port)
        self.every = answer or Answer()
        self.by_number = dict(by_number or {})
        self.arrivals: list[Arrival] = []
        self._open: dict[int, Arrival] = {}  # by connection

    async def answer(self, request: Request, connection: Connection) -> None:
        path = request.path
        if path in ("/v1/completions", "/v1/chat/completions"):
            arrival = Arrival(**vars(request), number=len(self.arrivals))
            self.arrivals.append(arrival)
            self._open[request.connection] = arrival
            await respond(arrival, self.by_number.get(arrival.number, self.every), connection)
        elif path == "/v1/models":
            connection.reply(
                200, {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]}
            )
        else:
            connection.reply(200 if path == "/health" else 404, {})

    def client_left(self, request: Request) -> None:
        if request.connection in self._open:
            self._open[request.connection].client_left = True


async def respond(arrival: Arrival, answer: Answer, connection: Connection) -> None:
    if answer.status != 200:
        connection.reply(answer.status, {"error": {"message": "requested by the test", "code": answer.status}})
        return
    prompt = prompt_of(arrival.json)
    allowed = arrival.json.get("max_completion_tokens") or arrival.json.get("max_tokens") or 16
    arrival.token_ids = answer_tokens(prompt, min(allowed, answer.tokens if answer.tokens is not None else allowed))
    usage = usage_of(len(prompt), len(arrival.token_ids), answer)
    if arrival.json.get("stream"):
        await stream(arrival, answer, usage, connection)
    else:
        await until(arrival.complete_s + (answer.first_ms + answer.token_ms * len(arrival.token_ids)) / 1e3)
        arrival.first_write_s = arrival.end_s = time.monotonic()
        connection.reply(200, whole_body(arrival, answer, usage))


async def stream(arrival: Arrival, answer: Answer, usage: dict[str, Any], connection: Connection) -> None:
    connection.start_stream()
    waiting: list[bytes] = []
    if "chat" in arrival.path:  # first a chunk without text, as vLLM does
        connection.event(event_body(arrival, {"delta": {"role": "assistant", "content": ""}}))
    chunks = chunks_of(arrival.token_ids, answer)
    at = arrival.complete_s + answer.first_ms / 1e3
    written = 0
    for number, tokens in enumerate(chunks):
        await until(at)
        if number == answer.stall_after:
            await asyncio.sleep(3600)
        if number == answer.cut_after:
            connection.close()
            return
        if number == answer.error_event_after:
            connection.event(b'{"error": {"message": "requested by the test", "code": 500}}')
            break
        choice = choice_of(arrival, answer, tokens, written, is_last=number == len(chunks) - 1)
        waiting.append(event_body(arrival, choice))
        written += len(tokens)
        at += answer.token_ms * len(chunks[min(number + 1, len(chunks) - 1)]) / 1e3
        if len(waiting) >= answer.chunks_per_write or number == len(chunks) - 1:
            await write_tokens(arrival, waiting, answer, connection)
            waiting = []
    arrival.end_s = time.monotonic()
    if answer.sends_usage and (arrival.json.get("stream_options") or {}).get("include_usage"):
        connection.event(json.dumps(frame(arrival) | {"choices": [], "usage": usage}).encode())
    connection.event(b"[DONE]")
    connection.end_stream()


async def write_tokens(arrival: Arrival, bodies: list[bytes], answer: Answer, connection: Connection) -> None:
    """Write the events of `bodies` at once, or cut inside the first character of more than one byte."""
    data = b"".join(b"data: " + body + b"\n\n" for body in bodies)
    now = time.monotonic()
    arrival.first_write_s = arrival.first_write_s or now
    arrival.token_writes_s += [now] * len(bodies)
    middle = data.index("€".encode()) + 1 if answer.split_utf8 else len(data)
    connection.chunk(data[:middle])
    if middle < len(data):
        await asyncio.sleep(0.002)
        connection.chunk(data[middle:])


def frame(arrival: Arrival) -> dict[str, Any]:
    kind = "chat.completion" if "chat" in arrival.path else "text_completion"
    chunk = ".chunk" if "chat" in arrival.path and arrival.json.get("stream") else ""
    return {"id": f"mock-{arrival.number}", "object": kind + chunk, "created": 0, "model": arrival.json.get("model")}


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
    if arrival.json.get("return_token_ids"):
        choice["token_ids"] = tokens
    if "chat" not in arrival.path:
        choice["text"] = "".join(texts)
        if arrival.json.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": texts, "token_logprobs": [-0.5] * len(tokens)}
        return choice
    reasoning = texts[: max(0, answer.reasoning_tokens - start)]
    parts = {"reasoning_content": "".join(reasoning), "content": "".join(texts[len(reasoning) :])}
    choice["delta"] = {key: text for key, text in parts.items() if text}
    if arrival.json.get("logprobs"):
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
    OpenAIMock(answer, by_number=by_number, port=given.port).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
