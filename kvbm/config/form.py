"""Parses the text of a DYN_KVBM_* variable, and explains an invalid one.

NVIDIA's block manager treats invalid text as not set. Here it is an error that names the variable, its value and the
valid form, with the correct spelling if it is obvious.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from kvbm.config.document import Mistake, Source
from kvbm.config.spelling import WrittenValue, written_in_env_file
from kvbm.text.outside import shortened

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_NUMBER = re.compile(r"(?:[0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?")
_WITH_UNIT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([kmgt]i?b?)", re.IGNORECASE)
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_BUCKET_URL = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,254})/*")
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
        written = written_in_env_file(stripped, may_have_comment=self is not Form.TEXT or source.written == stripped)
        if not stripped or (written is not None and not written.meant):
            raise Mistake(f"`{source.label}` is empty", source, hint=f"`unset {source.label}`, or set a value")
        parsed = _PARSERS[self](stripped) if written is None or self is not Form.TEXT else None
        if parsed is None:
            shown = source.written if self is Form.ENDPOINT else shortened(stripped)  # without credentials
            problem = f"must be {self.value}, not `{shown}`"
            if self is Form.TEXT and written is not None:
                problem = f"contains the {written.extra} of an env file"
            raise Mistake(f"`{source.label}` {problem}", source, hint=_hint(self, stripped, written, source))
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


def _hint(form: Form, text: str, written: WrittenValue | None, source: Source) -> str | None:
    """Return how to write the value. Of a value that is not shown, it names only what to remove."""
    is_secret = source.written != text
    if text.startswith("tcp://"):
        return OF_KUBERNETES
    if written is not None:
        value = written.meant if _PARSERS[form](written.meant) is not None else _meant(form, written.meant)
        what = f"remove the {written.extra}, which `docker run --env-file` keeps"
        return what if is_secret or value is None else f"{what}: `{source.label}={value}`"
    meant = _meant(form, text)
    return None if meant is None else f"use `{source.label}={meant}`"


def _meant(form: Form, text: str) -> str | None:
    """Return the value in the correct form if the text contains it in another form, else None."""
    if form is Form.BUCKET and (found := _BUCKET_URL.fullmatch(text)):
        return found[1]
    if form is Form.GIGABYTES:
        return _in_gigabytes(text)
    if form is Form.COUNT and re.fullmatch(r"[0-9]{1,18}\.0*", text):
        return text.partition(".")[0]
    if form is Form.COUNT and re.fullmatch(r"[0-9]{1,3}([,_ ][0-9]{3}){1,4}", text):
        return re.sub("[,_ ]", "", text)
    return None


def _in_gigabytes(text: str) -> str | None:
    found = _WITH_UNIT.fullmatch(text)
    if found is None:
        return None
    gigabytes = Decimal(found[1]) * _FACTORS[found[2].lower().removesuffix("b")] / 10**9
    return f"{gigabytes.normalize():f}"


_PARSERS: Mapping[Form, Callable[[str], object]] = {
    Form.TEXT: str,
    Form.GIGABYTES: _gigabytes,
    Form.COUNT: _count,
    Form.BOOLEAN: _boolean,
    Form.BUCKET: _bucket,
    Form.ENDPOINT: _endpoint,
}
