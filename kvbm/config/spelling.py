"""Spellings that users bring along: names in camelCase, values in quotes, variables named by meaning. Hints use them.

An env file is read by programs that disagree about quotes and comments: a shell removes them, `docker run --env-file`
keeps them in the value. Editors and chats replace quotes by typographic ones, which no program removes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass

NEAR = 0.8
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ONE_WORD = re.compile("LoRA|DType")
_QUOTES = "\"'`\u2018\u2019\u201c\u201d\u00ab\u00bb"
_COMMENT = re.compile(r"(?<!\s)\s+#.*", re.DOTALL)


def snake_case(name: str) -> str:
    """Return a name as keys and flags are written: `max_model_len` for `maxModelLen` and `--max-model-len`."""
    words = _WORD_START.sub("_", _ONE_WORD.sub(lambda word: word[0].capitalize(), name.replace("-", "_")))
    return re.sub("_+", "_", words).strip("_").lower()


def unquoted(text: str) -> str | None:
    """Return the text without the quotes around it, None if there are none."""
    is_quoted = len(text) > 1 and text[0] in _QUOTES and text[-1] in _QUOTES
    return text.strip(_QUOTES).strip() if is_quoted else None


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A value with what an env file has added to it. `extra` names it: `quotes`, `comment`, or both."""

    meant: str
    extra: str


def written_in_env_file(text: str, *, may_have_comment: bool = True) -> WrittenValue | None:
    """Return the value without quotes and a comment, None if it has neither."""
    bare = _COMMENT.sub("", text) if may_have_comment else text
    inner = unquoted(bare)
    extra = [name for name, is_there in (("quotes", inner is not None), ("comment", bare != text)) if is_there]
    return WrittenValue(bare if inner is None else inner, " and the ".join(extra)) if extra else None


# Words of a variable's name that mean the same.
_SYNONYMS = {
    **dict.fromkeys(("PATH", "PATHS", "DIRS", "DIRECTORY", "DIRECTORIES", "FOLDER", "LOCATION", "ROOT", "FILE"), "DIR"),
    **dict.fromkeys(("SIZE", "CAPACITY", "GIB", "BYTES", "LIMIT"), "GB"),
    **dict.fromkeys(("HOST", "RAM", "DRAM", "MEMORY", "G2"), "CPU"),
    **dict.fromkeys(("SSD", "NVME", "G3"), "DISK"),
    **dict.fromkeys(("S3", "REMOTE", "G4"), "OBJECT"),
    "BLOCK": "BLOCKS",
    "SECONDS": "SECS",
    "URL": "ENDPOINT",
}
_FILLERS = frozenset({"CACHE", "MAX", "LOCAL", "TYPE", "NUM", "OVERRIDE", "KV"})


def nearest_variable(name: str, known: Collection[str], *, prefix: str) -> str | None:
    """Return the known variable that means the same as `name`, else the most similar one, else the only one that has
    all its words."""
    written = name.strip().removeprefix("export ").strip().upper()
    if written in known:
        return written
    meaning = _meaning(written, prefix)
    meanings = {one: _meaning(one, prefix) for one in known if one.startswith(prefix)}
    same = [one for one, of in meanings.items() if of == meaning]
    nearest = same or difflib.get_close_matches(written, known, n=1, cutoff=NEAR)
    if not nearest and len(meaning := meaning - {"LOG"}):
        longer = [one for one, of in meanings.items() if meaning < of]
        nearest = longer if len(longer) == 1 else []
    return nearest[0] if nearest else None


def _meaning(name: str, prefix: str) -> frozenset[str]:
    words = re.split("[_ ]+", name.removeprefix(prefix))
    return frozenset(_SYNONYMS.get(word, word) for word in words) - _FILLERS
