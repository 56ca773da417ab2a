"""JSON Schema of a profile file, with which an editor completes keys and underlines mistakes.

It is generated from the models and never stricter than they are. It allows what a file may contain and a `Profile` may
not: with `extends` every key is optional, a section may be empty, a tier may be `null`, and another file may add the
engine or the tiers. It checks single values only;
`kvbm profile check` also checks combinations of keys. It uses draft 7, which editors support.
"""

from __future__ import annotations

from typing import Any

from kvbm.config.schema import Profile

DRAFT = "http://json-schema.org/draft-07/schema#"
_EXTENDS = {
    "type": ["string", "array"],
    "minLength": 1,
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "description": "Profile whose keys this file inherits: name of a shipped profile, or path to a file; or a list, of "
    "which a later one overrides the earlier ones.",
}

Schema = dict[str, Any]


def json_schema() -> Schema:
    made = Profile.model_json_schema(ref_template="#/definitions/{model}")
    definitions = {name: _section(one) for name, one in made.pop("$defs").items()}
    profile = _section(made)
    properties = {"extends": _EXTENDS, **profile["properties"]}
    properties["engine"] = _engine(properties["engine"])
    return {
        "$schema": DRAFT,
        "title": "A profile of kvbm",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "if": {"not": {"required": ["extends"]}},
        "then": {"anyOf": _HALVES, "properties": {"engine": _ENGINE_WITHOUT_PARENT}},
        "definitions": definitions,
    }


_HALVES = [{"required": ["engine"]}, {"required": ["tiers"]}]
# Without a parent, an engine requires a model, and the default kind is embedded.
_ENGINE_WITHOUT_PARENT = {
    "required": ["model"],
    "if": {"not": {"required": ["kind"]}},
    "then": {"$ref": "#/definitions/EmbeddedEngine"},
}


def _section(schema: Schema) -> Schema:
    """Return the schema of a model without its docstring and with every key optional."""
    properties = {name: _key(one) for name, one in schema["properties"].items()}
    kept = {name: one for name, one in schema.items() if name not in ("description", "title", "required")}
    return {**kept, "properties": properties}


def _key(schema: Schema) -> Schema:
    """Return the schema of one key. A section may be empty."""
    kept = {name: one for name, one in schema.items() if name != "title"}
    reference = kept.pop("$ref", None)
    if reference is None:
        return kept
    return {**_about(kept), "anyOf": [{"$ref": reference}, {"type": "null"}]}


def _engine(schema: Schema) -> Schema:
    """Return the schema of `engine`: either kind. Without `kind`, the kind of the parent is not known."""
    return {**_about(schema), "anyOf": [*schema["oneOf"], {"type": "null"}]}


def _about(schema: Schema) -> Schema:
    return {"description": schema["description"]}
