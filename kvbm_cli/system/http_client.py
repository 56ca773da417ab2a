"""HTTP client for engines on this machine. It ignores proxy settings of the environment and never raises.

Standard library only: `kvbm status` starts faster without a client library.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LONGEST_ERROR = 300
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
        """Returns the JSON object of the body, empty if there is none."""
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return {}
        return content if isinstance(content, dict) else {}

    def error(self) -> str:
        """Returns the body of an error as one line: OpenAI's error object, vLLM's older one, or plain text."""
        fields = self.fields()
        error = fields.get("error", fields)
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else self.body[:LONGEST_ERROR].decode(errors="replace")
        return " ".join(text.split())[:LONGEST_ERROR]


def get(url: str, *, timeout_s: float) -> HttpAnswer:
    return request("GET", url, timeout_s=timeout_s)


def request(
    method: str,
    url: str,
    *,
    content: object = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None,
) -> HttpAnswer:
    """Sends one request, with `content` as JSON if it is given. `timeout_s` is for each wait on the network, None for
    as long as the server keeps the connection."""
    parts = urlsplit(url)
    body = None if content is None else json.dumps(content).encode()
    sent = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    try:
        connection.connect()
        address = connection.sock.getpeername()[0]
        connection.request(method, parts._replace(scheme="", netloc="").geturl(), body, sent)
        answer = connection.getresponse()
        return HttpAnswer(answer.status, answer.read(), address)
    except (OSError, *BAD_LENGTH, http.client.HTTPException) as error:
        return HttpAnswer(failure=str(error) or type(error).__name__)
    finally:
        connection.close()
