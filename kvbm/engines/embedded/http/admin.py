"""Rule for endpoints that change the engine or reveal its requests: who may call them.

A caller needs the token of the server, and must be a program on the same machine:

- The server reads its token from the environment. Without one, these endpoints are off. `kvbm serve` creates a token
  for each run, and `kvbm bench` one for each engine.
- The peer address is a loopback address: the token does not cross a network in clear text.
- The header Host names a loopback address: a page that rebinds its own name to this address is refused.
- A browser adds the header Origin to every POST, and Sec-Fetch-Site to every request. Both are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from kvbm.engines.embedded.http.request_fields import RequestError
from kvbm.engines.launch_plan import ADMIN_HEADER, ADMIN_VARIABLE
from kvbm.text.outside import shown

BROWSER_HEADERS = ("Origin", "Sec-Fetch-Site")


def require_admin(request: web.Request, token: str | None) -> None:
    """Raise RequestError 403 unless the caller may change the engine."""
    for is_refused, reason in (
        (token is None, f"it is off; set the variable {ADMIN_VARIABLE} of the server to a secret"),
        (not _is_loopback(request.remote), "it answers only programs on the same machine"),
        (not _is_loopback(_host_name(request)), "the header Host must name a loopback address, such as 127.0.0.1"),
        (any(name in request.headers for name in BROWSER_HEADERS), "it does not answer a web page"),
        (
            not _is_token(request.headers.get(ADMIN_HEADER), token),
            f"the header {ADMIN_HEADER} must have the admin token of this server",
        ),
    ):
        if is_refused:
            raise RequestError(f"{shown(request.path)} is refused: {reason}", status=403, code="not_allowed")


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _host_name(request: web.Request) -> str | None:
    try:
        return urlsplit(f"//{request.host}").hostname
    except ValueError:
        return None


def _is_token(given: str | None, token: str | None) -> bool:
    """Compare in constant time. A header may hold bytes that are not UTF-8."""
    if given is None or token is None:
        return False
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode(errors="surrogateescape"))
