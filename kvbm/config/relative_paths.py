"""Relative paths of a profile: a path in a file is relative to that file, a path on the command line to its directory.

`engine.model` may also be a name on a model hub and `engine.python` a command, so only some texts are paths:

    ~/x              a path in the home directory
    ./x, ../x        a relative path
    a/b              for `engine.model`: a path if that directory exists, else a name; for the other keys: a path
    x.yaml           for `bench.workload`: a path; `x` alone is a shipped workload
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvbm.config.document import Document, Entry, Source, entry_at

SYNTHETIC = "synthetic:"


def with_absolute_paths(document: Document) -> Document:
    """Return a copy of the document in which the paths are absolute."""
    for key in PATHS:
        section, _, name = key.partition(".")
        entry, holder = entry_at(document, [section, name]), document.get(section)
        if entry is None or holder is None or not isinstance(entry.value, str):
            continue
        changed = replace(entry, value=absolute_path(key, entry.value, entry.source))
        inside: dict[str, Entry] = {**(holder.section or {}), name: changed}
        document = {**document, section: replace(holder, value=inside)}
    return document


def absolute_path(key: str, value: str, source: Source) -> str:
    """Return the absolute path if the value of `key`, written at `source`, is a path, else the value."""
    if value.startswith("~"):
        value = os.path.expanduser(value)
    if not value or "\0" in value or os.path.isabs(value) or value.startswith(SYNTHETIC):
        return value
    path = _directory_of(source) / value
    is_dotted = value.partition("/")[0] in (".", "..")
    return str(path) if is_dotted or PATHS[key](value, path) else value


def _directory_of(source: Source) -> Path:
    """Return the directory of the file, or the current directory for a value of the command line."""
    return Path(os.path.realpath(os.path.dirname(source.label))) if source.line is not None else Path.cwd()


PATHS: dict[str, Callable[[str, Path], bool]] = {
    "engine.model": lambda value, path: os.path.isdir(path),
    "engine.python": lambda value, path: "/" in value,
    "bench.workload": lambda value, path: "/" in value or value.endswith((".yaml", ".yml")),
}
