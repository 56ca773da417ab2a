"""Texts of errors as they are written to files. The API key of servers by URL is never written."""

from __future__ import annotations

import os

from kvbm.errors import UsageError
from kvbm.text.outside import shown

API_KEY_VARIABLE = "KVBM_BENCH_API_KEY"
LONGEST_READ = 20_000  # a key that a message has further on is not shown


def api_key() -> str | None:
    """Return the key of all servers by URL. UsageError if no HTTP header can have it."""
    key = os.environ.get(API_KEY_VARIABLE)
    if key and not all("!" <= character <= "~" for character in key):
        raise UsageError(f"`{API_KEY_VARIABLE}` must be ASCII without spaces and line ends")
    return key or None


def error_text(text: str) -> str:
    """Return the beginning of the text, without the key: servers may repeat the headers of a request in an error."""
    key, text = os.environ.get(API_KEY_VARIABLE), text[:LONGEST_READ]
    return shown(text.replace(key, "***") if key else text)
