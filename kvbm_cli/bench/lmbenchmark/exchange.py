"""One request to an OpenAI-compatible server, sent once, with the times that LMBenchmark takes.

Times are wall-clock seconds. They come from the monotonic clock and one reading of the wall clock, so a correction of
the wall clock during a run does not change them. A request is never repeated, whatever its outcome.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbm_cli.bench.lmbenchmark.result_csv import MeasuredAnswer

if TYPE_CHECKING:
    import aiohttp

# The time limits of the `openai` client. There is no limit for a whole answer.
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0
KEEP_ALIVE_S = 2.0  # shorter than that of any server: a request on a connection that the server closes fails
ERROR_TEXT_CHARACTERS = 300


class WallClock:
    def __init__(self) -> None:
        self._offset_s = time.time() - time.perf_counter()

    def now(self) -> float:
        return self._offset_s + time.perf_counter()


@dataclass(slots=True)
class Exchange:
    """A request and what came back. `created_s` is LMBenchmark's launch time, before the body is encoded."""

    created_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    first_text_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    token_gaps_s: list[float] = field(default_factory=list)
    first_chunk_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_token_counts(self) -> bool:
        return bool(self.token_count("prompt_tokens") and self.token_count("completion_tokens"))

    def token_count(self, key: str) -> int | None:
        return (self.usage or {}).get(key)

    def take(self, event: dict[str, Any], arrived_s: float) -> None:
        """Take one event of the stream."""
        if "error" in event:
            self.error = f"error in the stream: {event['error']}"[:ERROR_TEXT_CHARACTERS]
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            if text or delta.get("reasoning_content") or delta.get("reasoning"):
                self._take_token(arrived_s)
            if text:
                self.first_text_s = self.first_text_s or arrived_s
                self.texts.append(text)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _take_token(self, arrived_s: float) -> None:
        """LMBenchmark does not request token ids, so an event counts as one token."""
        if self.last_token_s is None:
            self.first_token_s, self.first_chunk_tokens = arrived_s, 1
        else:
            self.token_gaps_s.append(arrived_s - self.last_token_s)
        self.last_token_s = arrived_s

    def measured(self) -> MeasuredAnswer:
        """The numbers of the CSV file; a missing token count is 0."""
        assert self.end_s is not None, "the exchange has not ended"
        first_s = self.first_text_s
        return MeasuredAnswer(
            prompt_tokens=self.token_count("prompt_tokens") or 0,
            generation_tokens=self.token_count("completion_tokens") or 0,
            ttft_s=0 if first_s is None else first_s - self.created_s,
            generation_s=0 if first_s is None else self.end_s - first_s,
            launched_s=self.created_s,
            finished_s=self.end_s,
        )


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The engine under test."""

    http: aiohttp.ClientSession
    url: str
    model: str
    clock: WallClock

    async def post(self, exchange: Exchange, path: str, body: bytes, *, user: int | None = None) -> None:
        """Send the body and fill `exchange`. A failure sets `exchange.error`."""
        import aiohttp

        headers = {} if user is None else {"x-user-id": str(user)}
        exchange.sent_s = self.clock.now()
        try:
            async with self.http.post(self.url + path, data=body, headers=headers) as response:
                exchange.http_status = response.status
                await self._read(exchange, response)
        except (aiohttp.ClientError, OSError) as error:
            exchange.error = f"{type(error).__name__}: {error}"[:ERROR_TEXT_CHARACTERS]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            exchange.error = f"unreadable answer: {type(error).__name__}: {error}"[:ERROR_TEXT_CHARACTERS]
        exchange.end_s = self.clock.now()

    async def _read(self, exchange: Exchange, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            text = (await response.text(errors="replace")).strip()
            exchange.error = f"HTTP {response.status}: {text}"[:ERROR_TEXT_CHARACTERS]
            return
        rest = b""
        async for data in response.content.iter_any():
            arrived_s = self.clock.now()
            *lines, rest = (rest + data).split(b"\n")  # a read may end anywhere
            for line in lines:
                if line.rstrip() == b"data: [DONE]":
                    return
                if line.startswith(b"data:"):
                    exchange.take(json.loads(line.removeprefix(b"data:")), arrived_s)
        exchange.error = exchange.error or "the answer ended without [DONE]"


@asynccontextmanager
async def connect(base_url: str, model: str, api_key: str | None) -> AsyncIterator[ApiServer]:
    """Open connections as LMBenchmark does: /v1 is appended if the address does not end with it."""
    import aiohttp

    url = base_url if base_url.endswith("/v1") else base_url.rstrip("/") + "/v1"
    headers = {
        "Accept": "application/json",
        "Content-Type": "application/json",
        "Authorization": f"Bearer {api_key or 'EMPTY'}",
    }
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout, trust_env=False) as http:
        yield ApiServer(http, url, model, WallClock())
