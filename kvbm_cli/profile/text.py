"""Formats the text of a profile, with the description of every key above it.

`#key: value` is a default; remove the `#` to change it. A section without keys is empty, which has no effect. A tier
that the profile does not have is commented out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from kvbm.config.document import plain_scalar
from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.key_list import Key, keys

WIDTH = 100
MISSING = object()
_PLAIN = re.compile(r"[A-Za-z~/.][\w./~-]*(?::[\w./~-]+)*|[0-9][\w.]*", re.ASCII)

HEAD = """\
# Written by `kvbm profile new`. `kvbm profile check FILE` finds every mistake.
# `#key: value` is a default; remove the `#` to change it.
"""
SHORT_HEAD = "# Written by `kvbm profile new`. `kvbm profile show FILE` lists every key.\n"


def whole_text(values: Mapping[str, object], *, engine: str) -> str:
    """Return a profile with `values`, and with every other key of that engine kind as a comment."""
    lines = [HEAD.rstrip()]
    absent = [
        f"tiers.{name}"
        for name in ("host", "disk", "shared")
        if not isinstance(_value(values, f"tiers.{name}"), Mapping)
    ]
    for key in keys(engine=engine):
        off = any(key.path == section or key.path.startswith(f"{section}.") for section in absent)
        lines += _entry(key, values, is_off=off)
    return "\n".join([*lines, ""])


def short_text(values: Mapping[str, object], *, extends: Sequence[str]) -> str:
    """Return a profile that extends others and contains only `values`."""
    described = {key.path: key.description for kind in ENGINE_KINDS for key in keys(engine=kind)}
    return "\n".join([f"{SHORT_HEAD}extends: {extends_value(extends)}", *_section(values, "", described), ""])


def extends_value(references: Sequence[str]) -> str:
    """Return the value of `extends` for at least one reference."""
    return scalar(list(references) if references[1:] else references[0])


def _entry(key: Key, values: Mapping[str, object], *, is_off: bool) -> Iterator[str]:
    depth = key.path.count(".")
    indent, name = "  " * depth, key.path.rpartition(".")[2]
    if depth == 0 or key.is_section:
        yield ""
    for line in textwrap.wrap(key.description, WIDTH - len(indent) - 2, break_on_hyphens=False):
        yield f"{indent}# {line}"
    if key.is_section:
        yield f"{indent}{'#' if is_off else ''}{name}:"
        if key.path == "engine.arguments":
            yield from _undeclared_flags(key, values)
    elif (value := _value(values, key.path)) is not MISSING:
        yield from _written(name, value, indent)
    else:
        yield f"{indent}#{name}: {_default(key)}".rstrip()


def _undeclared_flags(section: Key, values: Mapping[str, object]) -> Iterator[str]:
    """Return flags that the schema does not declare."""
    known = {key.path for kind in ENGINE_KINDS for key in keys(engine=kind)}
    given = _value(values, section.path)
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if f"{section.path}.{name}" not in known:
            yield from _written(name, value, "    ")


def _section(values: Mapping[str, object], prefix: str, described: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    order = list(described)
    known = [name for path in order if (name := path.removeprefix(prefix)) in values and path == f"{prefix}{name}"]
    for name in [*known, *(name for name in values if name not in known)]:
        path, value = f"{prefix}{name}", values[name]
        if not prefix:
            yield ""
        if isinstance(value, dict) and path in described:
            yield f"{indent}{name}:"
            yield from _section(value, f"{path}.", described)
        else:
            about = described.get(path, "")
            yield from (f"{indent}# {line}" for line in textwrap.wrap(about, WIDTH - len(indent) - 2))
            yield from _written(name, value, indent)


def _written(name: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield f"{indent}{scalar(name)}:"
        for below, inside in value.items():
            yield from _written(below, inside, f"{indent}  ")
    else:
        yield f"{indent}{scalar(name)}: {scalar(value)}".rstrip()


def scalar(value: object) -> str:
    """Format a value as one line of YAML that is read back as the same value."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(name)}: {scalar(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    text = str(value)
    return text if _PLAIN.fullmatch(text) and plain_scalar(text) == text else _quoted(text)


def _quoted(text: str) -> str:
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _default(key: Key) -> str:
    if key.default is None or key.default == "" or key.default == {}:
        return f"  # {key.kind}"
    return scalar(key.default)


def _value(values: Mapping[str, object], path: str) -> object:
    """Return the value at `path`, MISSING if there is none."""
    value: object = values
    for name in path.split("."):
        value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
    return value
