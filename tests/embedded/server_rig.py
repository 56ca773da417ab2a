"""An engine whose answers a test writes, behind the real server; as a program, the real process around it.

    python server_rig.py PORT SECONDS_TO_LOAD DRAIN_TIMEOUT [MAX_MODEL_LEN]

The program's engine answers with consecutive bytes, twenty per second to each request. A prompt that begins with the
token 13 kills it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvbm.engines.embedded.engine.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from kvbm.engines.embedded.engine.scheduler import EngineCounters
from kvbm.engines.embedded.http.completion import Served
from kvbm.engines.embedded.http.connections import front, listen
from kvbm.engines.embedded.http.endpoints import create_app
from kvbm.engines.embedded.http.metrics import EngineMetrics
from kvbm.engines.embedded.http.service import Service
from kvbm.engines.embedded.http.text_codec import TextCodec
from kvbm.errors import EngineError, KvbmError

END = 258  # the end token of the byte tokenizer
VOCABULARY_SIZE = 259
MAX_MODEL_LEN = 4096
DEADLY_TOKEN = 13
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ADMIN_TOKEN = "a secret of this test"
HELLO = [{"role": "user", "content": "Hello"}]
OnOutput = Callable[[RequestOutput], None]


@dataclass(frozen=True)
class Stats:
    num_requests_running: int = 1
    num_requests_waiting: int = 2
    kv_cache_usage: float = 0.5
    counters: EngineCounters = field(default_factory=lambda: EngineCounters(3, 4, 5, 6, 7))


@dataclass
class Submitted:
    prompt_token_ids: list[int]
    params: SamplingParams
    on_output: OnOutput
    sent: int = 0
    rest: list[int] = field(default_factory=list)


class WrittenEngine:
    """Answers every request with `answer`, one token at a time, and one per permit if it is paced.

    Callbacks run in a thread of its own, one last output per request, as in the real engine. `cached` and `external`
    are the prompt tokens that it claims to have found in G1 and G2.
    """

    model_name = "written"
    max_model_len = MAX_MODEL_LEN

    def __init__(
        self, answer: bytes | list[int] = b"Hello, world", *, is_paced: bool = False, delay_s: float = 0.0
    ) -> None:
        self.answer = list(answer)
        self.cached, self.external = 16, 32
        self.delay_s = delay_s
        self.failure: str | None = None
        self.fails_with: str | None = None
        self.can_reset = True
        self.submitted: dict[str, Submitted] = {}
        self.aborted: list[str] = []
        self.is_stopped = False
        self._is_paced = is_paced
        self._permits = threading.Semaphore(0)
        self._live: dict[str, Submitted] = {}
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._has_ended = False
        threading.Thread(target=self._main, daemon=True).start()

    @property
    def is_healthy(self) -> bool:
        return self.failure is None and not self.is_stopped

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, on_output: OnOutput) -> None:
        if not self.is_healthy:
            raise EngineError(f"the engine does not take requests: {self.failure}")
        request = Submitted(prompt_token_ids, params, on_output)
        answer = [*self.answer, *([] if params.ignore_eos else [END])]
        request.rest = [answer[index % len(answer)] for index in range(params.max_tokens)]
        if END in request.rest:
            del request.rest[request.rest.index(END) + 1 :]
        self.submitted[request_id] = request
        self._orders.put(lambda: self._live.update({request_id: request}))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._orders.put(lambda: self._finish(request_id, FinishReason.ABORT))

    def begin_reset(self) -> Future[bool]:
        future: Future[bool] = Future()
        future.set_result(self.can_reset)
        return future

    def stats(self) -> Stats:
        return Stats()

    def stop(self) -> None:
        self.is_stopped = True

    def permit(self, tokens: int) -> None:
        """Lets a paced engine send that many more tokens."""
        for _ in range(tokens):
            self._permits.release()

    def _main(self) -> None:
        while not self.is_stopped:
            try:
                self._orders.get(timeout=0.002)()
                continue
            except queue.Empty:
                pass
            if self._live:
                time.sleep(self.delay_s)
            for request_id, request in list(self._live.items()):
                if self.fails_with is not None:
                    self._finish(request_id, FinishReason.ERROR, error=self.fails_with)
                elif request.prompt_token_ids[0] == DEADLY_TOKEN:
                    self.failure = "it met token 13"
                    return
                elif not self._is_paced or self._permits.acquire(blocking=False):
                    self._send_next(request_id, request)

    def _send_next(self, request_id: str, request: Submitted) -> None:
        token_id = request.rest.pop(0)
        request.sent += 1
        if token_id == END or not request.rest:
            reason = FinishReason.STOP if token_id == END else FinishReason.LENGTH
            self._finish(request_id, reason, token_id=token_id)
        else:
            request.on_output(RequestOutput(request_id, [token_id], logprobs=self._logprobs(request, token_id)))

    def _finish(
        self, request_id: str, reason: FinishReason, *, token_id: int | None = None, error: str | None = None
    ) -> None:
        request = self._live.pop(request_id, None)
        if request is None:
            return
        output = RequestOutput(
            request_id,
            [] if token_id is None else [token_id],
            logprobs=None if token_id is None else self._logprobs(request, token_id),
            finish_reason=reason,
            error=error,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=request.sent,
            num_cached_tokens=self.cached,
            num_external_tokens=self.external,
            queue_time_s=0.25,
            prefill_time_s=0.5 if request.sent else None,
        )
        request.on_output(output)

    def _logprobs(self, request: Submitted, token_id: int) -> list[TokenLogprobs] | None:
        if request.params.logprobs is None:
            return None
        top = ((token_id, -0.5), (0xE2, float("-inf")))
        return [TokenLogprobs(token_id, -0.5, top[: request.params.logprobs])]


def serve_written(engine: WrittenEngine, codec: TextCodec) -> Served:
    metrics = EngineMetrics("written", stats=engine.stats, cache_config={"block_size": "16"})
    return Served(engine, VOCABULARY_SIZE, codec, metrics)


class Client:
    """A client of one server, as a test wants it."""

    def __init__(self, session: aiohttp.ClientSession, service: Service, port: int) -> None:
        self.session = session
        self.service = service
        self.port = port

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, dict[str, Any]]:
        return await self.send(path, io.BytesIO(json.dumps(body).encode()), headers=headers)

    async def send(
        self, path: str, body: bytes | io.BytesIO, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        async with self.session.post(path, data=body, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.session.get(path) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream that must end with [DONE]."""
        async with self.session.post(path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return events_of(await response.read())


def events_of(content: bytes) -> list[dict[str, Any]]:
    *events, done, nothing = content.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b""), content
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@asynccontextmanager
async def serving(served: Served | None) -> AsyncIterator[Client]:
    """A server in this process, and a client of it."""
    service = Service(served=served, admin_token=ADMIN_TOKEN)
    runner = front(create_app(service))
    await runner.setup()
    await listen(runner, "127.0.0.1", 0)
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield Client(session, service, port)
    finally:
        await runner.cleanup()
        if served is not None:
            served.engine.stop()


