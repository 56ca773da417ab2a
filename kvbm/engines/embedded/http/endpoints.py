"""HTTP endpoints: each one reads a request, calls the engine, and writes a response. They run on the event loop.

An invalid request raises `RequestError`, which the middleware turns into a 4xx with OpenAI's error object. An engine
failure becomes a 5xx, or an error event if the stream has started.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvbm.engines.embedded.http.completion import Completion, CompletionFailed, Served
from kvbm.engines.embedded.http.connections import body_of, not_served
from kvbm.engines.embedded.http.openai_requests import (
    AnswerBody,
    ChatBody,
    CompletionBody,
    TokenizeBody,
)
from kvbm.engines.embedded.http.openai_responses import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Json,
    dumps,
    error_body,
    model_body,
)
from kvbm.engines.embedded.http.prompt import check_model, encode, prepare
from kvbm.engines.embedded.http.request_fields import RequestError, read_body, wrong
from kvbm.engines.embedded.http.response_writer import stream_response, whole_body
from kvbm.engines.embedded.http.service import Service
from kvbm.engines.launch_plan import ADMIN_HEADER, ADMIN_VARIABLE
from kvbm.errors import EngineError
from kvbm.observe.decision_trace import kvbm_version
from kvbm.text.outside import shown

MAX_BODY_BYTES = 8 * 2**20  # which the JSON parser reads in 0.1 s (2 cores)
MAX_REQUEST_ID_CHARACTERS = 200  # it is in each part of a stream
REQUEST_ID = "X-Request-Id"
CONTENT_TYPE_METRICS = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(service: Service) -> web.Application:
    endpoints = _Endpoints(service)
    app = web.Application(middlewares=[_errors_as_json], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.post("/v1/completions", endpoints.completions),
            web.post("/v1/chat/completions", endpoints.chat_completions),
            web.get("/v1/models", endpoints.models),
            web.get("/v1/models/{name:.+}", endpoints.model),
            web.post("/tokenize", endpoints.tokenize),
            web.post("/reset_prefix_cache", endpoints.reset_prefix_cache),
            web.get("/health", endpoints.health),
            web.get("/metrics", endpoints.metrics),
            web.get("/version", endpoints.version),
        ]
    )
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        body = error_body(error.message, status=error.status, param=error.param, code=error.code)
        return _json(body, status=error.status)
    except CompletionFailed as error:
        return _json(error_body(str(error), status=500, code="engine_failed"), status=500)
    except EngineError as error:  # it is not running
        return _json(error_body(error.message, status=503, code="engine_failed"), status=503)
    except web.HTTPException as error:
        return _json(error_body(not_served(request, error), status=error.status), status=error.status)


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._number = itertools.count()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, CompletionBody, CompletionFormat, "cmpl")

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, ChatBody, ChatFormat, "chatcmpl")

    async def _complete(
        self,
        request: web.Request,
        form: type[CompletionBody] | type[ChatBody],
        answer_format: type[AnswerFormat],
        prefix: str,
    ) -> web.StreamResponse:
        served = self._service.ready()
        client_id = _request_id(request)
        body: AnswerBody = read_body(form, await body_of(request))
        token_ids, params = await prepare(served, body)
        answer_id = f"{prefix}-{client_id}"
        completion = Completion(served, f"{answer_id}-{next(self._number)}", body, token_ids, params)
        answer = answer_format(
            answer_id=answer_id,
            model=served.engine.model_name,
            created_unix_s=int(time.time()),
            wants_logprobs=body.sampling.logprobs is not None,
            prompt_token_ids=token_ids if body.return_token_ids else None,
            token_text=served.codec.token_text,
            token_bytes=served.codec.token_bytes,
        )
        self._service.ready()  # the server may have started to stop while the body arrived
        self._service.running.add(completion)
        try:
            completion.submit()
            part = await completion.next_part()  # a failure until here has its own status
            headers = {REQUEST_ID: client_id}
            if body.stream:
                return await stream_response(request, completion, part, answer, body, headers)
            return _json(await whole_body(completion, part, answer), headers=headers)
        finally:
            self._service.running.discard(completion)
            completion.close()

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model(self._service.ready())]})

    async def model(self, request: web.Request) -> web.Response:
        served = self._service.ready()
        check_model(served.engine, request.match_info["name"])
        return _json(self._model(served))

    def _model(self, served: Served) -> Json:
        name, length = served.engine.model_name, served.engine.max_model_len
        return model_body(name, created_unix_s=self._service.started_unix_s, max_model_len=length)

    async def tokenize(self, request: web.Request) -> web.Response:
        served = self._service.ready()
        body, most = read_body(TokenizeBody, await body_of(request)), served.engine.max_model_len
        check_model(served.engine, body.model)
        prompt, special = (body, False) if body.prompt is None else (body.prompt, body.add_special_tokens)
        token_ids = await encode(served.codec, prompt, adds_special_tokens=special, max_tokens=most)
        return _json({"count": len(token_ids), "max_model_len": most, "tokens": token_ids})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Clear the prefix cache in G1 and in the connector."""
        _require_token(request, self._service.admin_token)
        served = self._service.ready()
        if (external := request.query.get("reset_external")) not in (None, "true", "false"):
            raise wrong("reset_external", external, "true or false")
        if not await asyncio.wrap_future(served.engine.begin_reset()):
            raise RequestError("the connector could not clear its cache: try again", status=409, code="in_use")
        return _json({"reset": True})

    async def health(self, request: web.Request) -> web.Response:
        status, body = self._service.status()
        return _json(body, status=status)

    async def metrics(self, request: web.Request) -> web.Response:
        page = await self._service.ready().metrics.page()
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_METRICS})

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": kvbm_version()})


def _require_token(request: web.Request, token: str | None) -> None:
    """Raise RequestError 403 unless the request has the admin token of the server. No web page can send its header."""
    if token is None:
        reason = f"it is off; set the variable {ADMIN_VARIABLE} of the server to a secret"
    else:
        given = request.headers.get(ADMIN_HEADER, "").encode(errors="surrogateescape")
        if hmac.compare_digest(given, token.encode(errors="surrogateescape")):
            return
        reason = f"the header {ADMIN_HEADER} must have the admin token of this server"
    raise RequestError(f"{shown(request.path)} is refused: {reason}", status=403, code="not_allowed")


def _request_id(request: web.Request) -> str:
    """Return the request id from the client's header, or a generated one."""
    client_id = request.headers.get(REQUEST_ID)
    if client_id is None:
        return os.urandom(12).hex()
    if not (client_id and client_id.isascii() and client_id.isprintable()):
        raise RequestError(f"the header {REQUEST_ID} must be printable ASCII", param=REQUEST_ID)
    if len(client_id) > MAX_REQUEST_ID_CHARACTERS:
        raise RequestError(
            f"the header {REQUEST_ID} has {len(client_id)} characters: at most {MAX_REQUEST_ID_CHARACTERS} are allowed",
            param=REQUEST_ID,
        )
    return client_id


def _json(body: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=dumps(body), status=status, headers=headers, content_type="application/json")
