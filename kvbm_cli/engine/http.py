"""Asks an engine over HTTP from the command's own process: no proxy of the environment is asked, nothing is raised."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status 0 when nobody answered, and `refusal` is then why; `address` is that of whoever did."""

    status: int = 0
    body: bytes = b""
    address: str = ""
    refusal: str = ""

    def fields(self) -> dict[str, Any]:
        """The JSON object of the body, empty where there is none."""
        try:
            content = json.loads(self.body)
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def complaint(self) -> str:
        """What the body of an error says, in one line: OpenAI's error object, vLLM's older one, or plain text."""
        fields = self.fields()
        error = fields.get("error", fields)
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else self.body[:LONGEST_COMPLAINT].decode(errors="replace")
        return " ".join(text.split())[:LONGEST_COMPLAINT]


LONGEST_COMPLAINT = 300


def get(url: str, *, timeout_s: float) -> HttpAnswer:
    return _ask("GET", url, None, {}, timeout_s)


def post(url: str, content: object, *, headers: Mapping[str, str], timeout_s: float | None = None) -> HttpAnswer:
    """Without `timeout_s` as long as the other side keeps the connection."""
    body = json.dumps(content).encode()
    return _ask("POST", url, body, {"Content-Type": "application/json", **headers}, timeout_s)


def _ask(method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float | None) -> HttpAnswer:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.connect()
        address = connection.sock.getpeername()[0]
        connection.request(method, parts.path, body, dict(headers))
        answer = connection.getresponse()
        return HttpAnswer(answer.status, answer.read(), address)
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        return HttpAnswer(refusal=str(error) or type(error).__name__)
    finally:
        connection.close()
