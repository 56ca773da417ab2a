"""ControlRoute: live control by `POST /control` on the metrics port, for who has the token. Off without a token file.

The body is a message as on the socket (control_desk.py). A request without the token learns nothing, not even whether
its message is one: its body is not read.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm.observe.control_desk import MAX_BYTES

if TYPE_CHECKING:
    from kvbm.observe.control_desk import ControlDesk

PATH = "/control"
LEAST_CHARACTERS = 32  # of a token

log = logging.getLogger(__name__)


class ControlRoute:
    """What decides who may control. `desk` is set when there is a cache to control."""

    def __init__(self, token: str) -> None:
        self.desk: ControlDesk | None = None
        self._authorization = f"Bearer {token}".encode()

    def refusal(self, method: str, headers: Mapping[str, str], sender: str) -> HTTPStatus | None:
        """Return why a request is refused, by its headers (names in lower case); None to read its body."""
        given = headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._authorization):
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
