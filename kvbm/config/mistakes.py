"""What a file got wrong, in our words and at its place: keys that do not exist yet, and pydantic's findings.

A table maps each of pydantic's error types to a sentence, so that its own phrases do not reach a user. The file is a
profile, or whatever else a `FileKind` describes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvbm.config.document import Document, entry_at, located
from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.schema import Key, keys
from kvbm.errors import ProfileError

NOT_BUILT = {
    "tiers.object": "this version keeps blocks in host memory and on disk; use `tiers.host` and `tiers.disk`",
    "filters": "the section `offload` says what goes where; leave this one out",
}
NOT_BUILT_ENGINES = ("tensorrt-llm", "sglang")


@dataclass(frozen=True, slots=True)
class FileKind:
    """What is said of a file that is checked against a schema. `missing` maps the first part of a key to its hint."""

    noun: str
    keys: tuple[Key, ...]
    missing: Mapping[str, str]


def profile_file(engine: str = ENGINE_KINDS[0]) -> FileKind:
    """A profile, with the keys of that kind of engine."""
    missing = {
        "engine": "add `engine.model`, such as `synthetic:tiny`",
        "tiers": "add `tiers.host.capacity`, such as `64GiB`",
    }
    return FileKind("profile", keys(engine=engine), missing)


def refuse_not_built(document: Document) -> None:
    """ProfileError for the first key or engine that the design has and this version has not."""
    for name, hint in NOT_BUILT.items():
        entry = entry_at(document, name.split("."))
        if entry is not None:
            raise located(f"`{name}` is not in this version", entry.key, hint=hint)
    kind = entry_at(document, ["engine", "kind"])
    if kind is None or kind.value in ENGINE_KINDS:
        return
    if kind.value in NOT_BUILT_ENGINES:
        hint = f"there are {' and '.join(f'`{name}`' for name in ENGINE_KINDS)}"
        raise located(f"engine kind `{kind.value}` is not in this version", kind.source, hint=hint)
    expected = " or ".join(f"'{name}'" for name in ENGINE_KINDS)
    value = {} if kind.section is not None else kind.value
    raise located(
        f"`engine.kind` must be {expected}{_but_is(value)}", kind.key if kind.section is not None else kind.source
    )


def first_mistake(error: ValidationError, document: Document, path: Path | str, kind: FileKind) -> ProfileError:
    """The finding that helps most: an unknown key, which often explains the others, or else the first."""
    details = error.errors(include_url=False)
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    return _explain((unknown or details)[0], document, path, kind)


def _explain(detail: ErrorDetails, document: Document, path: Path | str, kind: FileKind) -> ProfileError:
    """Pydantic's finding in our words, at its place."""
    names = [name for name in detail["loc"] if name != "[key]"]
    if kind.noun == "profile" and names[0] == "engine":
        del names[1:2]  # which kind of engine pydantic took it for
    dotted = ".".join(map(str, names))
    entry = entry_at(document, names)
    if detail["type"] == "extra_forbidden":
        assert entry is not None
        return located(f"unknown key `{dotted}`", entry.key, hint=_nearest_key(dotted, kind))
    if detail["type"] == "missing":
        return ProfileError(f"`{dotted}` is missing\n  {path}", hint=kind.missing[dotted.partition(".")[0]])
    message = f"`{dotted}` {_complaint(detail)}"
    if entry is None:
        return ProfileError(f"{message}\n  {path}")
    return located(message, entry.key if entry.section is not None or "[key]" in detail["loc"] else entry.source)


def _complaint(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    template = _COMPLAINTS.get(detail["type"])
    if detail["type"] == "value_error":
        return str(context["error"])
    if template is None:
        return f"is not valid: {detail['msg']}"
    return template.format(**context) + _but_is(detail["input"])


_COMPLAINTS = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be a name of letters, digits and underscores",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le}",
    "dict_type": "must be a section with keys of its own",
    "model_type": "must be a section with keys of its own",
}


def _but_is(value: object) -> str:
    if value is None:
        return ", not empty"
    if isinstance(value, dict | list):
        return f", not a {'section' if isinstance(value, dict) else 'list'}"
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    shown = f"the text `{value}`" if isinstance(value, str) else f"`{value}`"
    return f", not {shown}" if value != "" else ""


def _nearest_key(dotted: str, kind: FileKind) -> str:
    """Siblings first, then keys of that name elsewhere, then all that the section has."""
    prefix, _, leaf = dotted.rpartition(".")
    siblings = [key.path.rpartition(".")[2] for key in kind.keys if key.path.rpartition(".")[0] == prefix]
    elsewhere = {key.path.rpartition(".")[2]: key.path for key in reversed(kind.keys)}
    close = difflib.get_close_matches(leaf, siblings, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    far = difflib.get_close_matches(leaf, elsewhere, n=1, cutoff=0.8)
    if far:
        return f"did you mean `{elsewhere[far[0]]}`?"
    where = f"`{prefix}`" if prefix else f"a {kind.noun}"
    others = "; flags of vLLM need `engine.kind: vllm`" if prefix == "engine.arguments" else ""
    return f"{where} has {', '.join(f'`{name}`' for name in siblings)}{others}"
