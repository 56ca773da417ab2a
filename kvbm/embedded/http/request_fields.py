"""Request fields: reads a JSON object field by field, and builds the errors for invalid ones.

Every field is read once and by name; unknown fields are rejected at the end. A field that is `null` counts as absent.
An invalid field raises `RequestError` with the name, the value and what is allowed. No client input may raise any
other exception.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn

from kvbm.text.outside import fit_for_message, shown_json
from kvbm.text.outside import shown as shown_text
from kvbm.text.reading import bounded_int

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
SHOWN_CHARACTERS = 80


class RequestError(Exception):
    """An invalid request: becomes a response with `status` and OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        self.message = fit_for_message(message)
        super().__init__(self.message)
        self.param = param
        self.code = code
        self.status = status


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Rejects numbers that are not JSON (NaN, Infinity) or not finite (1e999)."""
    try:
        values = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite, parse_int=bounded_int)
    except RequestError:
        raise
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(f"the body is {shown(values)}: it must be a JSON object")
    return values


class Fields:
    """The fields of one JSON object, each taken once. `path` is the name of the object that contains them."""

    def __init__(self, values: dict[str, Any], *, path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._known: list[str] = []
        self._path = path

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Any:
        """Return the raw value, None if it is absent."""
        self._known.append(name)
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not (isinstance(value, str) and is_unicode(value)):
            raise wrong(self._path + name, value, "a string of Unicode characters")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self._path + name, value, "true or false")
        return value

    def integer(self, name: str, *, minimum: int = INT64_MIN, maximum: int = INT64_MAX) -> int | None:
        value = self.take(name)
        if value is None or (type(value) is int and minimum <= value <= maximum):
            return value
        raise wrong(self._path + name, value, f"an integer {_range_text(minimum, maximum)}")

    def number(self, name: str, default: float, *, is_right: Callable[[float], bool], right: str) -> float:
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or abs(value) > INT64_MAX or not is_right(value):
            raise wrong(self._path + name, value, right)
        return float(value)

    def only(self, name: str, *allowed: object) -> None:
        """Check an unsupported field: it must be absent or have one of the values that change nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(right) and value == right for right in allowed):
            rights = " or ".join(["absent", *(shown(right) for right in allowed)])
            raise wrong(self._path + name, value, f"{rights}; this engine supports nothing else")

    def ignore(self, *names: str) -> None:
        for name in names:
            self.take(name)

    def missing(self, name: str, right: str) -> NoReturn:
        raise RequestError(f"`{self._path}{name}` is missing: it must be {right}", param=self._path + name)

    def finish(self) -> None:
        """Reject all fields that were not taken."""
        for left in self._left:
            name = shown_text(left, SHOWN_CHARACTERS)
            near = get_close_matches(name, self._known, n=1)
            hint = f"; did you mean `{self._path}{near[0]}`?" if near else ""
            raise RequestError(f"`{self._path}{name}` is not a field of this endpoint{hint}", param=name)


def wrong(name: str, value: object, right: str) -> RequestError:
    return RequestError(f"`{name}` is {shown(value)}: it must be {right}", param=name)


def shown(value: object) -> str:
    """Return a value as JSON, shortened for a message."""
    return shown_json(value, SHOWN_CHARACTERS)


def is_unicode(text: str) -> bool:
    """Return False for text with half a surrogate pair, which JSON can encode but which is not a character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _range_text(minimum: int, maximum: int) -> str:
    if maximum == INT64_MAX:
        return "of 64 bits" if minimum == INT64_MIN else f"of at least {minimum}"
    return f"from {minimum} to {maximum}"


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body is not JSON: {name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the body contains the number {text[:SHOWN_CHARACTERS]}, which is too large")
    return value
