"""Tokenizers: the byte tokenizer of the synthetic models, and the tokenizer of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.engines.embedded.engine import synthetic_models
from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte, followed by the special tokens. Any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: byte for byte, letter in enumerate(letters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in synthetic_models.SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=synthetic_models.TURN_END,
        pad_token=synthetic_models.END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = synthetic_models.CHAT_TEMPLATE
    return fast


def directory_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model directory. Returns None if it has none; the engine then accepts token ids only."""
    from transformers import AutoTokenizer

    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblem(f"the tokenizer in `{directory}` cannot be loaded: {error}") from error


def letters_of_bytes() -> list[str]:
    """Return the printable character that byte-level tokenizers use for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
