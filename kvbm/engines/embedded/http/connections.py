"""Connections of clients that are not trusted: aiohttp's server, with the options and the log that they require.

    runner = front(app)                                an application with the rules of this module
    await runner.setup()
    await listen(runner, host, port)
    await body_of(request)                             in its handlers

A client that leaves, or ends its side, cancels its request. Input that is not HTTP gets 400, and nothing is logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvbm.engines.embedded.http.request_fields import RequestError
from kvbm.text.outside import shown

BACKLOG = 128
KEEPALIVE_S = 75.0
BODY_TIMEOUT_S = 60.0


def front(app: web.Application, *, keepalive_s: float = KEEPALIVE_S, shutdown_timeout_s: float = 2.0) -> web.AppRunner:
    """Return the application with the options of a server for clients that are not trusted.

    handler_cancellation: a client that leaves cancels its handler. auto_decompress off: no body is decompressed to any
    size. keepalive_timeout also limits the time in which a client must send the headers of a request.
    """
    own = logging.getLogger(f"{__name__}.requests")
    own.addFilter(_is_worth_a_traceback)
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=keepalive_s,
        shutdown_timeout=shutdown_timeout_s,
        logger=own,
    )


def _is_worth_a_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """Listen on an address; of a name, on its IPv4 address. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    await web.SockSite(runner, socket.create_server((host, port), family=family, backlog=BACKLOG)).start()


def not_served(request: web.Request, error: web.HTTPException) -> str:
    """Return the message for a request that no handler takes."""
    return f"{shown(request.path)} with {shown(request.method)} is not served: {shown(error.reason)}"


async def body_of(request: web.Request) -> bytes:
    """Return the body of a request, of at most `client_max_size` of its application. Raises RequestError."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        message = f"the body has Content-Encoding {shown(encoding)}: send it uncompressed"
        raise RequestError(message, param="Content-Encoding", status=415)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(f"the body is longer than {request.client_max_size} bytes", status=413) from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {shown(error)}") from None
