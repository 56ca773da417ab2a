"""Metrics server: the kvbm_* series on a separate port, where the dashboards of NVIDIA's block manager scrape them.

It runs in the leader's process. The port is bound before the leader exists, so that a used port fails the start-up; the
collector is registered later. A scrape only reads. Scrapes that wait share a page, and pages are made in a fifth of the
time: the process is the engine's.

With a token file, live control is a `POST /control`, whose body is a message as on the socket (control_desk.py). A
request without the token learns nothing, not even whether its message is one: its body is not read.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm.observe.bounded_server import BACKLOG, BoundedServer
from kvbm.observe.control_desk import MAX_BYTES
from kvbm.observe.shared_page import SharedPage

if TYPE_CHECKING:
    import asyncio

    from prometheus_client.registry import Collector

    from kvbm.observe.control_desk import ControlDesk

CONTROL = "/control"
LEAST_CHARACTERS = 32  # of a token
MAX_PORT = 65535
MAX_HEAD_BYTES = 1 << 16
HOST = "127.0.0.1"
TEXT, JSON = "text/plain; version=0.0.4; charset=utf-8", "application/json"

log = logging.getLogger(__name__)


class MetricsServer(BoundedServer):
    """Serves `GET /metrics` at `host` and `port`, and with a token `POST /control`; port 0 selects a free one.

    Raises EnvironmentProblem if it cannot listen there.
    """

    def __init__(self, host: str, port: int, control_token: str | None = None) -> None:
        from prometheus_client import CollectorRegistry, generate_latest

        if port > MAX_PORT:
            raise EnvironmentProblem(f"port {port} for metrics is above {MAX_PORT}", hint=_HINT)
        self._registry = CollectorRegistry()
        self._page = SharedPage(lambda: generate_latest(self._registry))
        self._authorization = None if control_token is None else f"Bearer {control_token}".encode()
        self._desk: ControlDesk | None = None
        try:
            listening = _listening(host, port)
        except OSError as error:  # includes a host name that does not resolve
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise EnvironmentProblem(
                f"cannot listen on {host} port {port} for metrics: {reason.lower()}", hint=_HINT
            ) from None
        self.port = int(listening.getsockname()[1])
        super().__init__(listening, "kvbm-metrics", most_bytes=MAX_HEAD_BYTES)
        log.info("kvbm: metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.port)

    def show(self, collector: Collector) -> None:
        self._registry.register(collector)

    def control(self, desk: ControlDesk) -> None:
        """Pass messages to `desk`, if they are served here."""
        self._desk = desk

    async def request(self, reader: asyncio.StreamReader, client: socket.socket) -> Awaitable[bytes]:
        """Read a request. Every path except that of control has the page."""
        line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        if self._authorization is None or target.split(" ")[0].split("?")[0] != CONTROL:
            return self._scraped(method)
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        sender = str(client.getpeername()[0])
        refused = _refusal(self._authorization, method, headers, sender)
        if refused is not None or self._desk is None:
            return _answer(refused or HTTPStatus.SERVICE_UNAVAILABLE)
        message = await reader.readexactly(int(headers.get("content-length") or 0))
        return self._controlled(self._desk, message, sender)

    async def _scraped(self, method: str) -> bytes:
        if method != "GET":
            return await _answer(HTTPStatus.METHOD_NOT_ALLOWED)
        return await _answer(HTTPStatus.OK, await self._page.get(), TEXT)

    async def _controlled(self, desk: ControlDesk, message: bytes, sender: str) -> bytes:
        return await _answer(HTTPStatus.OK, await self.in_thread(desk.reply, message, sender))


def _refusal(authorization: bytes, method: str, headers: Mapping[str, str], sender: str) -> HTTPStatus | None:
    """Return why a message is refused, by the headers of its request (names in lower case); None to read its body."""
    given = headers.get("authorization", "").encode("utf-8", "replace")
    if not hmac.compare_digest(given, authorization):
        log.warning("kvbm: control: %s was refused, it does not have the token", sender)
        return HTTPStatus.UNAUTHORIZED
    if method != "POST":
        return HTTPStatus.METHOD_NOT_ALLOWED
    length = headers.get("content-length") or "0"
    if not (length.isascii() and length.isdecimal()) or len(length) > 9 or int(length) > MAX_BYTES:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return None


def read_token(path: str | None) -> str | None:
    """Return the token in a file, None without one. Raises EnvironmentProblem."""
    if path is None:
        return None
    try:
        token = Path(path).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else "it is not ASCII"
        raise EnvironmentProblem(f"cannot read the token in `{path}` of `metrics.control_token_file`: {why}") from None
    if len(token) < LEAST_CHARACTERS:
        hint = f"write one with `openssl rand -hex 32 > {path}`"
        raise EnvironmentProblem(f"the token in `{path}` has fewer than {LEAST_CHARACTERS} characters", hint=hint)
    return token


async def _answer(status: HTTPStatus, body: bytes = b"", content_type: str = JSON) -> bytes:
    head = f"HTTP/1.0 {status} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket of the family of an address. Raises OSError."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


_HINT = (
    "set `metrics.port` (`DYN_KVBM_METRICS_PORT`) to a free port, "
    "or `metrics.serve: false` (`DYN_KVBM_METRICS=0`) to serve no metrics"
)
