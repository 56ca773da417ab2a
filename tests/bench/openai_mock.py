"""An OpenAI server without a model: it streams known tokens at known times and records when it received and wrote what.

It serves /v1/completions (text or token ids), /v1/chat/completions and /v1/responses, always as a stream, /v1/models
and /health. A token of a prompt is a word of its text; the answer follows from the prompt alone. `Answer` describes one
answer, faults included. `OpenAIMock(answer)` gives the same answer to all requests; `by_number` replaces it for single
requests (0, 1, ... in order of arrival). `MockEngine` in mock_engine.py answers as an engine with a cache does.

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

from kvbm_cli.bench.workload.plan import CHAT, COMPLETIONS, PATHS, RESPONSES

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
    cached_tokens: int | None = None  # None: usage has no prompt_tokens_details
    cached_by_tier: Mapping[str, int] | None = None
    sends_usage: bool = True
    status: int = 200  # 4xx, 5xx: an error object
    message: str = "requested by the test"  # of an error
    stall_after: int | None = None  # silent from this chunk on; the connection stays open
    cut_after: int | None = None  # the connection is closed in place of this chunk
    events: tuple[bytes, ...] | None = None  # exactly these are streamed
    stays_open: bool = False  # the stream has no end


@dataclass(kw_only=True)
class Arrival(Request):
    """What the mock saw and did for one request; stamps are None until they happen."""

    number: int
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    first_write_s: float | None = None  # right before the first chunk with a token is written


def prompt_of(body: Mapping[str, Any]) -> list[Any]:
    """The prompt as a list with one item per token."""
    if "messages" in body:
        texts = []
        for message in body["messages"]:
            content = message.get("content") or ""
            texts += [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        return " ".join(texts).split()
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)):
        assert len(prompt) == 1, "one prompt per request"
        prompt = prompt[0]
    return prompt.split() if isinstance(prompt, str) else list(prompt)


def answer_tokens(prompt: list[Any], count: int) -> list[int]:
    seed = hashlib.sha256(json.dumps(prompt).encode()).digest()
    return [
        int.from_bytes(hashlib.sha256(seed + index.to_bytes(4)).digest()[:4]) % VOCABULARY for index in range(count)
    ]


class OpenAIMock(FakeServer):
    model_name = MODEL

    def __init__(
        self, answer: Answer | None = None, *, by_number: Mapping[int, Answer] | None = None, port: int = 0
    ) -> None:
        super().__init__(port=port)
        self.every = answer or Answer()
        self.by_number = dict(by_number or {})
        self.arrivals: list[Arrival] = []

    async def answer(self, request: Request, connection: Connection) -> None:
        if request.path in PATHS.values():
            arrival = Arrival(**vars(request), number=len(self.arrivals))
            self.arrivals.append(arrival)
            await self._respond(arrival, self.answer_to(arrival), connection)
        elif request.path == "/v1/models":
            model = {"id": self.model_name, "object": "model", "max_model_len": 131072}
            connection.reply(200, {"object": "list", "data": [model]})
        else:
            self.control(request, connection)

    def control(self, request: Request, connection: Connection) -> None:
        """Answers what is no request for tokens."""
        connection.reply(200 if request.path == "/health" else 404, {})

    def answer_to(self, arrival: Arrival) -> Answer:
        """Sets the tokens of the prompt and of the answer, and says how it is sent."""
        answer = self.by_number.get(arrival.number, self.every)
        prompt = prompt_of(arrival.json)
        allowed = arrival.json.get("max_completion_tokens") or arrival.json.get("max_tokens") or 16
        arrival.prompt_tokens = len(prompt)
        arrival.token_ids = answer_tokens(prompt, min(allowed, allowed if answer.tokens is None else answer.tokens))
        return answer

    async def _respond(self, arrival: Arrival, answer: Answer, connection: Connection) -> None:
        if answer.status != 200:
            connection.reply(answer.status, {"error": {"message": answer.message, "code": answer.status}})
            return
        connection.start_stream()
        if answer.events is None and not await self._stream(arrival, answer, connection):
            return
        for event in answer.events or last_events(arrival, answer):
            connection.event(event)
        if answer.stays_open:
            await asyncio.sleep(3600)
        connection.end_stream()

    async def _stream(self, arrival: Arrival, answer: Answer, connection: Connection) -> bool:
        """Whether the stream has an end."""
        if arrival.path == CHAT:  # first a chunk without text, as vLLM does
            connection.event(event_body(arrival, {"delta": {"role": "assistant", "content": ""}}))
        at, tokens = arrival.complete_s + answer.first_ms / 1e3, arrival.token_ids
        for number, start in enumerate(range(0, len(tokens), answer.tokens_per_chunk)):
            await until(at)
            if number == answer.stall_after:
                await asyncio.sleep(3600)
            if number == answer.cut_after:
                connection.close()
                return False
            arrival.first_write_s = arrival.first_write_s or time.monotonic()
            end = start + answer.tokens_per_chunk
            choice = self.choice_of(arrival, tokens[start:end], is_last=end >= len(tokens))
            connection.event(event_body(arrival, choice))
            at += answer.token_ms * len(tokens[end : end + answer.tokens_per_chunk]) / 1e3
        return True

    @staticmethod
    def token_text(token: int) -> str:
        return f" €{token}"

    def choice_of(self, arrival: Arrival, tokens: list[int], *, is_last: bool) -> dict[str, Any]:
        """The choice of a chunk with these tokens."""
        texts, body = [self.token_text(token) for token in tokens], arrival.json
        choice: dict[str, Any] = {"finish_reason": "length" if is_last else None}
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if arrival.path == CHAT:
            choice["delta"] = {"content": "".join(texts)}
            if body.get("logprobs"):
                choice["logprobs"] = {"content": [{"token": text, "logprob": -0.5} for text in texts]}
            return choice
        choice["text"] = "".join(texts)
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": texts, "token_logprobs": [-0.5] * len(tokens)}
        return choice


def frame(arrival: Arrival) -> dict[str, Any]:
    kind = "text_completion" if arrival.path == COMPLETIONS else "chat.completion.chunk"
    return {"id": f"mock-{arrival.number}", "object": kind, "created": 0, "model": arrival.json.get("model")}


def event_body(arrival: Arrival, choice: dict[str, Any]) -> bytes:
    whole = frame(arrival) | {"choices": [{"index": 0, "finish_reason": None} | choice]}
    if arrival.path == RESPONSES:
        whole = {"type": "response.output_text.delta", "delta": choice["text"]}
    return json.dumps(whole, ensure_ascii=False).encode()


def last_events(arrival: Arrival, answer: Answer) -> list[bytes]:
    """The usage, if it was asked for, and the end mark."""
    prompt, output = arrival.prompt_tokens, len(arrival.token_ids)
    if arrival.path == RESPONSES:
        details = {"input_tokens_details": {"cached_tokens": answer.cached_tokens}}
        usage: dict[str, Any] = {"input_tokens": prompt, "output_tokens": output, **details}
        end = {"type": "response.completed", "response": {"status": "completed", "usage": usage}}
        return [json.dumps(end).encode()]
    if not answer.sends_usage or not (arrival.json.get("stream_options") or {}).get("include_usage"):
        return [b"[DONE]"]
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    if answer.cached_tokens is not None:
        by_tier = {} if answer.cached_by_tier is None else {"cached_tokens_by_tier": answer.cached_by_tier}
        usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens, **by_tier}
    return [json.dumps(frame(arrival) | {"choices": [], "usage": usage}).encode(), b"[DONE]"]


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
