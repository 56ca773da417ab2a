"""Tokenizers: the byte tokenizer of the synthetic models, and the tokenizer of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.engines.make_model import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END
from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte, followed by the special tokens. Any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
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
