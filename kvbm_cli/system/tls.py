"""TLS of servers by URL: the certificates of the system, or those of a file."""

from __future__ import annotations

import ssl
from functools import cache
from urllib.parse import urlsplit

from kvbm.errors import UsageError, reason_of


def is_https(url: str) -> bool:
    return urlsplit(url).scheme == "https"


@cache
def tls_context(ca_file: str = "") -> ssl.SSLContext:
    """Return what verifies the certificate and the name of a server. `ca_file`: certificates in PEM format, which
    replace those of the system. UsageError for a file that has none."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except ssl.SSLError:
        raise UsageError(f"`{ca_file}` has no certificates in PEM format") from None
    except OSError as error:
        raise UsageError(f"cannot read the certificates in `{ca_file}`: {reason_of(error)}") from None
