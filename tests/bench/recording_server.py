"""A server of OpenAI's completions API that records every request and streams fixed answers.

The answer depends on the body only: the same body gets the same text in every run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fake_server import Connection, FakeServer, Request


@dataclass
class Behaviour:
    """`status_of` gives the HTTP status of the n-th request (from 0); `answer` overrides the whole event stream.

    The n-th request is answered when as many requests have arrived as `answers_after` gives.
    """

    first_token_s: float = 0.0
    chunks: int = 3
    has_usage: bool = True
    status_of: Callable[[int], int] = lambda position: 200
    answer: Callable[[Request], list[bytes]] | None = None
    answers_after: Callable[[int], int] = lambda position: 0


class RecordingServer(FakeServer):
    def __init__(self, behaviour: Behaviour | None = None) -> None:
        super().__init__()
        self.behaviour = behaviour or Behaviour()
        self.requests: list[Request] = []

    async def answer(self, request: Request, connection: Connection) -> None:
        behaviour, position = self.behaviour, len(self.requests)
        self.requests.append(request)
        if (status := behaviour.status_of(position)) != 200:
            connection.reply(status, '{"error":{"message":"refused by the test"}}')
            return
        while len(self.requests) < behaviour.answers_after(position):
            await asyncio.sleep(0.01)
        await asyncio.sleep(behaviour.first_token_s)
        connection.start_stream()
        for event in (behaviour.answer or self.events)(request):
            connection.event(event)
            await asyncio.sleep(0)
        connection.end_stream()

    def events(self, request: Request) -> list[bytes]:
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


def user_of(request: Request) -> str | None:
    return request.headers.get("x-user-id")
