"""Pieces of text that several parts of the report need."""

from __future__ import annotations

import time


def sentence_case(sentence: str) -> str:
    """Let a sentence start with a capital letter, unless its first word is a name such as `kvbm` or `p99`, and end with
    a stop."""
    first = sentence.partition(" ")[0].rstrip(",:;")
    start = sentence[:1].upper() if first.isalpha() and first != "kvbm" else sentence[:1]
    return start + sentence[1:] + ("" if sentence.endswith((".", "!", "?")) else ".")


def day(unix_s: float | None) -> str | None:
    return None if unix_s is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def anchor(index: int) -> str:
    return f"cell-{index + 1}"
