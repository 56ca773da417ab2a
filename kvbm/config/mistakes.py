"""Profile mistakes: converts pydantic errors and unsupported keys to messages with a place in the file.

A table maps each error type of pydantic to a message of ours. The file is a profile or another kind that a `FileKind`
describes.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.engine import DEFAULT_KIND, ENGINE_KINDS, ENGINES, FIRST_KIND
from kvbm.config.key_list import Key, keys
from kvbm.config.spelling import snake_case, unquoted
from kvbm.config.values import WrongKey
from kvbm.text.outside import shortened

TINY = 1e-3  # such a bound only excludes 0
NOT_BUILT = {"tiers.object": "use `tiers.shared`", "filters": "use the section `offload`"}


# Names that users expect, and the correct key.
OTHER_NAMES = {
    "engine.interpreter": "engine.python",
    "engine.args": "engine.arguments",
    "engine.flags": "engine.arguments",
    "engine.env": "engine.environment",
    "engine.type": "engine.kind",
    "tiers.cpu": "tiers.host",
    "tiers.g2": "tiers.host",
    "tiers.g3": "tiers.disk",
    "tiers.ssd": "tiers.disk",
    "tiers.nvme": "tiers.disk",
    "tiers.s3": "tiers.shared",
    "tiers.g4": "tiers.shared",
    "tiers.gcs": "tiers.shared",
    "tiers.mooncake": "tiers.shared",
    "tiers.remote": "tiers.shared",
    "tiers.host.size": "tiers.host.capacity",
    "tiers.disk.size": "tiers.disk.capacity",
    "tiers.disk.path": "tiers.disk.directory",
    "tiers.disk.dir": "tiers.disk.directory",
}


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file and its schema. `missing` maps the first part of a missing key to a hint. `halves` does so for a
    section that another file can add, if the file has another section of `halves`."""

    noun: str
    keys: tuple[Key, ...]
    missing: Mapping[str, str]
    halves: Mapping[str, str] = field(default_factory=dict)


def profile_file(engine: str = FIRST_KIND, given: Sequence[str] = ()) -> FileKind:
    """Return the kind of a profile, with the keys of one engine kind. `given` are the profiles of the command line."""
    missing = {"engine": "add `engine.model`, such as `synthetic:tiny`", "tiers": ENGINES[engine].tiers_hint}
    halves = {
        "engine": f"put a profile with an engine in front: `{_check(DEFAULT_KIND, *given)}`",
        "tiers": f"add a profile with tiers: `{_check(*given, 'storage/large-ssd')}`",
    }
    return FileKind("profile", keys(engine=engine), missing, halves if given else {})


def _check(*references: str) -> str:
    return shlex.join(["kvbm", "profile", "check", *(word for one in references for word in ("-p", one))])


def not_built(document: Document) -> Iterator[Mistake]:
    """Yield a mistake for keys that this version does not support, and for an unknown `kind`."""
    for name, hint in NOT_BUILT.items():
        entry = entry_at(document, name.split("."))
        if entry is not None:
            yield Mistake(f"`{name}` is not supported in this version", entry.key, hint=hint, key=name)
    kind = entry_at(document, ["engine", "kind"])
    if kind is not None and not (isinstance(kind.value, str) and kind.value in ENGINE_KINDS):
        yield _no_engine(kind)


def invalid_text(document: Mapping[str, Entry], section: str = "") -> Iterator[Mistake]:
    """Yield a mistake for text of the command line or a variable that is not UTF-8."""
    for name, entry in document.items():
        key = f"{section}{name}"
        if entry.section is not None:
            yield from invalid_text(entry.section, f"{key}.")
        elif isinstance(entry.value, str) and _SURROGATES.search(entry.value):
            yield Mistake(f"`{key}` must be UTF-8 text, not `{entry.value}`", entry.source, key=key)


_SURROGATES = re.compile("[\ud800-\udfff]")


def _no_engine(kind: Entry) -> Mistake:
    key = "engine.kind"
    expected = " or ".join(f"'{name}'" for name in ENGINE_KINDS)
    value = {} if kind.section is not None else kind.value
    source = kind.key if kind.section is not None else kind.source
    meant = value.lower() if isinstance(value, str) else value
    return Mistake(f"`{key}` must be {expected}{_but_got(value)}", source, hint=_nearest(meant, ENGINE_KINDS), key=key)


