"""Proxy in front of prefill and decode engines: one OpenAI-compatible server for clients.

`python -m kvbm_cli.disaggregated.proxy --host H --port N --prefill URL... --decode URL...`

- The proxy sends a request to a prefill engine with a limit of one token, and gets the address of its blocks.
- It sends the request with this address to a decode engine and streams the answer to the client.
- It uses the engines of a kind in turn and forwards an engine's error unchanged.
- If an engine is not reachable, it answers 502. If an engine's answer breaks off, it closes the client's connection, so
  that no client accepts half an answer.

There is one address of blocks for a request. With several prompts or answers, all of them would read the blocks of the
first prompt. A decode engine computes such requests alone.

Clients are not trusted: only the paths in `make_app` reach an engine, and only CLIENT_PARAMS of a client's
`kv_transfer_params`. The others name the host and the blocks that an engine reads. Every wait has a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

GENERATING = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 32 * 2**20
MAX_VALUES = 2_000_000  # the JSON parser does not let other requests run
LONG_BODY_BYTES = 64 * 2**10  # above, a separate thread parses it
BODY_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
ENGINE_TIMEOUT_S = 3600.0  # between two pieces of an answer; without streaming, it comes in one piece at the end
CLIENT_TIMEOUT_S = 300.0  # for a client to read one piece
QUICK_TIMEOUT_S = 30.0  # for a whole answer that needs no computation
CLIENT_PARAMS = ("max_load_tokens", "max_offload_tokens")
ENGINE_PARAMS = ("do_remote_prefill", "do_remote_decode", "tp_size", "pp_size", "dcp_size", "transfer_mode")
ENGINE_PREFIX = "remote_"
PARAMS = ("kv_transfer_params", "ec_transfer_params")
PER_HOP = frozenset(
    name.lower()
    for name in (
        *(hdrs.HOST, hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.UPGRADE, hdrs.TE, hdrs.TRAILER, hdrs.EXPECT),
        *(hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION, "Proxy-Connection"),
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

    @classmethod
    def of(cls, status: int, message: str) -> Refusal:
        return cls(status, "application/json", _error_body(message, status))


@dataclass(slots=True)
class Engines:
    """Base URLs of both kinds, each an endless cycle."""

    prefill: Iterator[str]
    decode: Iterator[str]
    session: aiohttp.ClientSession = field(repr=False)

    def post(
        self, url: str, headers: CIMultiDict[str], body: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        data = io.BytesIO(json.dumps(body).encode())
        return self.session.post(url, data=data, headers=headers, allow_redirects=False)


# No body is decompressed to any size, and a client must send the headers of a request within a time.
SERVER_OPTIONS: dict[str, Any] = {"auto_decompress": False, "keepalive_timeout": 75.0}
ENGINES = web.AppKey("ENGINES", Engines)


def make_app(prefill: list[str], decode: list[str]) -> web.Application:
    """Returns the proxy as an application. It keeps its connections to the engines while it runs."""

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
    body["kv_transfer_params"] = {**request.get("kv_transfer_params", {}), **_ASK_FOR_BLOCKS}
    return body


def decode_request(request: Mapping[str, Any], blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request with the address of its blocks, as the prefill engine returned it."""
    address = {name: value for name, value in blocks.items() if name in ENGINE_PARAMS or name.startswith(ENGINE_PREFIX)}
    return {**request, "kv_transfer_params": {**request.get("kv_transfer_params", {}), **address}}


def client_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a client may send to an engine. Raises Refusal if `kv_transfer_params` is not an object.

    vLLM merges `vllm_xargs` into the same arguments as `kv_transfer_params`.
    """
    request = {name: value for name, value in body.items() if name not in PARAMS}
    given, others = body.get(PARAMS[0]) or {}, body.get("vllm_xargs")
    if not isinstance(given, dict):
        raise Refusal.of(400, "`kv_transfer_params` is not an object")
    if allowed := {name: given[name] for name in CLIENT_PARAMS if name in given}:
        request[PARAMS[0]] = allowed
    if isinstance(others, dict):
        request["vllm_xargs"] = {name: value for name, value in others.items() if name not in PARAMS}
    return request


def is_one_answer(request: Mapping[str, Any]) -> bool:
    """Whether a request has one prompt and one answer, so that one address of blocks is sufficient."""
    prompt = request.get("prompt")
    several_prompts = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt)
    several_answers = any(request.get(name) not in (None, 1) for name in ("n", "best_of"))
    return not several_prompts and not several_answers and not request.get("use_beam_search")


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
    body = client_request(await _json_object(request))
    if is_one_answer(body):
        body = decode_request(body, await _prefill(engines, request.path, headers, prefill_request(body)))
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
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                await response.write(piece)
    except (aiohttp.ClientError, TimeoutError):  # the status is sent; only closing the connection signals the error
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


async def _json_object(request: web.Request) -> dict[str, Any]:
    """Returns the request's body. Raises Refusal if it is not a JSON object, compressed, too slow or too long."""
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
        raise Refusal.of(415, "the body is compressed: send it uncompressed")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            content = await request.read()
        if content.count(b",") > MAX_VALUES:
            raise Refusal.of(413, f"the body has more than {MAX_VALUES} commas")
        body = _parsed(content) if len(content) <= LONG_BODY_BYTES else await asyncio.to_thread(_parsed, content)
    except TimeoutError:
        raise Refusal.of(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise Refusal.of(413, f"the body is longer than {MAX_BODY_BYTES} bytes") from None
    except web.RequestPayloadError as error:
        raise Refusal.of(400, f"the body cannot be read: {error}") from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refusal.of(400, "the request is not a JSON object")
    return body


def _parsed(content: bytes) -> Any:
    """Raises ValueError, also for numbers that are not JSON (NaN) or not finite (1e999), and RecursionError."""
    return json.loads(content, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


@web.middleware
async def _answer_for_problems(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except Refusal as refusal:
        return refusal.response
    except web.HTTPException as error:
        text = f"{request.path} with {request.method} is not served: {error.reason}"
        return web.json_response(body=_error_body(text, error.status), status=error.status)
    except (aiohttp.ClientError, TimeoutError, EngineProblem) as problem:
        body = _error_body(f"an engine behind this proxy failed: {problem or type(problem).__name__}", 502)
        return web.Response(status=502, content_type="application/json", body=body)


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Returns the headers without those of one connection, some of which the header Connection names."""
    named = {name.strip().lower() for value in headers.getall(hdrs.CONNECTION, ()) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in PER_HOP | named)


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
    host, port = arguments.host, arguments.port
    web.run_app(app, host=host, port=port, handler_cancellation=True, print=None, **SERVER_OPTIONS)


if __name__ == "__main__":
    main()
