"""Suggests a model of the catalogue for a name that is not in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_BITS = r"[wa]?\d{1,2}(bit|a\d{1,2})?"
_QUANTIZED = re.compile(
    rf"([-_.](awq|gptq|fp8|fp4|nvfp4|mxfp4|int[48]|bnb|gguf|mlx|exl[23]|quantized|dynamic|block|unsloth|autoround|{_BITS}))+$"
)
SAME_KV = "A quantized variant has the same KV, unless its configuration asks for a narrower KV cache."
SAME_PER_TOKEN = "A variant that differs only in training has the same KV per token."
_OF_TRAINING = frozenset({"instruct", "chat", "it", "base", "pt", "hf", "thinking", "meta"})  # words of names


def suggestion(model: str, names: Iterable[str]) -> str | None:
    """Return a hint with the name of a known model: in other letters, without its quantization, trained otherwise, or
    similar."""
    by_name = {_last(name): name for name in names}
    wanted = _last(model)
    base = _QUANTIZED.sub("", wanted)
    if wanted in by_name:
        return f"did you mean `{by_name[wanted]}`?"
    if base in by_name:
        return f"did you mean `{by_name[base]}`? {SAME_KV}"
    trained = {_without_training(name): name for name in by_name}
    if (name := trained.get(_without_training(base))) is not None:
        return f"did you mean `{by_name[name]}`? {SAME_PER_TOKEN}{f' {SAME_KV}' if base != wanted else ''}"
    # A model of another size or version has another cache.
    alike = [name for name in by_name if re.findall(r"\d+", name) == re.findall(r"\d+", base)]
    near = difflib.get_close_matches(base, alike, n=1, cutoff=0.8)
    return f"did you mean `{by_name[near[0]]}`?" if near else None


def _last(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _without_training(name: str) -> str:
    return "-".join(word for word in re.split("[-_]", name) if word not in _OF_TRAINING)
