"""Spellings that users bring along: names in camelCase, and values in quotes. Hints use them."""

from __future__ import annotations

import re

NEAR = 0.8  # similarity of names
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ONE_WORD = re.compile("LoRA|DType")
_QUOTES = "\"'`\u2018\u2019\u201c\u201d\u00ab\u00bb"


def snake_case(name: str) -> str:
    """Return a name as keys and flags are written: `max_model_len` for `maxModelLen` and `--max-model-len`."""
    words = _WORD_START.sub("_", _ONE_WORD.sub(lambda word: word[0].capitalize(), name.replace("-", "_")))
    return re.sub("_+", "_", words).strip("_").lower()


def unquoted(text: str) -> str | None:
    """Return the text without the quotes around it, None if there are none."""
    is_quoted = len(text) > 1 and text[0] in _QUOTES and text[-1] in _QUOTES
    return text.strip(_QUOTES).strip() if is_quoted else None