def not_sections(document: Document, sections: Collection[str], prefix: str = "") -> Iterator[Mistake]:
    """Yield a mistake for each value in place of a section, which would hide the keys of lower layers."""
    for name, entry in document.items():
        path = f"{prefix}{name}"
        if entry.section is not None:
            yield from not_sections(dict(entry.section), sections, f"{path}.")
        elif path in sections and entry.value is not None:
            message = f"`{path}` must be a section with keys{_but_got(entry.value)}"
            yield Mistake(message, entry.source, hint=_section_meant(entry.value), key=path)


def mistakes_in(
    error: ValidationError, document: Document, path: Path | str, kind: FileKind, *, is_complete: bool = True
) -> list[Mistake]:
    """Convert the errors of pydantic to mistakes with places, without mere consequences of others.

    If the document is not complete, missing keys are not reported.
    """
    details = [
        detail
        for detail in error.errors(include_url=False)
        if is_complete or detail["type"] not in ("missing", "value_error")
    ]
    found = [_explain(detail, document, path, kind) for detail in details]
    meant = {one.meant for one in found if one.meant}
    missing = [one for one, detail in zip(found, details, strict=True) if detail["type"] == "missing"]
    present = [one for one in found if one not in missing]
    return [*present, *_missing_together([one for one in missing if one.key not in meant])]


def _missing_together(missing: Sequence[Mistake]) -> Iterator[Mistake]:
    """Yield one mistake for all missing keys with the same hint."""
    for hint in dict.fromkeys(one.hint for one in missing):
        alike = [one for one in missing if one.hint == hint]
        names = ", ".join(f"`{one.key}`" for one in alike)
        yield Mistake(
            f"{names} {'is' if len(alike) == 1 else 'are'} missing", alike[0].file, hint=hint, key=alike[0].key
        )


def _explain(detail: ErrorDetails, document: Document, path: Path | str, kind: FileKind) -> Mistake:
    names = [name for name in detail["loc"] if name != "[key]"]
    if kind.noun == "profile" and names[0] == "engine":
        del names[1:2]  # the engine kind that pydantic assumed
    if isinstance(wrong := detail.get("ctx", {}).get("error"), WrongKey):
        names.append(wrong.name)
    key = ".".join(map(str, names))
    entry = _entry_or_above(document, names)
    if detail["type"] == "extra_forbidden":
        assert entry is not None
        meant = _nearest_sibling(key, kind) or ""
        return Mistake(f"unknown key `{key}`", entry.key, hint=_nearest_key(key, kind), key=key, meant=meant)
    if detail["type"] == "missing":
        hint = kind.missing[key.partition(".")[0]]
        if key in kind.halves and any(section in document for section in kind.halves):
            hint += f", or {kind.halves[key]}"
        return Mistake(f"`{key}` is missing", path, hint=hint, key=key)
    message = f"`{key}` {_problem(detail)}"
    if any(one.path == key and one.kind == "port" for one in kind.keys):
        message = message.replace("must be a whole number", "must be a whole number or `auto`")
    if entry is None:
        return Mistake(message, path, key=key)
    source = entry.key if entry.section is not None or "[key]" in detail["loc"] else entry.source
    return Mistake(message, source, hint=_hint(detail) or kind.missing.get(key), key=key)


def _entry_or_above(document: Document, names: Sequence[object]) -> Entry | None:
    """Return the entry at `names` or its nearest parent, because values inside a list have no entry."""
    depths = range(len(names), 0, -1)
    return next((entry for depth in depths if (entry := entry_at(document, names[:depth])) is not None), None)


def _hint(detail: ErrorDetails) -> str | None:
    value = detail["input"]
    if isinstance(value, str) and (inner := unquoted(value)):
        return f"remove the quotes around `{shortened(inner)}`"
    if detail["type"] in ("int_type", "float_type") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return "remove the quotes"
    if detail["type"] == "dict_type":
        return _section_meant(value)
    if detail["type"] == "bool_type":
        return _boolean_meant(value)
    if detail["type"] != "literal_error":
        return None
    choices = re.findall("'([^']*)'", detail["ctx"]["expected"])
    return _nearest(value, choices)


_NUMBER = re.compile(r"[1-9][0-9]{0,29}")


