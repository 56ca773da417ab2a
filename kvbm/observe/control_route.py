"""ControlRoute: live control by `POST /control` on the metrics port, for who has the token. Off without a token file.

The body is a message as on the socket (control_desk.py). A request without the token learns nothing, not even whether
its message is one.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm.observe.control_desk import MAX_BYTES

if TYPE_CHECKING:
    from kvbm.observe.control_desk import ControlDesk

PATH = "/control"
LEAST_CHARACTERS = 32  # of a token
_TOO_LARGE = "413 Content Too Large"

log = logging.getLogger(__name__)

Application = Callable[[dict[str, Any], Callable[..., Any]], list[bytes]]


class ControlRoute:
    """A WSGI application for PATH; other paths go to `others`. `desk` is set when there is a cache to control."""

    def __init__(self, token: str, others: Application) -> None:
        self.desk: ControlDesk | None = None
        self._authorization = f"Bearer {token}".encode()
        self._others = others

    def __call__(self, request: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if request["PATH_INFO"] != PATH:
            return self._others(request, start_response)
        status, body = self._answer(request)
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _answer(self, request: dict[str, Any]) -> tuple[str, bytes]:
        sender = str(request.get("REMOTE_ADDR", ""))
        given = str(request.get("HTTP_AUTHORIZATION", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._authorization):
            log.warning("kvbm: control: %s was refused, it does not have the token", sender)
            return "401 Unauthorized", b""
        if request["REQUEST_METHOD"] != "POST":
            return "405 Method Not Allowed", b""
        length = str(request.get("CONTENT_LENGTH") or 0)
        if not (length.isascii() and length.isdecimal()) or len(length) > 9 or int(length) > MAX_BYTES:
            return _TOO_LARGE, b""
        if self.desk is None:
            return "503 Service Unavailable", b""
        return "200 OK", self.desk.reply(request["wsgi.input"].read(int(length)), sender)


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
