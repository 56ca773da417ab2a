"""Request fields: validates the JSON object of a client, and describes what is wrong with it.

    read_body(model, body) ── ValidationError of pydantic ──▶ RequestError: the field, its value, what would be right

An unknown field is refused. A field that is `null` counts as absent. No client input may raise any other exception.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvbm.text.outside import fit_for_message, shown_json
from kvbm.text.outside import shown as shown_text

SHOWN_CHARACTERS = 80

Off = Mapping[str, tuple[object, ...]]


class RequestError(Exception):
    """An invalid request: becomes a response with `status` and OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        self.message = fit_for_message(message)
        super().__init__(self.message)
        self.param = param
        self.code = code
        self.status = status


class Body(BaseModel):
    """A JSON object of a client. Every value has exactly its type: 5.0 and true are no integers.

    `OFF` has fields that are not supported, and the values of each that change nothing. `IGNORED` fields may have any.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    OFF: ClassVar[Off] = {}
    IGNORED: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _has_no_other_field(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in self.OFF:
                if not any(type(value) is type(one) and value == one for one in self.OFF[name]):
                    right = " or ".join(["absent", *map(shown, self.OFF[name])])
                    raise PydanticCustomError("off", "not supported", {"name": name, "value": value, "right": right})
            elif name not in self.IGNORED:
                known = (*type(self).model_fields, *self.OFF)
                near = get_close_matches(name[:SHOWN_CHARACTERS], known, n=1)
                raise PydanticCustomError("unknown", "unknown field", {"name": name, "near": near})
        return self


AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(model: type[AnyBody], body: bytes) -> AnyBody:
    """Parse a body. Raises RequestError with the first thing that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0]) from None


def _request_error(error: ErrorDetails) -> RequestError:
    path, details, value = error["loc"], error.get("ctx", {}), shown(error["input"])
    message = error["msg"].replace("Input should be", "it must be")
    if error["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {details['error']}")
    if error["type"] == "unknown":
        name = _name((*path, details["name"]))
        hint = f"; did you mean `{_name((*path, *details['near']))}`?" if details["near"] else ""
        return RequestError(f"`{name}` is not a field of this endpoint{hint}", param=name)
    if error["type"] == "off":
        right = f"{details['right']}; this engine supports nothing else"
        return wrong(_name((*path, details["name"])), details["value"], right)
    if not path:
        return RequestError(f"the body is {value}: {message}")
    name = _name(path)
    if error["type"] == "missing":
        return RequestError(f"`{name}` is missing", param=name)
    return RequestError(f"`{name}` is {value}: {message[0].lower()}{message[1:]}", param=name)


def _name(path: Iterable[int | str]) -> str:
    parts = (f"[{one}]" if isinstance(one, int) else f".{shown_text(one, SHOWN_CHARACTERS)}" for one in path)
    return "".join(parts).removeprefix(".")


def wrong(name: str, value: object, right: str) -> RequestError:
    return RequestError(f"`{name}` is {shown(value)}: it must be {right}", param=name)


def wrong_value(right: str) -> PydanticCustomError:
    """Return what a validator raises."""
    return PydanticCustomError("wrong", "it must be {right}", {"right": right})


def shown(value: Any) -> str:
    """Return a value as JSON, shortened for a message."""
    return shown_json(value, SHOWN_CHARACTERS)