def _boolean_meant(value: object) -> str | None:
    text = str(value).strip().lower()
    if text in ("true", "false"):
        return f"write `{text}`, without quotes"
    meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
    return f"write `{meant[text]}`" if text in meant else None


def _section_meant(value: object) -> str | None:
    """Return how to write a list or a text as a section."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return "drop the quotes: JSON in braces is a section"
    text = value[0] if isinstance(value, list) and value else value
    if isinstance(text, str) and (flag := _FLAG.match(text)) is not None:
        return f"write each flag as a key, without hyphens: `{snake_case(flag[1])}: {flag[2] or 'true'}`"
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return "remove the `- ` in front of its keys"
    return None


_FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?:[= ]([^\s-]\S*))?")


def _nearest(value: object, choices: Iterable[str]) -> str | None:
    nearest = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
    return f"did you mean `{nearest[0]}`?" if nearest else None


def expectation_of(detail: ErrorDetails) -> str | None:
    """Return what a value must be, None for another kind of error."""
    template = _PROBLEM_TEXTS.get(detail["type"])
    context = detail.get("ctx", {})
    if {"ge", "gt", "le", "lt"} & context.keys() and str(detail["input"]).lower() == "nan":
        return _PROBLEM_TEXTS["finite_number"]
    if 0 < context.get("ge", 0) < TINY and float(detail["input"]) <= 0:
        return _PROBLEM_TEXTS["greater_than"].format(gt=0)
    whole = {name: int(one) for name, one in context.items() if isinstance(one, float) and one.is_integer()}
    return None if template is None else template.format(**{**context, **whole})


def _problem(detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if (text := expectation_of(detail)) is None:
        return f"is not valid: {detail['msg']}"
    return text + _but_got(detail["input"])


_PROBLEM_TEXTS = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a number",
    "string_type": "must be text",
    "string_unicode": "must be UTF-8 text",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be a name of letters, digits and underscores",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le}",
    "dict_type": "must be a section with keys",
    "model_type": "must be a section with keys",
}


def _but_got(value: object) -> str:
    if value is None:
        return ", not empty"
    if isinstance(value, dict | list):
        return f", not a {'section' if isinstance(value, dict) else 'list'}"
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    shown = f"the text `{shortened(value)}`" if isinstance(value, str) else f"`{value}`"
    return f", not {shown}" if value != "" else ""


def _nearest_sibling(dotted: str, kind: FileKind) -> str | None:
    prefix, _, leaf = dotted.rpartition(".")
    siblings = _siblings(prefix, kind)
    close = [name for name in siblings if name == snake_case(leaf)] or difflib.get_close_matches(leaf, siblings, n=1)
    return ".".join(filter(None, (prefix, close[0]))) if close else None


def _siblings(prefix: str, kind: FileKind) -> list[str]:
    return [key.path.rpartition(".")[2] for key in kind.keys if key.path.rpartition(".")[0] == prefix]


def _nearest_key(dotted: str, kind: FileKind) -> str:
    """Return a hint for an unknown key: a known synonym, a sibling, a key elsewhere, or all keys of the section."""
    prefix, _, leaf = dotted.rpartition(".")
    if leaf == "<<":
        return "merge keys are not supported; use `extends` to share keys"
    if any(key.path == dotted for key in kind.keys):
        return f"write it as a key of its section: `{prefix}: {{{leaf}: ...}}`"
    other = f"{prefix}.{snake_case(leaf)}".lower()
    if kind.noun == "profile" and other in OTHER_NAMES:
        return f"did you mean `{OTHER_NAMES[other]}`?"
    close = _nearest_sibling(dotted, kind)
    if close is not None:
        return f"did you mean `{close.rpartition('.')[2]}`?"
    elsewhere = {key.path.rpartition(".")[2]: key.path for key in reversed(kind.keys)}
    far = difflib.get_close_matches(snake_case(leaf), elsewhere, n=1, cutoff=0.8)
    if far:
        return f"did you mean `{elsewhere[far[0]]}`?"
    if not _siblings(prefix, kind):  # a dot in the key itself
        prefix = ""
    where = f"`{prefix}`" if prefix else f"a {kind.noun}"
    flags = "flags of other engines require their `engine.kind`"
    others = f"; {flags}" if prefix == "engine.arguments" else ""
    return f"keys of {where}: {', '.join(f'`{name}`' for name in _siblings(prefix, kind))}{others}"
