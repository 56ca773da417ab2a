"""Parses the text of a DYN_KVBM_* variable, and explains an invalid one.

NVIDIA's block manager treats invalid text as not set. Here it is an error that names the variable, its value and the
valid form.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from kvbm.config.document import Mistake, Source
from kvbm.config.spelling import unquoted
from kvbm.text.outside import shortened

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_NUMBER = re.compile(r"(?:[0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?")
_COMMENT = re.compile(r"\s#")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ENDPOINT = re.compile(r"https?://[^\s/@?#]+/?")
NO_CAPACITY = "0GB"
OF_KUBERNETES = "Kubernetes sets it for a service of that name; set `enableServiceLinks: false` in the pod"


class Form(enum.Enum):
    GIGABYTES = "a number of GB (1e9 bytes), fractions allowed"
    COUNT = "a whole number"
    BOOLEAN = "one of 1, true, yes, on, 0, false, no, off"
    TEXT = "text"
    BUCKET = "the name of a bucket"
    ENDPOINT = "a URL that begins with `http://` or `https://`, without credentials"

    def parse(self, text: str, source: Source) -> object:
        """Return the value for the profile key. ProfileError for text that is not of this form."""
        stripped = text.strip()
        if not stripped:
            raise Mistake(f"`{source.label}` is empty", source, hint=f"`unset {source.label}`, or set a value")
        if unquoted(stripped) is not None:
            remedy = "remove the quotes, which `docker run --env-file` keeps"
            raise Mistake(f"`{source.label}` is in quotes", source, hint=remedy)
        if self is Form.TEXT and source.written.strip() == stripped and _COMMENT.search(stripped):
            remedy = "remove the comment, which `docker run --env-file` keeps"
            raise Mistake(f"`{source.label}` contains the comment of an env file", source, hint=remedy)
        parsed = _PARSERS[self](stripped)
        if parsed is None:
            shown = shortened(source.written.strip())  # without credentials
            hint = OF_KUBERNETES if stripped.startswith("tcp://") else None
            raise Mistake(f"`{source.label}` must be {self.value}, not `{shown}`", source, hint=hint)
        return parsed


def _gigabytes(text: str) -> str | None:
    if not _NUMBER.fullmatch(text):
        return None
    number = Decimal(text)
    return f"{number:f}GB" if number else NO_CAPACITY


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _boolean(text: str) -> bool | None:
    lowered = text.lower()
    return True if lowered in _TRUE else False if lowered in _FALSE else None


def _bucket(text: str) -> str | None:
    return f"s3://{text}" if _BUCKET.fullmatch(text) else None


def _endpoint(text: str) -> str | None:
    return text if _ENDPOINT.fullmatch(text) else None


_PARSERS: Mapping[Form, Callable[[str], object]] = {
    Form.TEXT: str,
    Form.GIGABYTES: _gigabytes,
    Form.COUNT: _count,
    Form.BOOLEAN: _boolean,
    Form.BUCKET: _bucket,
    Form.ENDPOINT: _endpoint,
}
