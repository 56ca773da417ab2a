"""The model's own tokenizer, for servers that count no tokens."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.engines.model_facts import model_directory


def model_tokenizer(model: str) -> Callable[[str], list[int]] | None:
    """Return what encodes a text without special tokens.

    None if the library `tokenizers` is not installed here, or the model has no file for it on this machine.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    directory = model_directory(model)
    path = None if directory is None else directory / "tokenizer.json"
    if path is None or not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
