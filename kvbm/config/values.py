"""Types of single values of a profile, and `Section`, the strict and frozen base model of every section.

A validator raises ValueError with the end of a message; `mistakes.py` puts the name of the key in front.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
)

from kvbm.config.sizes import exact_size, parse_size
from kvbm.text.outside import without_secrets
from kvbm.types import MAX_SECONDS


class WrongKey(ValueError):
    """A section refuses the value of its key `name`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def size_value(value: object) -> object:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"requires a unit, such as `{value}GB` or `{value}GiB`")
    raise ValueError("must be a size such as 100GB or 64GiB")


AUTO: Literal["auto"] = "auto"  # kvbm chooses


def auto_size_value(value: object) -> object:
    return value if value == AUTO else size_value(value)


def _written_size(size: int | str | None) -> str | None:
    return exact_size(size) if isinstance(size, int) else size


def port_value(value: object) -> object:
    return 0 if value == "auto" else value


def absolute(directory: str) -> str:
    """ValueError for a path that depends on the current directory."""
    if not directory.startswith(("/", "~")):
        raise ValueError(f"must be an absolute path or start with `~`, not `{directory}`")
    return directory


SHARED_SCHEMES = ("s3", "gs", "az", "file", "mooncake")


def shared_url(url: str) -> str:
    """Validate where the shared tier is. ValueError for another kind of place, and for credentials in the URL."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SHARED_SCHEMES:
        known = ", ".join(f"`{name}://`" for name in SHARED_SCHEMES)
        raise ValueError(f"must begin with one of {known}, not `{without_secrets(url)}`")
    if "@" in rest.partition("/")[0]:
        raise ValueError("must not contain credentials; set the variables of the store, such as `AWS_ACCESS_KEY_ID`")
    if "?" in rest or "#" in rest:
        raise ValueError("must have no `?` and no `#`")
    if scheme == "file" and not rest.startswith(("/", "~")):
        raise ValueError(f"must have an absolute path or one that starts with `~`, as `file:///{rest}`")
    if not rest.strip("/"):
        raise ValueError(f"requires a name after `{scheme}://`")
    return url


def environment_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be text, not a boolean: write `'{str(value).lower()}'` or `'1'`")
    return str(value) if isinstance(value, int | float) else value


_COUNT = re.compile(r"(?P<number>(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?)(?P<suffix>[kmgtKMGT]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def count_value(value: object) -> object:
    """Validate a whole number as vLLM accepts it: 8192, `8k` (8000) or `8K` (8192)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and _parsed_count(value) is not None:
        return value
    raise ValueError("must be a whole number of at least 1, optionally with a suffix: `32k` (32000) or `32K` (32768)")


def length_value(value: object) -> object:
    return value if value in ("auto", -1) else count_value(value)


def count_of(value: int | str | None) -> int | None:
    """Return the number of a valid count, None for `auto` and -1, which leave it to the engine."""
    count = _parsed_count(value) if isinstance(value, str) else value
    return None if count == -1 else count


def _parsed_count(text: str) -> int | None:
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    number = Decimal(match["number"]) * _FACTORS[match["suffix"]]
    return int(number) if number == int(number) and number >= 1 else None


def names_value(value: object) -> object:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be a name or a list of names")
    return value


def flag_value(value: object) -> object:
    """Validate the value of a command-line flag: text, a number, a boolean, a list of those, or JSON."""
    if value is None:
        raise ValueError("requires a value; remove the key to use the engine's default")
    if not _is_finite(value):
        raise ValueError("must be a number, not `inf`")
    return value


def option_value(value: object) -> object:
    """Validate the value of an option in a YAML file: JSON, also null."""
    return value if value is None else flag_value(value)


def _is_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


_AT_LEAST_ONE = {"type": "integer", "minimum": 1}
_WITH_SUFFIX = {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?[kmgtKMGT]?\s*$"}
_NAME = {"type": "string", "minLength": 1}
_UNIT = r"^\s*(0|[1-9][0-9]*)(\.[0-9]+)? ?([KkMmGgTtPp][Ii]?)?[Bb]\s*$"

# JSON Schema of values; see `kvbm_cli.profile.schema`.
_SIZE_SCHEMA = {"type": "string", "pattern": _UNIT, "examples": ["64GiB", "100GB"]}
_PORT_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 65535}, {"const": "auto"}]}
_COUNT_SCHEMA = {"anyOf": [_AT_LEAST_ONE, _WITH_SUFFIX]}
_LENGTH_SCHEMA = {"anyOf": [_AT_LEAST_ONE, _WITH_SUFFIX, {"const": "auto"}, {"const": -1}]}
_NAMES_SCHEMA = {"anyOf": [_NAME, {"type": "array", "items": _NAME, "minItems": 1}]}
_FLAG_SCHEMA = {"not": {"type": "null"}}

AbsolutePath = Annotated[str, Field(min_length=1), AfterValidator(absolute)]
SharedUrl = Annotated[str, Field(min_length=1), AfterValidator(shared_url)]
AutoSize = Annotated[
    int | Literal["auto"],
    BeforeValidator(auto_size_value),
    PlainSerializer(_written_size),
    WithJsonSchema({"anyOf": [_SIZE_SCHEMA, {"const": AUTO}]}),
]
Port = Annotated[int, BeforeValidator(port_value), Field(ge=0, le=65535), WithJsonSchema(_PORT_SCHEMA)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
Seconds = Annotated[float, Field(le=MAX_SECONDS, allow_inf_nan=False)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvironmentValue = Annotated[str, BeforeValidator(environment_value), WithJsonSchema({"type": ["string", "number"]})]
Count = Annotated[Any, BeforeValidator(count_value), WithJsonSchema(_COUNT_SCHEMA)]
Length = Annotated[Any, BeforeValidator(length_value), WithJsonSchema(_LENGTH_SCHEMA)]
Names = Annotated[Any, BeforeValidator(names_value), WithJsonSchema(_NAMES_SCHEMA)]
FlagValue = Annotated[JsonValue, BeforeValidator(flag_value), WithJsonSchema(_FLAG_SCHEMA)]
OptionValue = Annotated[JsonValue, BeforeValidator(option_value), WithJsonSchema({})]
