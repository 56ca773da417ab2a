"""Suggests a model of the catalogue for a name that is not in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Words of a name that leave the KV as it is: how the weights are quantized, and what the model was trained for.
_VARIANT = re.compile(
    r"awq|gptq|(nv|mx)?fp[48]|int[48]|bnb|gguf|mlx|exl[23]|quantized(\.w\d+a\d+)?|dynamic|block|unsloth|autoround|\d+bit|w\d+(a\d+)?"
    r"|instruct|chat|it|base|pt|hf|thinking|meta|qat"
)
SAME_KV = (
    "A variant that differs only in training or quantization has the same KV per token, unless its configuration asks "
    "for a narrower KV cache."
)


def suggestion(model: str, names: Iterable[str]) -> str | None:
    """Return a hint with the name of a known model: in other letters, trained or quantized otherwise, or similar."""
    by_name = {_last(name): name for name in names}
    wanted = _last(model)
    if wanted in by_name:
        return f"did you mean `{by_name[wanted]}`?"
    plain = {_plain(name): name for name in by_name.values()}
    if (name := plain.get(_plain(model))) is not None:
        return f"did you mean `{name}`? {SAME_KV}"
    # A model of another size or version has another cache.
    alike = [name for name in by_name if re.findall(r"\d+", name) == re.findall(r"\d+", wanted)]
    near = difflib.get_close_matches(wanted, alike, n=1, cutoff=0.8)
    return f"did you mean `{by_name[near[0]]}`?" if near else None


def _last(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _plain(name: str) -> str:
    return "-".join(word for word in re.split("[-_]", _last(name)) if not _VARIANT.fullmatch(word))
