"""Proxy in front of prefill and decode engines: one OpenAI-compatible server for clients.

`python -m kvbm_cli.disaggregated.proxy --host H --port N --prefill URL... --decode URL...`

- The proxy sends a request to a prefill engine with a limit of one token, and gets the address of its blocks.
- It sends the request with this address to a decode engine and streams the answer to the client.
- It uses the engines of a kind in turn and forwards an engine's error unchanged.
- If an engine is not reachable, it answers 502. If an engine's answer breaks off, it closes the client's connection, so
  that no client accepts half an answer.
- If no decode engine admits a prefilled request, the prefill engine frees its blocks at once (`handover.py`).

There is one address of blocks for a request. With several prompts or answers, all of them would read the blocks of the
first prompt. A decode engine computes such requests alone.

Clients are not trusted: only the paths in `make_app` reach an engine, with what `client_request.py` lets pass. Every
wait has a limit. The number of clients has none but that of descriptors (ADR 32).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

from kvbm.engines.embedded.http.connections import body_of, front, listen, not_served
from kvbm.engines.embedded.http.openai_responses import error_body
from kvbm.engines.embedded.http.request_fields import RequestError
from kvbm.text.log_limit import LogLimit
from kvbm.text.outside import shown
from kvbm_cli.disaggregated.client_request import engine_requests
from kvbm_cli.disaggregated.handover import Handover

GENERATING = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 32 * 2**20
MAX_ANSWER_BYTES = 16 * 2**20  # of a prefill engine, which generates one token
SHUTDOWN_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
ENGINE_TIMEOUT_S = 3600.0  # between two pieces of an answer; without streaming, it comes in one piece at the end
CLIENT_TIMEOUT_S = 300.0  # for a client to read one piece
QUICK_TIMEOUT_S = 30.0  # for a whole answer that needs no computation
PER_HOP = frozenset(
    name.lower()
    for name in (
        *(hdrs.HOST, hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.UPGRADE, hdrs.TE, hdrs.TRAILER, hdrs.EXPECT),
        *(hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION, "Proxy-Connection"),
        *(hdrs.CONTENT_LENGTH, hdrs.TRANSFER_ENCODING, hdrs.CONTENT_ENCODING, hdrs.ACCEPT_ENCODING),
        *(hdrs.DATE, hdrs.SERVER),
    )
)


class EngineProblem(Exception):
    """An engine did not answer, or its answer is invalid. The client gets 502."""


class Refusal(Exception):
    """The error of a prefill engine, which is the answer to the client."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(status)
        self.response = web.Response(status=status, content_type=content_type, body=body)


@dataclass(slots=True)
class Engines:
    """Base URLs of both kinds, each an endless cycle."""

    prefill: Iterator[str]
    decode: Iterator[str]
    session: aiohttp.ClientSession = field(repr=False)
    ending: set[asyncio.Task[None]] = field(default_factory=set)  # handovers, also after their clients have left

    async def post(self, url: str, headers: CIMultiDict[str], body: bytes) -> aiohttp.ClientResponse:
        return await self.session.post(url, data=io.BytesIO(body), headers=headers, allow_redirects=False)

    def end(self, handover: Handover) -> None:
        """End a handover in the background."""
        task = asyncio.create_task(handover.end())
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)

    async def close(self) -> None:
        for task in self.ending:
            task.cancel()
        await asyncio.gather(*self.ending, return_exceptions=True)


ENGINES = web.AppKey("ENGINES", Engines)


def make_app(prefill: list[str], decode: list[str]) -> web.Application:
    """Return the proxy as an application. It keeps its connections to the engines while it runs."""

    async def open_session(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=ENGINE_TIMEOUT_S)
        session = aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={hdrs.ACCEPT_ENCODING: "identity"},
        )
        async with session:
            app[ENGINES] = Engines(itertools.cycle(prefill), itertools.cycle(decode), session)
            yield
            await app[ENGINES].close()

    app = web.Application(middlewares=[_answer_for_problems], client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(open_session)
    app.router.add_get("/health", _health)
    app.router.add_get("/v1/models", _models)
    for path in GENERATING:
        app.router.add_post(path, _generate)
    return app


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "pid": os.getpid()})


async def _models(request: web.Request) -> web.StreamResponse:
    engines, timeout = request.app[ENGINES], aiohttp.ClientTimeout(total=QUICK_TIMEOUT_S)
    url, headers = f"{next(engines.decode)}/v1/models", _end_to_end(request.headers)
    async with engines.session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
        return await _forward(request, answer)


async def _generate(request: web.Request) -> web.StreamResponse:
    engines, headers = request.app[ENGINES], _end_to_end(request.headers)
    headers[hdrs.CONTENT_TYPE] = "application/json"
    bodies = engine_requests(await body_of(request))
    if bodies.prefill is None:
        url = next(engines.decode) + request.path
        async with await engines.post(url, headers, bodies.decode({})) as answer:
            return await _forward(request, answer)
    handover = Handover(engines.post, next(engines.prefill), headers, bodies.ticket)
    try:
        blocks = await _prefill(engines, handover.prefill_url, request.path, headers, bodies.prefill)
        answer = await handover.decode(next(engines.decode) + request.path, bodies.decode(blocks))
        return await _forward(request, answer)
    except Refusal:
        handover.is_pinned = False
        raise
    finally:
        engines.end(handover)


async def _prefill(
    engines: Engines, base_url: str, path: str, headers: CIMultiDict[str], body: bytes
) -> dict[str, Any]:
    """Return the address of the blocks. Raises Refusal for any status except 200."""
    async with await engines.post(base_url + path, headers, body) as answer:
        content = b""
        async for piece in answer.content.iter_any():
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise EngineProblem(f"the prefill engine at {base_url} sent more than {MAX_ANSWER_BYTES} bytes")
        if answer.status != web.HTTPOk.status_code:
            raise Refusal(answer.status, answer.content_type, content)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    blocks = fields.get("kv_transfer_params") if isinstance(fields, dict) else None
    if not isinstance(blocks, dict):
        raise EngineProblem(f"the prefill engine at {base_url} returned no `kv_transfer_params`")
    return blocks


async def _forward(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Streams the engine's answer to the client."""
    response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_any():
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                await response.write(piece)
    except (aiohttp.ClientError, TimeoutError):  # the status is sent; only closing the connection signals the error
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


@web.middleware
async def _answer_for_problems(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except Refusal as refusal:
        return refusal.response
    except RequestError as wrong:
        return _error(wrong.message, wrong.status)
    except web.HTTPException as error:
        return _error(not_served(request, error), error.status)
    except (aiohttp.ClientError, TimeoutError, OSError, EngineProblem) as problem:
        return _error(f"an engine behind this proxy failed: {shown(problem) or type(problem).__name__}", 502)


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers without those of one connection, some of which the header Connection names."""
    named = {name.strip().lower() for value in headers.getall(hdrs.CONNECTION, ()) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in PER_HOP | named)


def _error(message: str, status: int) -> web.Response:
    return web.json_response(error_body(message, status=status, code=status), status=status)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvbm_cli.disaggregated.proxy", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="base URLs of prefill engines")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="base URLs of decode engines")
    arguments = parser.parse_args()
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LogLimit())
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[handler])
    asyncio.run(serve(make_app(arguments.prefill, arguments.decode), arguments.host, arguments.port))


async def serve(app: web.Application, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    runner, stopped = front(app, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await runner.setup()
    try:
        await listen(runner, host, port)
        await stopped.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
