"""Connections of clients that are not trusted: aiohttp's server, with limits.

    runner = front(app)                                an application with the rules of this module
    await runner.setup()
    await BoundedSite(runner, host, port).start()

A client that leaves, or ends its side, cancels its request. Input that is not HTTP gets 400, and nothing is logged.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

KEEPALIVE_S = 75.0
MAX_CONNECTIONS = 8192  # and at most half of the descriptors that the process may have

log = logging.getLogger(__name__)


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


class BoundedSite(web.BaseSite):
    """Listens on all addresses of `host`. `descriptors` is how many one client takes, with those to engines behind."""

    __slots__ = ("_host", "_limit", "_port")

    def __init__(self, runner: web.AppRunner, host: str, port: int, *, descriptors: int = 1) -> None:
        super().__init__(runner)
        self._host, self._port, self._limit = host, port, most_connections(descriptors)

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Raise OSError if it cannot listen."""
        await super().start()
        try:
            self._server = await self._listen(socket.AF_UNSPEC)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            self._server = await self._listen(socket.AF_INET)  # `localhost` on a machine without IPv6

    async def _listen(self, family: socket.AddressFamily) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(self._accept, self._host, self._port, family=family, backlog=self._backlog)

    def _accept(self) -> asyncio.BaseProtocol:
        server = cast(web.Server, self._runner.server)
        if len(server.connections) < self._limit:
            return server()
        log.warning("kvbm: a client is refused: there are %d others, the limit of this process", self._limit)
        return _Refusal()


class _Refusal(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


def most_connections(descriptors: int) -> int:
    """Return how many clients may be connected if each takes that many descriptors."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, allowed // 2) // descriptors)