def serve(engine: WrittenEngine, use: Callable[[Client], Awaitable[None]], *, codec: TextCodec | None = None) -> None:
    """Runs `use` against a server of this process."""

    async def run() -> None:
        async with serving(serve_written(engine, codec or byte_codec())) as client:
            await use(client)

    asyncio.run(run())


def served(
    answer: bytes | list[int] = b"Hello, world", **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test that is a coroutine. It gets a `client` of a server, and its `engine` if it asks for it."""

    def of(test: Callable[..., Any]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters
        signature = inspect.Signature([one for name, one in parameters.items() if name not in ("client", "engine")])

        @functools.wraps(test)
        def run(*values: Any, **fixtures: Any) -> None:
            engine = WrittenEngine(answer, **options)
            given = dict(signature.bind(*values, **fixtures).arguments)
            given |= {"engine": engine} if "engine" in parameters else {}
            serve(engine, lambda client: test(client, **given))

        run.__signature__ = signature  # type: ignore[attr-defined]  # what pytest and Hypothesis pass
        return run

    return of


@functools.cache
def byte_codec() -> TextCodec:
    from kvbm.engines.embedded.engine.tokenizer import byte_tokenizer

    return TextCodec(byte_tokenizer())


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        yield connection


def main() -> int:
    from kvbm.engines.embedded.http.server import Server, ServerSettings

    port, seconds_to_load, drain_timeout_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    engine = WrittenEngine(bytes(range(32, 127)), delay_s=0.05)
    engine.max_model_len = int(sys.argv[4]) if sys.argv[4:] else MAX_MODEL_LEN

    def load(report: Callable[[str], None]) -> Served:
        report("reading a written engine")
        time.sleep(seconds_to_load)
        return serve_written(engine, byte_codec() if sys.argv[4:] else TextCodec(None))

    try:
        return Server(ServerSettings("127.0.0.1", port, drain_timeout_s), load).run()
    except KvbmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # as the program does: its thread may still be loading
