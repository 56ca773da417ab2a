"""The JSON Schema of a profile file, by which an editor completes keys and underlines mistakes.

Made from the models, and never stricter than they are, with what a file may do and a `Profile` may not: `extends` makes
every key optional, a section may be empty, a tier may be `null`. It knows single values; what several keys say together
is found by `kvbm profile check`. Draft 7, which editors understand.
"""

from __future__ import annotations

from typing import Any

from kvbm.config.schema import Profile

DRAFT = "http://json-schema.org/draft-07/schema#"
_EXTENDS = {
    "type": "string",
    "minLength": 1,
    "description": "The profile whose keys count where this one has none: a shipped one by name, or a file.",
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
        "then": {"required": ["engine", "tiers"], "properties": {"engine": _ENGINE_WITHOUT_PARENT}},
        "definitions": definitions,
    }


# Without a parent an engine has a model, and one of no kind is the embedded one.
_ENGINE_WITHOUT_PARENT = {
    "required": ["model"],
    "if": {"not": {"required": ["kind"]}},
    "then": {"$ref": "#/definitions/EmbeddedEngine"},
}


def _section(schema: Schema) -> Schema:
    """The schema of a model without its docstring, and with every key optional."""
    properties = {name: _key(one) for name, one in schema["properties"].items()}
    kept = {name: one for name, one in schema.items() if name not in ("description", "title", "required")}
    return {**kept, "properties": properties}


def _key(schema: Schema) -> Schema:
    """The schema of one key; of a section, one that lets it be empty."""
    kept = {name: one for name, one in schema.items() if name != "title"}
    reference = kept.pop("$ref", None)
    if reference is None:
        return kept
    return {**_about(kept), "anyOf": [{"$ref": reference}, {"type": "null"}]}


def _engine(schema: Schema) -> Schema:
    """Either kind; what names neither may be meant for the parent's, whichever that is."""
    return {**_about(schema), "anyOf": [*schema["oneOf"], {"type": "null"}]}


def _about(schema: Schema) -> Schema:
    return {"description": schema["description"]}
