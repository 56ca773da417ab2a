"""Connections of clients: how a server accepts them, and what it does with input that is not a proper request.

    runner = front(app)                                an application with the rules of this module
    await runner.setup()
    await BoundedSite(runner, host, port).start()

- **Descriptors**: a server keeps RESERVED of them for itself. Without room for a new client, it closes the connection
  that has been idle longest, or else the oldest whose request is not whole. asyncio would log a traceback for each
  place in the backlog, thousands in a second.
- **Half-closed**: a client may end its side after its request and still gets the answer. A client that has left looks
  the same until something is sent to it. So the server sends what clients ignore: interim responses (`100 Continue`),
  and comments in a stream of events. The kernel of a client that has left resets the connection, and the request is
  cancelled.
- **Not HTTP**: the client gets 400, and nothing is logged. An unknown `Expect` is ignored, as RFC 9110 permits.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from functools import partial
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy

BACKLOG = 1024
KEEPALIVE_S = 75.0
ACCEPTED_AT_ONCE = 64
READ_BYTES = 2**15  # at once; 256 KiB with chunks of one byte, asyncio's default, hold up the event loop for 0.2 s
RESERVED = 160  # descriptors for files, engines, the next start of a thread, and 128 clients of the metrics port
LEAST_CONNECTIONS = 8
PAUSE_S = 0.1  # if there is no room for a client and no connection is idle
FIRST_PROBE_S, LAST_PROBE_S = 0.05, 2.0
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

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


class Connection(RequestHandler):
    """One client. Answers a client that has closed its side, see the module's text.

    `is_between_events`: the answer is a stream of events, and what was sent ends with a whole one.
    """

    __slots__ = ("_has_ended", "_probe_s", "is_between_events")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._has_ended = False
        self._probe_s = 0.0
        self.is_between_events = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # asyncio's own transport reads this attribute

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, or for the rest of its headers."""
        return not self._messages and self._waiter is not None and not self._waiter.done()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open, for an answer to a whole request."""
        is_asked = self._request_count > 0 and not self.is_idle
        if self._has_ended or not is_asked or not self.has_whole_bodies:
            return False
        self._has_ended = True
        self._probe()
        return True

    @property
    def has_whole_bodies(self) -> bool:
        payloads = [payload for _, payload in self._messages]
        if self._current_request is not None:
            payloads.append(self._current_request.content)
        return all(payload.is_eof() for payload in payloads)

    def _probe(self) -> None:
        """Send something until the answer begins. Close the connection once everything is answered."""
        if self.transport is None:
            return
        if self.is_idle:
            self.force_close()
            return
        request = self._current_request
        if not self._messages and request is not None:
            self._close = True  # after this answer
            self.transport.write(self._ignored_by_clients(request))
        self._probe_s = min(LAST_PROBE_S, max(FIRST_PROBE_S, 2 * self._probe_s))
        self._loop.call_later(self._probe_s, self._probe)

    def _ignored_by_clients(self, request: web.BaseRequest) -> bytes:
        """Return what may be sent now without a change of the answer, empty if there is nothing."""
        writer: Any = request.writer
        if not writer.output_size:
            return INTERIM if request.version >= (1, 1) else b""
        if not self.is_between_events:
            return b""
        return b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if writer.chunked else COMMENT


def note_events(request: web.BaseRequest, *, is_between: bool) -> None:
    """Note whether comments may be sent now, because the answer is a stream of events."""
    if isinstance(request.protocol, Connection):
        request.protocol.is_between_events = is_between


class BoundedSite(web.BaseSite):
    """Listens on all addresses of `host`. `descriptors` is how many one client takes, with those to engines behind."""

    __slots__ = ("_descriptors", "_host", "_port")

    def __init__(self, runner: web.AppRunner, host: str, port: int, *, descriptors: int = 1) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._host, self._port, self._descriptors = host, port, descriptors

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Raise OSError if it cannot listen."""
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None, "the runner is set up"
        infos = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        acceptor, failure = _Acceptor(server, loop, self._descriptors), None
        for family, _, _, _, address in dict.fromkeys(infos):
            try:
                acceptor.listen(family, address)
            except OSError as error:  # `localhost` may have an address of IPv6 on a machine without it
                failure = error
                if error.errno not in NOT_HERE:
                    break
        if failure is not None and (failure.errno not in NOT_HERE or not acceptor.sockets):
            acceptor.close()
            raise failure
        await super().start()
        self._server = acceptor  # type: ignore[assignment]  # a runner uses `sockets` and `close`


class _Acceptor:
    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, descriptors: int) -> None:
        self.sockets: list[socket.socket] = []
        self._server, self._loop = server, loop
        self._limit = most_connections(descriptors)
        self._opening: set[asyncio.Task[None]] = set()
        self._make_request = server.request_factory
        server.request_factory = self._request

    def listen(self, family: int, address: tuple[Any, ...]) -> None:
        """All addresses get the port that the first one got."""
        if self.sockets and address[1] == 0:
            address = (address[0], self.sockets[0].getsockname()[1], *address[2:])
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.setblocking(False)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        self.sockets.append(listening)
        self._loop.add_reader(listening.fileno(), self._accept, listening)

    def close(self) -> None:
        for listening in self.sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        self.sockets = []

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if len(self._server._connections) + len(self._opening) >= self._limit and not self._close_idle():
                self._pause(listening)
                return
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("kvbm: cannot accept a client: %s", os.strerror(error.errno or 0).lower())
                self._close_idle()
                self._pause(listening)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._connect(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            factory = partial(Connection, self._server, loop=self._loop, **self._server._kwargs)
            await self._loop.connect_accepted_socket(factory, accepted)
        except OSError:
            accepted.close()

    def _request(self, message: Any, *arguments: Any) -> web.BaseRequest:
        """Make a request without an `Expect` that the server does not know."""
        protocol, expected = arguments[1], message.headers.get(hdrs.EXPECT)
        protocol.is_between_events = False
        if expected is not None and expected.lower() != "100-continue":
            headers = CIMultiDict(message.headers)
            headers.popall(hdrs.EXPECT)
            message = message._replace(headers=CIMultiDictProxy(headers))
        return self._make_request(message, *arguments)

    def _close_idle(self) -> bool:
        """Close the oldest connection without a request, or else with a part of one. Return whether there was one."""
        opened = [one for one in self._server.connections if isinstance(one, Connection) and one.transport is not None]
        idle = (one for one in opened if one.is_idle)
        connection = next(idle, None) or next((one for one in opened if not one.has_whole_bodies), None)
        if connection is not None:
            connection.force_close()
        return connection is not None

    def _pause(self, listening: socket.socket) -> None:
        self._loop.remove_reader(listening.fileno())
        self._loop.call_later(PAUSE_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)


def most_connections(descriptors: int) -> int:
    """Return how many clients may be connected if each takes that many descriptors."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        allowed = 1 << 20
    used = len(os.listdir("/proc/self/fd"))
    return max(LEAST_CONNECTIONS, (allowed - used - RESERVED) // descriptors)
