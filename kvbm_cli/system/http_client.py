"""HTTP client of the control plane: health, metrics, cache resets, first tokens. Never raises for what a server sends.

It asks the given address and nothing else: no proxy or `.netrc` of the environment, no redirect, no compressed body.
With `https`, the certificate is verified (`tls.py`).
httpx limits each wait for the server, not their sum, so `_Exchange` has a deadline for all of them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvbm.text.outside import shown, without_secrets
from kvbm.text.reading import parse_json
from kvbm_cli.system.tls import is_https, tls_context

if TYPE_CHECKING:
    import httpx

LONGEST_READ = 20_000  # of an error: it is shown in one line and shortened
MAX_BODY_BYTES = 64 << 20
MAX_METRICS_BYTES = 8 << 20  # a page of vLLM has 0.2 MB


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
            content = parse_json(self.body)
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def error(self) -> str:
        """Return the body of an error as one line: OpenAI's error object, vLLM's older one, or plain text."""
        fields = self.fields()
        error = fields.get("error", fields)
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else self.body[:LONGEST_READ].decode(errors="replace")
        return shown(" ".join(text[:LONGEST_READ].split()))


@cache
def load_library() -> None:
    """Import httpx, which `kvbm --help` does not need. The first request does it too, before its time begins."""
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # its command line, a third of the import
    _client(None, _no_tls()).close()  # imports what only a client needs


def _no_tls() -> ssl.SSLContext:
    """For plain HTTP: without a context, each client loads all certificates of the machine."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _client(timeout_s: float | None, context: ssl.SSLContext) -> httpx.Client:
    import httpx

    return httpx.Client(verify=context, trust_env=False, timeout=timeout_s)


def get(url: str, *, timeout_s: float) -> HttpAnswer:
    return request("GET", url, timeout_s=timeout_s)


def get_metrics(
    url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float, ca_file: str = ""
) -> HttpAnswer:
    """Return a page of metrics, or a failure for one that is too long to parse at every sample."""
    return request("GET", url, headers=headers, timeout_s=timeout_s, max_bytes=MAX_METRICS_BYTES, ca_file=ca_file)


def request(
    method: str,
    url: str,
    *,
    content: object = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None,
    max_bytes: int | None = None,
    ca_file: str = "",
    refusal: Callable[[str], str] = lambda address: "",
) -> HttpAnswer:
    """Send one request, with `content` as JSON if it is given. `timeout_s` limits all of it, from the connection to the
    last byte; None waits as long as the server keeps the connection. `max_bytes`: by default MAX_BODY_BYTES. `ca_file`:
    see `tls_context`. `refusal` returns why nothing may be sent to the program that has accepted the connection at an
    IP address, empty if it may."""
    load_library()
    import httpx

    own = {"Accept-Encoding": "identity", **({} if content is None else {"Content-Type": "application/json"})}
    exchange, found = _Exchange(timeout_s, refusal), HttpAnswer()
    try:
        parts = urlsplit(url)
        # `port` is an error above 65535, of which the system would use the lower 16 bits
        is_web = parts.scheme in ("http", "https")
        if not is_web or not parts.hostname or "@" in parts.netloc or parts.port == 0:
            return HttpAnswer(failure=f"`{without_secrets(shown(url))}` is not an http:// or https:// address")
        with (
            _client(timeout_s, tls_context(ca_file) if is_https(url) else _no_tls()) as client,
            exchange,
            client.stream(
                method,
                url,
                content=None if content is None else json.dumps(content).encode(),
                headers={**own, **(headers or {})},
                extensions={"trace": exchange.trace},
            ) as answer,
        ):
            body = _whole_body(answer.iter_raw(), max_bytes or MAX_BODY_BYTES)
        found = HttpAnswer(answer.status_code, body, exchange.address)
    except httpx.TimeoutException:
        exchange.is_over = True
    except httpx.LocalProtocolError:  # its text has the header, which may be a secret
        found = HttpAnswer(failure="a header or the address has a character that HTTP does not allow")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, OverflowError) as error:
        found = HttpAnswer(failure=shown(str(error)) or type(error).__name__)
    return HttpAnswer(failure=f"no complete answer within {timeout_s:g} s") if exchange.is_over else found  # it was cut


def _whole_body(pieces: Iterable[bytes], max_bytes: int) -> bytes:
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > max_bytes:
            raise ValueError(f"the answer is longer than {max_bytes} bytes")
    return bytes(body)


class _Exchange:
    """Ends its connection when its time is over, also if the server sends a byte now and then. `address`: the server's
    IP address."""

    def __init__(self, seconds: float | None, refusal: Callable[[str], str]) -> None:
        self.is_over = False
        self._refusal = refusal
        self.address = ""
        self._socket: Any = None
        self._timer = None if seconds is None else threading.Timer(seconds, self._end)

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *ignored: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close()

    def trace(self, event: str, found: Mapping[str, Any]) -> None:
        """Take a report of httpx about one step."""
        if event == "connection.connect_tcp.complete":
            self._socket = found["return_value"].get_extra_info("socket").dup()  # TLS takes the socket itself over
            self.address = self._socket.getpeername()[0]
            if why := self._refusal(self.address):
                found["return_value"].close()
                raise ConnectionRefusedError(why)
            if self.is_over:
                self._shut_down()

    def _end(self) -> None:
        self.is_over = True
        self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._socket.shutdown(socket.SHUT_RDWR)
