"""Escapes characters that a terminal obeys, or that reorder a line. Logs, profiles and servers send any text.

`print_data`, `print_note`, errors, tables, progress lines and `kvbm logs` use `printable`, or `one_line` of
`kvbm.text.outside`. `streams.py` uses `without_commands` for everything else: tracebacks, warnings and log lines of
libraries.
"""

from __future__ import annotations

import re

from kvbm.text.outside import escaped

# C0 without tab and newline, DEL, C1, marks and overrides of text direction, and further ends of a line.
_BIDI = "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f{_BIDI}]")
# Colours and the redrawn line are the only commands that kvbm sends.
_OWN_COMMAND = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[K|\r\n")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """Return the text with escapes such as `\\x1b` for unsafe characters. Keeps tabs and newlines."""
    return _UNSAFE.sub(escaped, text)


def without_commands(text: str) -> str:
    """Like `printable`, but keeps the commands that kvbm itself sends."""
    if _UNSAFE.search(text) is None:
        return text
    kept, start = [], 0
    for command in _OWN_COMMAND.finditer(text):
        kept += [printable(text[start : command.start()]), command[0]]
        start = command.end()
    return "".join([*kept, printable(text[start:])])


def commentable(text: str) -> str:
    """Return the text with `?` for characters that a comment of YAML must not contain, such as a newline."""
    return "".join(character if character.isprintable() else "?" for character in text)


def without_colours(text: str) -> str:
    return _COLOUR.sub("", text)
