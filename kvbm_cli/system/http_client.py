"""HTTP client for engines on this machine. It ignores proxy settings of the environment and never raises.

Standard library only: `kvbm status` starts faster without a client library.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvbm.text.outside import shown, without_secrets

LONGEST_READ = 20_000  # of an error: it is shown in one line and shortened
MAX_BODY_BYTES = 64 << 20
MAX_METRICS_BYTES = 8 << 20  # a page of vLLM has 0.2 MB
PIECE_BYTES = 64 << 10
BAD_LENGTH = (ValueError, OverflowError, MemoryError)  # what http.client raises for a body or chunk of absurd length


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status, body and IP address of a server. Without an answer, `status` is 0 and `failure` is the reason."""

    status: int = 0
    body: bytes = b""
    address: str = ""
    failure: str = ""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def text(self) -> str:
        return self.body.decode(errors="replace")

    def fields(self) -> dict[str, Any]:
        """Return the JSON object of the body, empty if there is none."""
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return {}
        return content if isinstance(content, dict) else {}

    def error(self) -> str:
        """Return the body of an error as one line: OpenAI's error object, vLLM's older one, or plain text."""
        fields = self.fields()
        error = fields.get("error", fields)
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else self.body[:LONGEST_READ].decode(errors="replace")
        return shown(" ".join(text[:LONGEST_READ].split()))


def get(url: str, *, timeout_s: float) -> HttpAnswer:
    return request("GET", url, timeout_s=timeout_s)


def get_metrics(url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float) -> HttpAnswer:
    """Return a page of metrics, or a failure for one that is too long to parse at every sample."""
    return request("GET", url, headers=headers, timeout_s=timeout_s, max_bytes=MAX_METRICS_BYTES)


def request(
    method: str,
    url: str,
    *,
    content: object = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None,
    max_bytes: int | None = None,
) -> HttpAnswer:
    """Send one request, with `content` as JSON if it is given. `timeout_s` limits all of it, from the connection to the
    last byte; None waits as long as the server keeps the connection. `max_bytes`: by default MAX_BODY_BYTES."""
    connection = None
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            return HttpAnswer(failure=f"`{without_secrets(shown(url))}` is not an http:// address")
        connection = _TimedConnection(parts.netloc, timeout_s)
        body = None if content is None else json.dumps(content).encode()
        sent = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
        connection.request(method, parts._replace(scheme="", netloc="").geturl(), body, sent)
        answer = connection.getresponse()
        return HttpAnswer(answer.status, _whole_body(answer, max_bytes or MAX_BODY_BYTES), connection.address)
    except TimeoutError:
        return HttpAnswer(failure=f"no complete answer within {timeout_s:g} s")
    except (OSError, *BAD_LENGTH, http.client.HTTPException) as error:
        return HttpAnswer(failure=shown(str(error)) or type(error).__name__)
    finally:
        if connection is not None:
            connection.end()


def _whole_body(answer: http.client.HTTPResponse, max_bytes: int) -> bytes:
    body = bytearray()
    while piece := answer.read(PIECE_BYTES):
        body += piece
        if len(body) > max_bytes:
            raise ValueError(f"the answer is longer than {max_bytes} bytes")
    if answer.length:
        raise http.client.IncompleteRead(bytes(body), answer.length)
    return bytes(body)


class _TimedConnection(http.client.HTTPConnection):
    """Raises TimeoutError at its deadline, also if the server sends a byte now and then."""

    def __init__(self, netloc: str, timeout_s: float | None) -> None:
        super().__init__(netloc, timeout=timeout_s)
        self.address = ""
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        super().connect()
        self._socket = self.sock
        self.address = self.sock.getpeername()[0]
        self.sock = _TimedSocket(self._socket, self._deadline)

    def end(self) -> None:
        self.close()
        if self._socket is not None:
            self._socket.close()


class _TimedSocket(io.RawIOBase):
    """The part of a socket that http.client uses. Borrows the socket."""

    def __init__(self, connected: socket.socket, deadline: float | None) -> None:
        self._socket = connected
        self._deadline = deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedSocket(self._socket, self._deadline))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._set_timeout()
        return self._socket.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        self._set_timeout()
        self._socket.sendall(data)

    def _set_timeout(self) -> None:
        left_s = None if self._deadline is None else self._deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
