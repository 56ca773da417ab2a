"""Key list: every key of a schema with its kind, default and description, for pages, hints and completion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from kvbm.config.engine import FIRST_KIND
from kvbm.config.schema import Profile
from kvbm.config.values import auto_size_value, count_value, environment_value, length_value, names_value, port_value

OWN = frozenset({"engine", "tiers", "extends"})  # no other file has these keys


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a schema. `path` is dotted. A section has keys below it and no default."""

    path: str
    description: str
    kind: str
    default: object
    is_section: bool
    is_required: bool


def keys(model: type[BaseModel] = Profile, *, engine: str = FIRST_KIND) -> tuple[Key, ...]:
    """Return every key in the order of the schema, each section before its keys, with those of one engine kind."""
    return tuple(_walk(model, "", engine))


def _walk(model: type[BaseModel], prefix: str, engine: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = _section_of(field, engine)
        path = f"{prefix}{name}"
        required = field.is_required()
        default = None if required else field.default
        yield Key(path, field.description or "", _kind(field, section), default, section is not None, required)
        if section is not None:
            yield from _walk(section, f"{path}.", engine)


def _section_of(field: FieldInfo, engine: str) -> type[BaseModel] | None:
    kinds = [one for one in _alternatives(field.annotation) if isinstance(one, type)]
    sections = [kind for kind in kinds if issubclass(kind, BaseModel)]
    if len(sections) > 1:
        sections = [section for section in sections if engine in get_args(section.model_fields["kind"].annotation)]
    return sections[0] if sections else None


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types of a union without `Annotated`, or the type itself."""
    return [getattr(one, "__origin__", one) for one in get_args(annotation) or (annotation,)]


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_KINDS_BY_VALIDATOR = {
    auto_size_value: "size, or `auto`",
    port_value: "port",
    count_value: "whole number, such as `32768` or `32K`",
    length_value: "whole number, such as `32768` or `32K`, or `auto`",
    names_value: "name or list of names",
    environment_value: "mapping of names to text",
}


def _kind(field: FieldInfo, section: type[BaseModel] | None) -> str:
    if section is not None:
        return "section"
    annotation: Any = field.annotation
    candidates = [annotation, *get_args(annotation)]
    for holder in [field, *candidates]:
        for validator in _validators(holder):
            if validator in _KINDS_BY_VALIDATOR:
                return _KINDS_BY_VALIDATOR[validator]
    for candidate in candidates:
        if str(candidate).startswith("dict"):
            return "mapping"
        if str(candidate).startswith("typing.Literal"):
            return " or ".join(f"`{choice}`" for choice in get_args(candidate))
    return next(_KINDS[one] for one in (annotation, *_alternatives(annotation)) if one in _KINDS)


def _validators(holder: Any) -> list[Any]:
    metadata: Any = getattr(holder, "metadata", None) or getattr(holder, "__metadata__", ())
    return [entry.func for entry in metadata if isinstance(entry, BeforeValidator)]
