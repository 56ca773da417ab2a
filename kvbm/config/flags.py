"""Flags in `engine.arguments`, whatever the engine: their spelling, and a mistake for each that is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.spelling import snake_case

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def flag_name(written: str) -> str:
    """Return the name of a flag in the schema, with underscores instead of hyphens."""
    return written.replace("-", "_")


def refused_by(document: Document, reason_against: Callable[[str, Entry], tuple[str, str] | None]) -> Iterator[Mistake]:
    """Yield a mistake for each entry of `engine.arguments` with a reason against it: a message and a hint."""
    arguments = entry_at(document, ["engine", "arguments"])
    for name, entry in ((arguments.section if arguments else None) or {}).items():
        if (reason := reason_against(name, entry)) is not None:
            yield Mistake(reason[0], entry.key, hint=reason[1], key=f"engine.arguments.{name}")


def invalid_name(name: str, entry: Entry, *, example: str) -> tuple[str, str] | None:
    """Return the message and the hint for a name that is not written as a flag."""
    if NAME.fullmatch(name):
        return None
    written = entry.key.written if entry.key.line else entry.key.written.rpartition(".")[2]
    meant = snake_case(name)
    hint = f"write `{meant}`" if NAME.fullmatch(meant) else f"write the name as a key, such as `{example}`"
    return f"`{written}` is not a valid flag name", hint
