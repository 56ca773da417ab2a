"""`kvbm profile schema`: the JSON Schema of a profile file, or the description of a key.

With the schema, an editor completes keys and underlines mistakes. It is generated from the models and never stricter
than they are. It allows what a file may contain and a `Profile` may not: with `extends` every key is optional, a
section may be empty, a tier may be `null`, and another file may add the engine or the tiers. It checks single values
only; `kvbm profile check` also checks combinations of keys. It uses draft 7, which editors support.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from typing import Any

from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.key_list import keys
from kvbm.config.schema import Profile
from kvbm.errors import UsageError
from kvbm_cli.profile.show import shown
from kvbm_cli.terminal.console import WIDTH, print_data, print_json

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


def show_schema(key: str | None) -> None:
    """Print the JSON Schema, or the description of a key or section. UsageError for an unknown key."""
    if key is None:
        print_json(json_schema())
        return
    lines = list(_lines(key))
    if not lines:
        raise UsageError(f"unknown key `{key}`", hint=_nearest(key))
    print_data("\n".join(lines))


def _lines(wanted: str) -> Iterator[str]:
    """Describe the key and all keys below it; once per engine kind if the descriptions differ."""
    seen = set()
    for kind in ENGINE_KINDS:
        for key in keys(engine=kind):
            is_below = key.path == wanted or key.path.startswith(f"{wanted}.")
            if not is_below or (about := (key.path, key.kind, key.description)) in seen:
                continue
            seen.add(about)
            default = "" if key.is_section else ", required" if key.is_required else f", default {_shown(key.default)}"
            engine = f" ({kind})" if key.path.startswith("engine.") and _differs_by_engine(key.path) else ""
            yield f"{key.path}{engine}: {key.kind.replace('`', '')}{default}"
            yield from textwrap.wrap(key.description, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _differs_by_engine(path: str) -> bool:
    found = {(key.kind, key.description) for kind in ENGINE_KINDS for key in keys(engine=kind) if key.path == path}
    return len(found) > 1


def _shown(default: object) -> str:
    return "none" if default in (None, "", {}) else shown(default)


def _nearest(wanted: str) -> str:
    paths = [key.path for kind in ENGINE_KINDS for key in keys(engine=kind)]
    by_name = {path.rpartition(".")[2]: path for path in reversed(paths)}
    nearest = difflib.get_close_matches(wanted, paths, n=1) or [
        by_name[name] for name in difflib.get_close_matches(wanted.rpartition(".")[2], by_name, n=1)
    ]
    return f"did you mean `{nearest[0]}`?" if nearest else "`kvbm profile schema tiers` lists the keys of a section"


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
