"""Formats the text of a profile, with the description of every key above it.

`#key: value` is a default; remove the `#` to change it. A section without keys is empty, which has no effect. A tier
that the profile does not have is commented out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set

from kvbm.config.document import plain_scalar
from kvbm.config.findings import is_within
from kvbm.config.key_list import Key, keys

WIDTH = 100
MISSING = object()
_PLAIN = re.compile(r"[A-Za-z~/.][\w./~-]*(?::[\w./~-]+)*|[0-9][\w.]*", re.ASCII)

HEAD = """\
# Written by `kvbm profile new`. `kvbm profile check FILE` finds every mistake.
# `#key: value` is a default; remove the `#` to change it.
"""
SHORT_HEAD = "# Written by `kvbm profile new`. `kvbm profile show FILE` lists every key.\n"


def profile_text(values: Mapping[str, object], *, engine: str, extends: Sequence[str] = ()) -> str:
    """Return a profile with `values`, and with every other key of that engine kind as a comment. One that extends other
    profiles contains only `values`."""
    known = keys(engine=engine)
    lines = [f"{SHORT_HEAD}extends: {extends_value(extends)}"] if extends else [HEAD.rstrip()]
    absent = [
        f"tiers.{name}"
        for name in ("host", "disk", "shared")
        if not isinstance(_value(values, f"tiers.{name}"), Mapping)
    ]
    for key in known:
        off = any(is_within(key.path, section) for section in absent)
        lines += _entry(key, values, is_off=off, is_short=bool(extends))
        if key.path == "engine.arguments":
            lines += _undeclared_flags({one.path for one in known}, values)
    return "\n".join([*lines, ""])


def extends_value(references: Sequence[str]) -> str:
    """Return the value of `extends` for at least one reference."""
    return scalar(list(references) if references[1:] else references[0])


def _entry(key: Key, values: Mapping[str, object], *, is_off: bool, is_short: bool) -> Iterator[str]:
    value = _value(values, key.path)
    if is_short and value is MISSING:
        return
    depth = key.path.count(".")
    indent, name = "  " * depth, key.path.rpartition(".")[2]
    is_open = key.is_section and not (is_short and value is None)  # its keys follow
    if depth == 0 or (is_open and not is_short):
        yield ""
    about = "" if is_open and is_short else key.description
    for line in textwrap.wrap(about, WIDTH - len(indent) - 2, break_on_hyphens=False):
        yield f"{indent}# {line}"
    if is_open:
        yield f"{indent}{'#' if is_off else ''}{name}:"
    elif value is not MISSING:
        yield from _written(name, value, indent)
    else:
        yield f"{indent}#{name}: {_default(key)}".rstrip()


def _undeclared_flags(declared: Set[str], values: Mapping[str, object]) -> Iterator[str]:
    """Yield flags that the schema does not declare."""
    given = _value(values, "engine.arguments")
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if f"engine.arguments.{name}" not in declared:
            yield from _written(name, value, "    ")


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
