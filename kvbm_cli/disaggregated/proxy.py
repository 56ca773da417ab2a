"""Proxy in front of prefill and decode engines: one OpenAI-compatible server for clients.

`python -m kvbm_cli.disaggregated.proxy --host H --port N --prefill URL... --decode URL...`

- The proxy sends a request to a prefill engine with a limit of one token, and gets the address of its blocks.
- It sends the request with this address to a decode engine and streams the answer to the client.
- It uses the engines of a kind in turn and forwards an engine's error unchanged.
- If an engine is not reachable, it answers 502. If an engine's answer breaks off, it closes the client's connection, so
  that no client accepts half an answer.

There is one address of blocks for a request. With several prompts or answers, all of them would read the blocks of the
first prompt. A decode engine computes such requests alone.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

GENERATING = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 256 * 2**20
CONNECT_TIMEOUT_S = 10.0
PER_HOP = frozenset(
    name.lower()
    for name in (
        *(hdrs.HOST, hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.UPGRADE, hdrs.TE, hdrs.TRAILER, hdrs.EXPECT),
        *(hdrs.CONTENT_LENGTH, hdrs.TRANSFER_ENCODING, hdrs.CONTENT_ENCODING, hdrs.ACCEPT_ENCODING),
        *(hdrs.DATE, hdrs.SERVER),
    )
)
_ASK_FOR_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class EngineProblem(Exception):
    """An engine did not answer, or its answer is invalid. The client gets 502."""


class Refusal(Exception):
    """The final answer to a rejected request: an engine's error, or the proxy's for an invalid request."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(status)
        self.response = web.Response(status=status, content_type=content_type, body=body)


@dataclass(slots=True)
class Engines:
    """Base URLs of both kinds, each an endless cycle."""

    prefill: Iterator[str]
    decode: Iterator[str]
    session: aiohttp.ClientSession = field(repr=False)

    def post(
        self, url: str, headers: CIMultiDict[str], body: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.session.post(url, data=io.BytesIO(json.dumps(body).encode()), headers=headers)


ENGINES = web.AppKey("ENGINES", Engines)


def make_app(prefill: list[str], decode: list[str]) -> web.Application:
    """Returns the proxy as an application. It keeps its connections to the engines while it runs."""

    async def open_session(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            app[ENGINES] = Engines(itertools.cycle(prefill), itertools.cycle(decode), session)
            yield

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer_for_problems])
    app.cleanup_ctx.append(open_session)
    app.router.add_get("/health", _health)
    app.router.add_get("/v1/models", _models)
    for path in GENERATING:
        app.router.add_post(path, _generate)
    return app


def prefill_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request for one token, which is discarded, and for the address of its blocks."""
    left_out = ("stream", "stream_options", "min_tokens", "max_completion_tokens")
    body = {name: value for name, value in request.items() if name not in left_out}
    body["max_tokens"] = 1
    body["kv_transfer_params"] = {**(request.get("kv_transfer_params") or {}), **_ASK_FOR_BLOCKS}
    return body


def is_one_answer(request: Mapping[str, Any]) -> bool:
    """Whether a request has one prompt and one answer, so that one address of blocks is sufficient."""
    prompt = request.get("prompt")
    several_prompts = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt)
    several_answers = any(request.get(name) not in (None, 1) for name in ("n", "best_of"))
    return not several_prompts and not several_answers and not request.get("use_beam_search")


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "pid": os.getpid()})


async def _models(request: web.Request) -> web.StreamResponse:
    engines = request.app[ENGINES]
    async with engines.session.get(next(engines.decode) + request.path, headers=_end_to_end(request.headers)) as answer:
        return await _forward(request, answer)


async def _generate(request: web.Request) -> web.StreamResponse:
    engines, headers = request.app[ENGINES], _end_to_end(request.headers)
    headers[hdrs.CONTENT_TYPE] = "application/json"
    body = await _json_object(request)
    if is_one_answer(body):
        blocks = await _prefill(engines, request.path, headers, prefill_request(body))
        body["kv_transfer_params"] = {**(body.get("kv_transfer_params") or {}), **blocks}
    async with engines.post(next(engines.decode) + request.path, headers, body) as answer:
        return await _forward(request, answer)


async def _prefill(engines: Engines, path: str, headers: CIMultiDict[str], body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the address of the blocks. Raises Refusal for any status except 200."""
    base_url = next(engines.prefill)
    async with engines.post(base_url + path, headers, body) as answer:
        content = await answer.read()
        if answer.status != web.HTTPOk.status_code:
            raise Refusal(answer.status, answer.content_type, content)
        blocks = (await answer.json()).get("kv_transfer_params")
    if not isinstance(blocks, dict):
        raise EngineProblem(f"the prefill engine at {base_url} returned no `kv_transfer_params`")
    return blocks


async def _forward(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Streams the engine's answer to the client."""
    response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_any():
            await response.write(piece)
    except aiohttp.ClientError:  # the status is sent; only closing the connection signals the error
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Refusal(400, "application/json", _error_body("the request is not a JSON object", 400))
    if not isinstance(body.get("kv_transfer_params") or {}, dict):
        raise Refusal(400, "application/json", _error_body("`kv_transfer_params` is not an object", 400))
    return body


@web.middleware
async def _answer_for_problems(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except Refusal as refusal:
        return refusal.response
    except (aiohttp.ClientError, EngineProblem) as problem:
        body = _error_body(f"an engine behind this proxy failed: {problem or type(problem).__name__}", 502)
        return web.Response(status=502, content_type="application/json", body=body)


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in PER_HOP)


def _error_body(message: str, code: int) -> bytes:
    kind = "invalid_request_error" if code < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvbm_cli.disaggregated.proxy", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="base URLs of prefill engines")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="base URLs of decode engines")
    arguments = parser.parse_args()
    app = make_app(arguments.prefill, arguments.decode)
    web.run_app(app, host=arguments.host, port=arguments.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
